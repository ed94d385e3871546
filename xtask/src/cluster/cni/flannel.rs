//! Flannel, as its manifest runs it.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cluster::plan::{Node, POD_RANGES};
use crate::cluster::workdir::Workdir;

/// The daemon of each node.
pub const DAEMON: &str = "flanneld";
/// Part of the rule by which its packets are masqueraded.
pub const MASQUERADE: &str = "-j FLANNEL-POSTRTG";
/// The daemon's user.
const USER: &str = "flannel";
/// File in a cluster's directory with the configuration of the daemon.
const NET_CONF: &str = "net-conf.json";
/// Time limit until the daemon is ready.
const PATIENCE: Duration = Duration::from_mins(1);

/// Returns the configuration of the CNI plugin, as in Flannel's manifest.
pub fn plugin() -> Value {
    json!({ "type": "flannel", "delegate": { "hairpinMode": true, "isDefaultGateway": true } })
}

/// Creates what the daemons need.
pub fn configure(workdir: &Workdir, backend: &str) -> Result<()> {
    workdir.write(NET_CONF, &net_conf(backend).to_string()).map(|_| ())
}

/// Starts the daemon as the `DaemonSet` of its manifest does, but as a process of the node, and waits until it is ready.
pub fn start(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    machine.run(
        DAEMON,
        &[
            "env",
            &format!("NODE_NAME={node}"),
            "EVENT_QUEUE_DEPTH=5000",
            "CONT_WHEN_CACHE_NOT_READY=false",
            DAEMON,
            "--ip-masq",
            "--kube-subnet-mgr",
            "--healthz-port=8081",
            &format!("--kubeconfig-file={}", workdir.kubeconfig(USER).display()),
            &format!("--net-config-path={}", workdir.dir().join(NET_CONF).display()),
        ],
    )?;
    machine.await_ready(DAEMON, &format!("Flannel on {node}"), PATIENCE, || {
        machine.command(&["curl", "-sf", "http://127.0.0.1:8081/readyz"]).try_read()
    })
}

/// Returns the configuration of the daemon, with both families.
fn net_conf(backend: &str) -> Value {
    let (v4, v6) = POD_RANGES.split_once(',').unwrap_or((POD_RANGES, ""));
    json!({
        "Network": v4,
        "IPv6Network": v6,
        "EnableIPv6": true,
        "EnableNFTables": false,
        "Backend": { "Type": backend },
    })
}
