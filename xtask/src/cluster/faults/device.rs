//! A pod's device, created as a CNI plugin does; the packet programs have to be attached on the node's side.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use super::testbed::{self, SOON, Testbed};
use crate::cluster::plan::Node;
use crate::exec::Cmd;
use crate::signal;

/// How often the device is created and removed.
const ROUNDS: usize = 10;
/// An address in the first node's pod range that no pod has had.
const ADDRESS: &str = "10.244.1.250";

/// Creates the device, calls the Service through it on the packet path, and removes it; nothing of it may remain.
pub(super) fn comes_and_goes(testbed: &Testbed<'_>) -> Result<()> {
    let at_first = attached(testbed)?;
    for round in 0..ROUNDS {
        signal::check()?;
        let made = on_node(
            testbed,
            &format!(
                "ip netns add fault && ip link add fault0 type veth peer name eth0 netns fault \
             && echo 1 > /proc/sys/net/ipv4/conf/fault0/proxy_arp && ip link set fault0 up \
             && ip route add {ADDRESS}/32 dev fault0 \
             && ip -n fault address add {ADDRESS}/32 dev eth0 && ip -n fault link set eth0 up \
             && ip -n fault route add 169.254.1.1 dev eth0 && ip -n fault route add default via 169.254.1.1"
            ),
        );
        let served = made.and_then(|_| {
            signal::wait_for("an answer through the new device", SOON, || {
                Ok(call(testbed)?.succeeds().then_some(()))
            })
        });
        let meanwhile = attached(testbed);
        // Both ends are removed with the netns, as when a pod ends.
        on_node(testbed, "ip netns delete fault; ip link delete fault0 2>/dev/null; true")?;
        served.with_context(|| format!("round {round}"))?;
        let (meanwhile, more) = (meanwhile?, "no program is attached to the new device");
        ensure!(meanwhile.lines().count() > at_first.lines().count(), "{more}: {meanwhile}");
        signal::wait_for("the device's pins and entries to go", SOON, || {
            Ok((attached(testbed)? == at_first).then_some(()))
        })?;
    }
    Ok(())
}

/// Returns a command that calls the Service from that netns. Its process is outside the node's cgroup, so no socket program
/// translates the connection.
fn call(testbed: &Testbed<'_>) -> Result<Cmd> {
    let pid = testbed.workdir.node(Node(1)).pid().context("the node does not run")?;
    // The names of network namespaces are in the node's own /run.
    let own: PathBuf = ["/proc", &pid.to_string(), "root", "run/netns/fault"].iter().collect();
    let network = format!("--net={}", own.display());
    let url = format!("http://{}/hostname", testbed::ADDRESS);
    Ok(Cmd::new("nsenter").args([&network, "curl", "-sf", "-m", "1", &url]))
}

/// Returns the pins of links, filters and qdiscs, and the number of devices that the programs know.
fn attached(testbed: &Testbed<'_>) -> Result<String> {
    let entries = "bpftool map dump pinned /sys/fs/bpf/ballast/devices | grep -c -w key; true";
    let folders = "/sys/fs/bpf/ballast/links /sys/fs/bpf/ballast/filters /sys/fs/bpf/ballast/qdiscs";
    on_node(testbed, &format!("ls {folders}; {entries}"))
}

fn on_node(testbed: &Testbed<'_>, script: &str) -> Result<String> {
    testbed.workdir.node(Node(1)).command(&["sh", "-c", script]).read()
}
