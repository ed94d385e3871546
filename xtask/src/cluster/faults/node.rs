//! Faults of a node: its file systems, memory, devices and addresses.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::table::Unsupported;
use super::testbed::{self, Testbed};
use crate::cluster::plan::Node;
use crate::cluster::{Proxy, Workdir};
use crate::signal;

/// Memory limit, far below what the programs and maps take.
const LITTLE: &str = "8M";

/// Starts the agent of a node with far too little memory until the kernel has killed it three times, then without a limit.
pub(super) fn starve(workdir: &Workdir, node: Node) -> Result<()> {
    const GROUP: &str = "/sys/fs/cgroup/memory/starved";
    let machine = workdir.node(node);
    if !machine.command(&["test", "-d", "/sys/fs/cgroup/memory"]).succeeds() {
        return Err(Unsupported("no memory controller of cgroup v1 at /sys/fs/cgroup/memory".into()).into());
    }
    machine.stop("ballast", libc::SIGKILL)?;
    let join = format!("echo $$ > {GROUP}/cgroup.procs; exec \"$@\"");
    let kills = || -> Result<u32> {
        let output = on(workdir, node, &format!("grep -w oom_kill {GROUP}/memory.oom_control"))?;
        output.split_whitespace().nth(1).and_then(|count| count.parse().ok()).context("no count of kills")
    };
    let user = workdir.kubeconfig("proxy").display().to_string();
    let name = node.to_string();
    let starved = || -> Result<()> {
        on(workdir, node, &format!("mkdir -p {GROUP} && echo {LITTLE} > {GROUP}/memory.limit_in_bytes"))?;
        for round in 1..=3 {
            signal::check()?;
            let agent = ["ballast", "run", "--kubeconfig", &user, "--hostname-override", &name];
            machine.run("ballast", &[&["sh", "-c", &join, "sh"][..], &agent].concat())?;
            signal::wait_for(&format!("the kernel to kill the agent of {node}"), testbed::SOON, || {
                Ok((kills()? >= round && !machine.is_running("ballast")).then_some(()))
            })?;
        }
        Ok(())
    };
    let starved = starved();
    let restored = signal::clean_up(|| {
        // It runs if the kernel has not killed it.
        machine.stop("ballast", libc::SIGKILL)?;
        Proxy::BallastHost.start_on(workdir, node)?;
        on(workdir, node, &format!("rmdir {GROUP}"))
    });
    starved.and(restored.map(|_| ()))
}

/// Repeatedly takes down the link of the second node, whose pods are endpoints, for a moment.
pub(super) fn uplink_flaps(testbed: &Testbed<'_>) -> Result<()> {
    let control = testbed.workdir.control();
    for _ in 0..10 {
        signal::check()?;
        control.command(&["ip", "link", "set", "node2", "down"]).read()?;
        sleep(Duration::from_millis(200));
        control.command(&["ip", "link", "set", "node2", "up"]).read()?;
        signal::pause(Duration::from_secs(2))?;
    }
    Ok(())
}

/// Adds an address to a node, which has to serve node ports at once, and removes it.
pub(super) fn address_changes(testbed: &Testbed<'_>) -> Result<()> {
    const NEW: [&str; 3] = ["172.30.0.97", "172.30.0.98", "172.30.0.99"];
    let node = testbed.workdir.node(Node(1));
    let outside = testbed.workdir.control();
    for new in NEW {
        let with_prefix = format!("{new}/24");
        node.command(&["ip", "address", "add", &with_prefix, "dev", "eth0"]).read()?;
        let url = format!("http://{new}:{}/hostname", testbed::NODE_PORT);
        let answered = signal::wait_for("the node port at the new address", testbed::SOON, || {
            Ok(outside.command(&["curl", "-sf", "-m", "1", &url]).try_read())
        });
        node.command(&["ip", "address", "del", &with_prefix, "dev", "eth0"]).read()?;
        answered?;
        let listed = ["ballast", "explain", "host", &format!("{new}:{}", testbed::NODE_PORT), "-o", "json"];
        signal::wait_for("the old address to be served no longer", testbed::SOON, || {
            Ok((!node.command(&listed).read()?.contains("\"forward\"")).then_some(()))
        })?;
    }
    Ok(())
}

fn on(workdir: &Workdir, node: Node, script: &str) -> Result<String> {
    workdir.node(node).command(&["sh", "-c", script]).read()
}
