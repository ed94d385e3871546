//! The CNI plugin, which gives pods their devices, addresses and routes.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::control::apply;
use super::parts::batch;
use super::plan::{self, Node, POD_RANGES, each};
use super::workdir::Workdir;
use crate::gotools;
use crate::signal::wait_for;
use crate::workspace::Workspace;

/// File in a cluster's directory with the name of its CNI plugin.
pub(super) const CNI: &str = "cni";
/// File in a cluster's directory with the configuration of Flannel's daemon.
const NET_CONF: &str = "net-conf.json";
/// Flannel's daemon.
pub(super) const FLANNELD: &str = "flanneld";
/// Time limit until Flannel's daemon is ready.
const PATIENCE: Duration = Duration::from_mins(1);

/// A CNI plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Cni {
    /// The reference plugins bridge and host-local, and routes between the nodes
    Bridge,
    /// Flannel with the backend vxlan
    Flannel,
    /// Flannel with the backend host-gw
    FlannelHostGw,
}

impl fmt::Display for Cni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
            Self::Flannel => "flannel",
            Self::FlannelHostGw => "flannel-host-gw",
        })
    }
}

impl Cni {
    /// Returns the program of the plugin that runs on each node.
    #[must_use]
    pub fn program(self) -> Option<&'static str> {
        self.backend().map(|_| FLANNELD)
    }

    /// Returns Flannel's backend.
    fn backend(self) -> Option<&'static str> {
        match self {
            Self::Bridge => None,
            Self::Flannel => Some("vxlan"),
            Self::FlannelHostGw => Some("host-gw"),
        }
    }

    /// Returns the name and the content of the file that configures the plugin on a node.
    #[must_use]
    pub fn network_config(self, node: Node) -> (&'static str, Value) {
        let (file, name, first) = match self {
            Self::Bridge => ("10-bridge.conflist", "pods", bridge(node)),
            // Like the manifest of Flannel.
            Self::Flannel | Self::FlannelHostGw => (
                "10-flannel.conflist",
                "cbr0",
                json!({ "type": "flannel", "delegate": { "hairpinMode": true, "isDefaultGateway": true } }),
            ),
        };
        let ports = json!({ "type": "portmap", "capabilities": { "portMappings": true } });
        (file, json!({ "cniVersion": "1.0.0", "name": name, "plugins": [first, ports] }))
    }

    /// Builds the plugin for the cluster.
    pub fn prepare(self, workspace: &Workspace, workdir: &Workdir) -> Result<()> {
        workdir.write(CNI, &self.to_string())?;
        if self.backend().is_none() {
            return Ok(());
        }
        let files = gotools::build(workspace, &gotools::FLANNEL)?;
        gotools::FLANNEL.iter().zip(files).try_for_each(|(tool, file)| {
            std::os::unix::fs::symlink(file, workdir.programs().join(tool.name))
                .with_context(|| format!("cannot link {}", tool.name))
        })
    }

    /// Connects the pods of all nodes.
    pub fn start(self, workdir: &Workdir) -> Result<()> {
        let nodes = workdir.nodes();
        let Some(backend) = self.backend() else {
            return nodes.iter().try_for_each(|node| {
                let inside = workdir.node(*node).pid().with_context(|| format!("{node} does not run"))?;
                batch(inside, &plan::route_lines(*node, &nodes))
            });
        };
        apply(workdir, &permissions())?;
        workdir.write(NET_CONF, &net_conf(backend).to_string())?;
        each(&nodes, |node| start_flanneld(workdir, node))
    }
}

/// Returns the cluster's CNI plugin.
pub(super) fn current_cni(workdir: &Workdir) -> Result<Cni> {
    workdir.choice(CNI)
}

fn bridge(node: Node) -> Value {
    json!({
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": true,
        "hairpinMode": true,
        "ipMasq": false,
        "ipam": {
            "type": "host-local",
            "ranges": [[{ "subnet": node.pods_v4() }], [{ "subnet": node.pods_v6() }]],
            "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
        },
    })
}

/// Starts Flannel's daemon as the `DaemonSet` of its manifest does, but as a process of the node, and waits until it is ready.
pub(super) fn start_flanneld(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    machine.run(
        FLANNELD,
        &[
            "env",
            &format!("NODE_NAME={node}"),
            "EVENT_QUEUE_DEPTH=5000",
            "CONT_WHEN_CACHE_NOT_READY=false",
            FLANNELD,
            "--ip-masq",
            "--kube-subnet-mgr",
            "--healthz-port=8081",
            &format!("--kubeconfig-file={}", workdir.kubeconfig("flannel").display()),
            &format!("--net-config-path={}", workdir.dir().join(NET_CONF).display()),
        ],
    )?;
    let log = machine.log(FLANNELD);
    wait_for(&format!("Flannel on {node}; its log is {}", log.display()), PATIENCE, || {
        Ok(machine.command(&["curl", "-sf", "http://127.0.0.1:8081/readyz"]).try_read())
    })?;
    Ok(())
}

/// Returns the configuration of Flannel's daemon, with both families.
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

/// Returns the permissions of Flannel's daemon, as in its manifest.
fn permissions() -> Value {
    let rule = |resource: &str, verbs: &[&str]| json!({ "apiGroups": [""], "resources": [resource], "verbs": verbs });
    let (group, api) = ("rbac.authorization.k8s.io", "rbac.authorization.k8s.io/v1");
    json!({ "apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": api,
            "kind": "ClusterRole",
            "metadata": { "name": "flannel" },
            "rules": [
                rule("pods", &["get"]),
                rule("nodes", &["get", "list", "watch"]),
                rule("nodes/status", &["patch"]),
            ],
        },
        {
            "apiVersion": api,
            "kind": "ClusterRoleBinding",
            "metadata": { "name": "flannel" },
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": "flannel" },
            "subjects": [{ "apiGroup": group, "kind": "User", "name": "flannel" }],
        },
    ] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flannel_gets_both_ranges() {
        let conf = net_conf("vxlan");
        assert_eq!((&conf["Network"], &conf["IPv6Network"]), (&json!("10.244.0.0/16"), &json!("fd44::/48")));
    }

    #[test]
    fn every_plugin_is_followed_by_portmap() {
        for cni in <Cni as clap::ValueEnum>::value_variants() {
            let (_, config) = cni.network_config(Node(1));
            assert_eq!(config["plugins"][1]["type"], "portmap", "{cni}");
        }
    }
}
