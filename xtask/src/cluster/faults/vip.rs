//! A virtual address of the control plane by Ballast alone: a static Service on every node, and a list of API servers, one
//! of which is killed.

use anyhow::{Context as _, Result, ensure};

use super::agents::Agents;
use super::table::Parameters;
use super::testbed::SOON;
use super::testbed::Testbed;
use crate::cluster::plan::{CONTROL_V4, CONTROL_VIP, Node, SECOND_V4};
use crate::cluster::{Workdir, control, deployed, each, kubectl, workdir};
use crate::signal;
use crate::workspace::Workspace;

/// Folder of static Services on each node.
const FOLDER: &str = "/var/lib/ballast-manifests";
/// A Service that is created while one API server is away.
const NEWER: &str = "newer";

/// Kills one of two API servers, the one that agents talk to; clients of the virtual address have to continue.
pub(super) fn goes_on(testbed: &Testbed<'_>, parameters: &Parameters) -> Result<()> {
    let workdir = testbed.workdir;
    for node in workdir.nodes() {
        let folder = workdir.node(node).dir().join("lib/ballast-manifests");
        fs_err::create_dir_all(&folder)?;
        fs_err::write(folder.join("control-plane.yaml"), manifest())?;
    }
    let before = workdir.settings();
    let done = control::start_second(workdir)
        .and_then(|()| configure(testbed, true))
        .and_then(|()| with_both(testbed, parameters));
    let restored = signal::clean_up(|| {
        control::start(workdir)?;
        kubectl(workdir, &["delete", "service", NEWER, "--ignore-not-found"]).read()?;
        workdir.write(workdir::SETTINGS, &before.join("\n"))?;
        configure(testbed, false)?;
        workdir.control().stop(control::SECOND, libc::SIGKILL)
    });
    done.and(restored)
}

fn with_both(testbed: &Testbed<'_>, parameters: &Parameters) -> Result<()> {
    let workdir = testbed.workdir;
    signal::wait_for("an answer of the virtual address on every node", SOON, || {
        Ok((asked(workdir, 1)?.1 == 0).then_some(()))
    })?;
    let (_, failed) = asked(workdir, 40)?;
    ensure!(failed == 0, "{failed} requests failed while both API servers ran");
    workdir.control().stop("kube-apiserver", libc::SIGKILL)?;
    let (all, failed) = asked(workdir, 100)?;
    parameters.remark(format!(
        "of {all} requests to https://{CONTROL_VIP}:6443 from processes of all nodes in the seconds after one of two API \
         servers was killed, {failed} failed; the others did not wait"
    ));
    // A process whose connection goes to the dead server gets ECONNREFUSED, at most once in 1 s, then 4 s, then 16 s on a node.
    ensure!(failed * 4 <= all, "{failed} of {all} requests failed");
    let server = format!("--server=https://{CONTROL_VIP}:6443");
    // kubectl does not retry, and its connection may be the one that goes to the dead server.
    let until_done = |what: &str, words: &[&str]| {
        let mut refused = 0;
        signal::wait_for(what, SOON, || match workdir.node(Node(1)).command(words).read() {
            Ok(_) => Ok(Some(())),
            Err(error) if format!("{error:#}").contains("connection refused") => {
                refused += 1;
                Ok(None)
            }
            Err(error) => Err(error),
        })?;
        Ok::<_, anyhow::Error>(refused)
    };
    let create = ["kubectl", &server, "create", "service", "clusterip", NEWER, "--tcp=80:8080"];
    let refused = until_done("a Service to be created by the virtual address", &create)?;
    let programmed = signal::wait_for("the agents to hear of a new Service", SOON, || {
        let has = |node: &Node| {
            let list = workdir.node(*node).command(&["ballast", "service", "list"]).try_read();
            list.is_some_and(|list| list.contains(NEWER))
        };
        Ok(testbed.nodes().iter().all(has).then_some(()))
    });
    let refused = refused
        + until_done("its removal", &["kubectl", &server, "delete", "service", NEWER, "--ignore-not-found"])?;
    parameters
        .remark(format!("{refused} of {} calls of kubectl by the address met the dead server", refused + 2));
    programmed
}

/// Configures the folder and both API servers on the agents, or restores the earlier configuration.
fn configure(testbed: &Testbed<'_>, wanted: bool) -> Result<()> {
    let workdir = testbed.workdir;
    if testbed.agents == Agents::Pods {
        let hosts =
            format!("apiServer.host=,apiServer.hosts={{{CONTROL_V4},{SECOND_V4}}},manifests={FOLDER}");
        let words: &[&str] = if wanted { &["--set", &hosts] } else { &[] };
        return deployed::upgrade(&Workspace::find()?, workdir, words);
    }
    if wanted {
        let mut settings = workdir.settings();
        settings.push(format!("BALLAST_MASTER=https://{CONTROL_V4}:6443,https://{SECOND_V4}:6443"));
        settings.push(format!("BALLAST_MANIFESTS={FOLDER}"));
        workdir.write(workdir::SETTINGS, &settings.join("\n"))?;
    }
    testbed.agents.replace(workdir)
}

/// Sends `times` requests to the virtual address on each node in parallel; returns the numbers of requests and of failures.
fn asked(workdir: &Workdir, times: u32) -> Result<(u32, u32)> {
    let failed = std::sync::atomic::AtomicU32::new(0);
    let script = format!(
        "failed=0; for i in $(seq {times}); do \
         curl -sk -m 5 -o /dev/null https://{CONTROL_VIP}:6443/livez || failed=$((failed + 1)); sleep 0.05; \
         done; echo $failed"
    );
    let nodes = workdir.nodes();
    each(&nodes, |node| {
        let output = workdir.node(node).command(&["sh", "-c", &script]).read()?;
        let count: u32 = output.trim().parse().context("no number")?;
        failed.fetch_add(count, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    })?;
    Ok((times * nodes.len() as u32, failed.into_inner()))
}

fn manifest() -> String {
    let text = include_str!("../../../tools/cluster/control-plane.yaml");
    text.replace("CONTROL_VIP", CONTROL_VIP).replace("CONTROL_V4", CONTROL_V4).replace("SECOND_V4", SECOND_V4)
}
