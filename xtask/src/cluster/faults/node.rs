//! Faults of a node: its file systems, memory, devices and addresses.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::table::Unsupported;
use super::testbed::{self, Testbed};
use super::{agents, objects, rolling};
use crate::cluster::plan::Node;
use crate::cluster::{Proxy, Workdir, apply, kubectl};
use crate::exec::Cmd;
use crate::signal;

/// Time limit for something that the agents check periodically, with some margin.
const PERIOD: Duration = Duration::from_secs(75);
/// Memory limit, far below what the programs and maps take.
const LITTLE: &str = "8M";

/// Unmounts the bpffs with all pins: the agent mounts a new one and pins everything again, so that it can be killed.
pub(super) fn bpffs_unmounted(testbed: &Testbed<'_>) -> Result<()> {
    if testbed.agents == agents::Agents::Pods {
        let why = "a container may not mount, and keeps the bpffs that it began with";
        return Err(Unsupported(why.into()).into());
    }
    let node = Node(1);
    let links = "ls /sys/fs/bpf/ballast/links /sys/fs/bpf/ballast/v*";
    let before = on(testbed.workdir, node, links)?;
    on(testbed.workdir, node, "umount --lazy /sys/fs/bpf")?;
    let mut now = String::new();
    let restored = signal::wait_for("all pins to be there again", PERIOD, || {
        now = on(testbed.workdir, node, links).unwrap_or_default();
        Ok((now == before).then_some(()))
    });
    restored.with_context(|| difference(&before, &now))?;
    testbed.agents.kill(testbed.workdir, node, super::table::GONE)
}

/// Returns the lines that only one of both texts has.
fn difference(before: &str, now: &str) -> String {
    let lacks = |text: &str, other: &str| {
        let lines = text.lines().filter(|line| !other.lines().any(|there| there == *line));
        lines.collect::<Vec<_>>().join(" ")
    };
    format!("gone: {}; new: {}", lacks(before, now), lacks(now, before))
}

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

/// Creates more Services than a map has room for: the existing ones continue to work, and the agent reports the problem.
pub(super) fn map_full(testbed: &Testbed<'_>) -> Result<()> {
    const MOST: u64 = 1_000;
    let workdir = testbed.workdir;
    let shown = on(workdir, Node(1), "bpftool -j map show pinned /sys/fs/bpf/ballast/services")?;
    let shown: serde_json::Value = serde_json::from_str(&shown).context("bpftool printed no JSON")?;
    let room =
        shown.get("max_entries").and_then(serde_json::Value::as_u64).context("a map without a size")?;
    if room > MOST {
        let how = "`cargo xtask test cluster up --setting BALLAST_MAX_FRONTENDS=256`";
        return Err(Unsupported(format!(
            "there is room for {room} addresses of Services; a cluster for this: {how}"
        ))
        .into());
    }
    let applied = apply(workdir, &objects::many(testbed::NAME, room));
    let rejected = applied.and_then(|()| {
        signal::wait_for("`ballast status` to report it", testbed::SOON, || {
            Ok((!workdir.node(Node(1)).command(&["ballast", "status"]).succeeds()).then_some(()))
        })
    });
    // The endpoints of the existing Services can still change.
    let changed = rejected.and_then(|()| testbed.scale(testbed::PODS + 1));
    kubectl(workdir, &["delete", "services", "-l", objects::MANY]).read()?;
    changed?;
    signal::wait_for("`ballast status` to be well again", PERIOD, || {
        Ok(workdir.node(Node(1)).command(&["ballast", "status"]).succeeds().then_some(()))
    })?;
    testbed.scale(testbed::PODS)?;
    rolling::await_equal(testbed)
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

/// Attaches foreign programs to each hook that Ballast uses, and detaches them, several times.
pub(super) fn foreign_programs(testbed: &Testbed<'_>) -> Result<()> {
    let us = std::env::current_exe().context("cannot find our own program")?.display().to_string();
    for hook in super::foreign::Hook::ALL {
        for _ in 0..5 {
            signal::check()?;
            let output =
                testbed.workdir.node(Node(1)).command(&[&us, "test", "cluster", "foreign", hook]).read();
            output.with_context(|| format!("a program at {hook}"))?;
        }
    }
    Ok(())
}

/// Reports that this fault is not possible: the clock of the whole machine cannot be changed, and the kernel has no
/// namespace for it.
pub(super) fn clocks_jump(_testbed: &Testbed<'_>) -> Result<()> {
    let namespaces = ["--user", "--map-root-user", "--time"];
    let tried = Cmd::new("unshare").args(namespaces).args(["date", "--set", "+1 hour"]).read();
    let Err(error) = tried else { bail!("the clock of the whole machine could be changed") };
    Err(Unsupported(format!("a clock belongs to the whole machine, also in a time namespace: {error:#}"))
        .into())
}

fn on(workdir: &Workdir, node: Node, script: &str) -> Result<String> {
    workdir.node(node).command(&["sh", "-c", script]).read()
}
