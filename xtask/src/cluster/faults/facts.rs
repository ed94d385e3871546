//! Checks that are needed because nodes share this machine's kernel, and because there are many kinds of pods.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::testbed::{SOON, Testbed};
use crate::cluster::image::AGNHOST;
use crate::cluster::plan::Node;
use crate::cluster::{apply, kubectl};
use crate::signal;
use crate::workspace::Workspace;

const LABEL: &str = "faults=facts";
/// A Service with one pod, which only the pod's node may serve.
const LOCAL: &str = "local";

/// Checks that two nodes have separate BPF file systems, cgroups, programs and maps.
pub(super) fn nothing_is_shared(testbed: &Testbed<'_>) -> Result<()> {
    let (one, other) = (Node(1), Node(2));
    let read = |node: Node, script: &str| testbed.workdir.node(node).command(&["sh", "-c", script]).read();
    // If the nodes shared an object, both would show the same identity, which the kernel assigns once.
    let identities = [
        (
            "maps",
            "for map in /sys/fs/bpf/ballast/v*/*; do bpftool -j map show pinned $map; done | grep -o '\"id\":[0-9]*'",
        ),
        (
            "links",
            "for link in /sys/fs/bpf/ballast/links/*; do bpftool -j link show pinned $link; done | grep -o '\"id\":[0-9]*'",
        ),
        ("file systems of pins", "stat -f -c %i /sys/fs/bpf; stat -c %d /sys/fs/bpf"),
        ("control groups", "find /sys/fs/cgroup -path '*machine*' -name cgroup.procs -printf '%i\\n'"),
        ("networks", "readlink /proc/self/ns/net"),
    ];
    for (what, script) in identities {
        let (here, there) = (read(one, script)?, read(other, script)?);
        ensure!(!here.trim().is_empty(), "{one} shows no {what}");
        let shared =
            here.lines().filter(|line| *line != "0").find(|line| there.lines().any(|other| other == *line));
        ensure!(shared.is_none(), "{one} and {other} share {what}: {}", shared.unwrap_or_default());
    }
    read(one, "mkdir /sys/fs/bpf/only-here && test -d /sys/fs/bpf/only-here")?;
    let leaked = read(other, "test -e /sys/fs/bpf/only-here").is_ok();
    read(one, "rmdir /sys/fs/bpf/only-here")?;
    ensure!(!leaked, "{other} sees the file system of pins of {one}");
    local_is_local(testbed, one, other)
}

/// Checks that one address leads to a pod on one node and nowhere on the other: each socket uses its own node's maps.
fn local_is_local(testbed: &Testbed<'_>, one: Node, other: Node) -> Result<()> {
    let mut objects = super::objects::served(LOCAL, 1, Some(one))?;
    if let Some(service) = objects.get_mut(1) {
        service["spec"]["internalTrafficPolicy"] = json!("Local");
    }
    let done = (|| {
        apply(testbed.workdir, &json!({ "apiVersion": "v1", "kind": "List", "items": objects }))?;
        kubectl(testbed.workdir, &["rollout", "status", &format!("deployment/{LOCAL}"), "--timeout=60s"])
            .read()?;
        let address =
            kubectl(testbed.workdir, &["get", "service", LOCAL, "-o", "jsonpath={.spec.clusterIP}"])
                .read()?;
        let url = format!("http://{address}/hostname");
        let call = |node: Node| testbed.workdir.node(node).command(&["curl", "-sS", "-m", "2", &url]).read();
        signal::wait_for("the Service on its node", SOON, || Ok(call(one).ok()))?;
        ensure!(call(other).is_err(), "{other} serves what is for {one} alone");
        Ok(())
    })();
    kubectl(
        testbed.workdir,
        &[
            "delete",
            &format!("deployment/{LOCAL}"),
            &format!("service/{LOCAL}"),
            "--wait=false",
            "--ignore-not-found",
        ],
    )
    .read()?;
    done
}

/// Checks pods created before and after the agent's start, in the node's netns and in their own, also in their own cgroup
/// namespace: each calls a Service by its name, which needs DNS (UDP) and the Service (TCP).
pub(super) fn all_pods_are_served(testbed: &Testbed<'_>) -> Result<()> {
    let (workdir, proxy) = (testbed.workdir, testbed.agents.proxy());
    let workspace = Workspace::find()?;
    proxy.stop(&workspace, workdir)?;
    let made = || {
        make(testbed, "before")?;
        // The pods run, and wait for an answer.
        running(testbed, "before")
    };
    let done = made();
    let started = signal::clean_up(|| proxy.start(&workspace, workdir, None));
    let all = ["wait", "--for=jsonpath={.status.phase}=Succeeded", "pods", "-l", LABEL, "--timeout=90s"];
    let served = done.and(started).and_then(|()| make(testbed, "after")).and_then(|()| {
        kubectl(workdir, &all).read()?;
        Ok(())
    });
    kubectl(workdir, &["delete", "pods", "-l", LABEL, "--grace-period=1"]).read()?;
    served
}

fn make(testbed: &Testbed<'_>, when: &str) -> Result<()> {
    let mut items = Vec::new();
    for node in testbed.nodes() {
        for in_host_network in [false, true] {
            for in_own_cgroups in [false, true] {
                items.push(pod(when, node, in_host_network, in_own_cgroups));
            }
        }
    }
    apply(testbed.workdir, &json!({ "apiVersion": "v1", "kind": "List", "items": items }))
}

fn running(testbed: &Testbed<'_>, when: &str) -> Result<()> {
    let label = format!("{LABEL},when={when}");
    kubectl(testbed.workdir, &["wait", "--for=condition=Ready", "pods", "-l", &label, "--timeout=90s"])
        .read()
        .map(|_| ())
}

fn pod(when: &str, node: Node, in_host_network: bool, in_own_cgroups: bool) -> Value {
    let ask = "until curl -sf -m 2 http://echo.default.svc.cluster.local/hostname; do sleep 0.5; done";
    let own = format!(
        "export was=$(readlink /proc/self/ns/cgroup); \
         exec unshare --cgroup sh -c 'test $was != $(readlink /proc/self/ns/cgroup) && {ask}'"
    );
    let network = if in_host_network { "host" } else { "own" };
    let cgroups = if in_own_cgroups { "-cgroups" } else { "" };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": format!("{when}-{network}{cgroups}-{node}"),
            "namespace": "default",
            "labels": { "faults": "facts", "when": when },
        },
        "spec": {
            "nodeName": node.to_string(),
            "hostNetwork": in_host_network,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "client",
                "image": AGNHOST,
                "command": ["sh", "-c", if in_own_cgroups { &own } else { ask }],
                "securityContext": { "privileged": in_own_cgroups },
            }],
        },
    })
}
