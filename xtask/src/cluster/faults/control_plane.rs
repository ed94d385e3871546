//! Faults of the control plane: agents continue with their last state, and take over the new state afterwards.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fs_err as fs;
use serde_json::json;

use super::testbed::{self, Testbed};
use super::{agents, rolling};
use crate::cluster::{Workdir, apply, control, deployed, kubectl, node};
use crate::exec::Cmd;
use crate::signal;

/// Time limit for watchers to notice that etcd was restored. The watchers of Kubernetes itself need as long.
const PATIENCE: Duration = Duration::from_mins(3);
/// A Service that is missing in the snapshot.
const LATER: &str = "later";

/// Stops the API server for `away`: in `faults`, by default longer than a liveness probe needs to kill a container. Pods
/// change right before, so that their last update never arrives, and afterwards.
///
/// `then`: the numbers of pods afterwards, one after the other.
pub(super) fn api_away(testbed: &Testbed<'_>, away: Duration, then: &[u8]) -> Result<()> {
    let before = agents::processes(testbed.workdir)?;
    let deployment = format!("deployment/{}", testbed::NAME);
    let pods = (testbed::PODS + 2).to_string();
    kubectl(testbed.workdir, &["scale", &deployment, &format!("--replicas={pods}")]).read()?;
    let went_on = without_api(testbed, away);
    let restored = signal::clean_up(|| control::start(testbed.workdir));
    went_on.and(restored)?;
    ensure!(agents::processes(testbed.workdir)? == before, "an agent was started again meanwhile");
    then.iter().try_for_each(|pods| testbed.scale(*pods))?;
    rolling::await_equal(testbed)
}

/// Stops the API server, and checks for a while that every agent goes on.
fn without_api(testbed: &Testbed<'_>, away: Duration) -> Result<()> {
    let machine = testbed.workdir.control();
    // SIGKILL, because they take long to end otherwise. A controller manager that continued alone would consider every node gone.
    for program in ["kube-controller-manager", "kube-apiserver"] {
        machine.stop(program, libc::SIGKILL)?;
    }
    let start = Instant::now();
    while start.elapsed() < away {
        signal::check()?;
        for node in testbed.nodes() {
            let livez = ["curl", "-sf", "http://127.0.0.1:10256/livez"];
            let lives = testbed.workdir.node(node).command(&livez).succeeds();
            ensure!(lives, "/livez of {node} fails without an API server");
        }
        sleep(Duration::from_secs(2));
    }
    Ok(())
}

/// Restores etcd from a snapshot taken before pods and a Service were created: resource versions are used again, for other
/// objects.
pub(super) fn etcd_restored(testbed: &Testbed<'_>) -> Result<()> {
    let workdir = testbed.workdir;
    let data = workdir.control().dir().join("lib/etcd");
    let snapshot = workdir.dir().join("etcd-snapshot");
    let before = agents::processes(workdir)?;
    // What an interrupted run has left: `cp` would copy into an existing folder.
    if snapshot.exists() {
        fs::remove_dir_all(&snapshot)?;
    }
    kubectl(workdir, &["delete", "service", LATER, "--ignore-not-found"]).read()?;
    replace_store(workdir, || copy(&data, &snapshot))?;
    let mut later = super::objects::served(LATER, 1, None)?;
    later.remove(0);
    // Its endpoints are pods that exist already.
    if let Some(service) = later.first_mut() {
        service["spec"]["selector"] = json!({ "app": testbed::NAME });
    }
    apply(workdir, &json!({ "apiVersion": "v1", "kind": "List", "items": later }))?;
    testbed.scale(testbed::PODS + 2)?;
    rolling::await_equal(testbed)?;
    replace_store(workdir, || {
        fs::remove_dir_all(&data)?;
        copy(&snapshot, &data)
    })?;
    fs::remove_dir_all(&snapshot)?;
    let known = kubectl(workdir, &["get", "service", LATER]).succeeds();
    ensure!(!known, "the snapshot knows what came after it");
    // Check before the kubelets restart: a starting kubelet ends the pods that the snapshot lacks, and no EndpointSlice says so.
    rolling::await_equal_within(testbed, PATIENCE)?;
    // Restart the kubelets, as Kubernetes' instructions for a restore demand: a kubelet's watch continues from a version of
    // the lost history, and the kubelet would never learn that a pod has to end.
    for node in testbed.nodes() {
        workdir.node(node).stop("kubelet", libc::SIGTERM)?;
        node::start_kubelet(workdir, node)?;
    }
    rolling::await_equal_within(testbed, PATIENCE)?;
    ensure!(agents::processes(workdir)? == before, "an agent was started again meanwhile");
    // A pod without a record in etcd ends.
    testbed.scale(testbed::PODS)?;
    rolling::await_equal_within(testbed, PATIENCE)
}

/// Stops the control plane, changes the store, and starts the control plane again; the components' watches would end anyway.
fn replace_store(workdir: &Workdir, change: impl FnOnce() -> Result<()>) -> Result<()> {
    let machine = workdir.control();
    for program in control::PROGRAMS.iter().rev() {
        machine.stop(program, if *program == "etcd" { libc::SIGTERM } else { libc::SIGKILL })?;
    }
    let changed = change();
    let restored = signal::clean_up(|| control::start(workdir));
    changed.and(restored)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    Cmd::new("cp").arg("-a").arg(from).arg(to).read().map(|_| ())
}

/// Gives the agents far too little memory: the kernel kills them repeatedly, which must not end any connection.
pub(super) fn out_of_memory(testbed: &Testbed<'_>) -> Result<()> {
    use super::agents::Agents;
    let workdir = testbed.workdir;
    if testbed.agents == Agents::Host {
        for node in testbed.nodes() {
            super::node::starve(workdir, node)?;
        }
        return Ok(());
    }
    let workspace = crate::workspace::Workspace::find()?;
    let little = ["--set", "resources.limits.memory=16Mi,resources.requests.memory=16Mi"];
    deployed::upgrade_to(&workspace, workdir, crate::chart::Helm::find(&workspace)?.chart(), &little)?;
    let path = "jsonpath={.items[*].status.containerStatuses[*].lastState.terminated.reason}\
                {.items[*].status.containerStatuses[*].state.terminated.reason}";
    let label = "app.kubernetes.io/name=ballast";
    let killed = signal::wait_for("a container to be killed for its memory", PATIENCE, || {
        sleep(Duration::from_millis(500));
        let reasons =
            kubectl(workdir, &["get", "pods", "-n", deployed::SPACE, "-l", label, "-o", path]).read()?;
        Ok(reasons.contains("OOMKilled").then_some(()))
    });
    let killed = killed.and_then(|()| signal::pause(Duration::from_secs(10)));
    deployed::upgrade(&workspace, workdir, &[])?;
    killed
}
