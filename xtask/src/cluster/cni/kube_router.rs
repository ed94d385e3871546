//! kube-router, as its manifest `kubeadm-kuberouter.yaml` runs it: routes between the nodes by BGP, and network policies.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use fs_err as fs;
use serde_json::{Value, json};

use crate::cluster::control::kubectl;
use crate::cluster::machine::Machine;
use crate::cluster::plan::{Node, SERVICE_RANGES, each};
use crate::cluster::workdir::Workdir;
use crate::signal::wait_for;

/// The daemon of each node.
pub const DAEMON: &str = "kube-router";
/// Part of the rule by which packets of pods are masqueraded.
pub const MASQUERADE: &str = "kube-router-pod-subnets src";
/// Name of the file that configures the network; the daemon adds the pods' ranges and the MTU to it.
pub const NETWORK: &str = "10-kuberouter.conflist";
/// The daemon's user.
const USER: &str = "kube-router";
/// Time limit until the nodes have addresses, and until BGP has brought the routes to all nodes.
const PATIENCE: Duration = Duration::from_mins(2);
/// File to which the daemon adds a line.
const ROUTE_TABLES: &str = "/etc/iproute2/rt_tables";

/// Returns the configuration of the CNI plugin, as in the manifest; with `hairpinMode`, without which kube-proxy cannot send
/// the packets of a pod back to the pod.
pub fn plugin() -> Value {
    json!({
        "name": "kubernetes",
        "type": "bridge",
        "bridge": "kube-bridge",
        "hairpinMode": true,
        "isDefaultGateway": true,
        "ipam": { "type": "host-local" },
    })
}

/// Creates what the daemons need, and waits until the nodes have the addresses between which they speak BGP.
pub fn configure(workdir: &Workdir) -> Result<()> {
    let nodes = workdir.nodes();
    each(&nodes, |node| own_route_tables(&workdir.node(node)))?;
    let get = [
        "get",
        "nodes",
        "-o",
        r#"jsonpath={range .items[*]}{.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}"#,
    ];
    wait_for("the addresses of the nodes", PATIENCE, || {
        let output = kubectl(workdir, &get).try_read().unwrap_or_default();
        let is_dual = |line: &&str| line.split_whitespace().count() == 2;
        Ok((output.lines().filter(is_dual).count() == nodes.len()).then_some(()))
    })
}

/// Gives the machine its own copy of a file that all machines share with the host.
fn own_route_tables(machine: &Machine) -> Result<()> {
    if !Path::new(ROUTE_TABLES).exists() {
        return Ok(());
    }
    let own = machine.dir().join("rt_tables");
    fs::copy(ROUTE_TABLES, &own)?;
    machine.command(&["mount", "--bind", &own.to_string_lossy(), ROUTE_TABLES]).run()
}

/// Starts the daemon as the `DaemonSet` of its manifest does, with both families and as a process of the node, and waits
/// until the node has routes to all others.
pub fn start(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    machine.run(
        DAEMON,
        &[
            "env",
            &format!("NODE_NAME={node}"),
            &format!("KUBE_ROUTER_CNI_CONF_FILE=/var/lib/cni/net.d/{NETWORK}"),
            DAEMON,
            "--run-router=true",
            "--run-firewall=true",
            "--run-service-proxy=false",
            "--bgp-graceful-restart=true",
            "--enable-ipv6=true",
            &format!("--service-cluster-ip-range={SERVICE_RANGES}"),
            &format!("--kubeconfig={}", workdir.kubeconfig(USER).display()),
        ],
    )?;
    let others: Vec<_> = workdir.nodes().into_iter().filter(|other| *other != node).collect();
    machine.await_ready(DAEMON, &format!("kube-router on {node}"), PATIENCE, || {
        let routes = |family| machine.command(&["ip", family, "route"]).try_read().unwrap_or_default();
        let (v4, v6) = (routes("-4"), routes("-6"));
        let is_known = |other: &Node| v4.contains(&other.pods_v4()) && v6.contains(&other.pods_v6());
        others.iter().all(is_known).then_some(())
    })
}
