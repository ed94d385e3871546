//! The CNI plugin, which gives pods their devices, addresses and routes.

mod calico;
mod cilium;
mod flannel;
mod kube_router;

use std::fmt;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::control::apply_text;
use super::parts::batch;
use super::plan::{self, Node, each};
use super::workdir::Workdir;
use crate::cross;
use crate::gotools::{self, Tool};
use crate::workspace::Workspace;

/// File in a cluster's directory with the name of its CNI plugin.
pub(super) const CNI: &str = "cni";

/// A CNI plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Cni {
    /// The reference plugins bridge and host-local, and routes between the nodes
    Bridge,
    /// Flannel with the backend vxlan
    Flannel,
    /// Flannel with the backend host-gw
    FlannelHostGw,
    /// kube-router with network policies, without its service proxy
    KubeRouter,
    /// Calico with VXLAN and network policies, by nftables; `XTASK_CALICO` names the folder of its programs
    Calico,
    /// The same, by iptables
    CalicoIptables,
    /// Cilium with VXLAN and network policies, without its kube-proxy replacement
    Cilium,
}

impl fmt::Display for Cni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&cross::name(self))
    }
}

impl Cni {
    /// Returns the plugin's daemon, which runs on each node.
    pub fn program(self) -> Option<&'static str> {
        match self {
            Self::Bridge => None,
            Self::Flannel | Self::FlannelHostGw => Some(flannel::DAEMON),
            Self::KubeRouter => Some(kube_router::DAEMON),
            Self::Calico | Self::CalicoIptables => Some(calico::DAEMON),
            Self::Cilium => Some(cilium::DAEMON),
        }
    }

    /// Returns the programs to build for the plugin.
    fn tools(self) -> &'static [Tool] {
        match self {
            Self::Bridge | Self::Calico | Self::CalicoIptables => &[],
            Self::Flannel | Self::FlannelHostGw => &gotools::FLANNEL,
            Self::KubeRouter => &gotools::KUBE_ROUTER,
            Self::Cilium => &gotools::CILIUM,
        }
    }

    /// Returns a part of the masquerade rule that the daemon writes for each family.
    pub(super) fn masquerade_rule(self) -> Option<&'static str> {
        match self {
            Self::Bridge => None,
            Self::Flannel | Self::FlannelHostGw => Some(flannel::MASQUERADE),
            Self::KubeRouter => Some(kube_router::MASQUERADE),
            Self::Calico | Self::CalicoIptables => Some(calico::MASQUERADE),
            Self::Cilium => Some(cilium::MASQUERADE),
        }
    }

    /// Returns the commands that list the rules of each family.
    pub(super) fn rule_lists(self) -> [&'static [&'static str]; 2] {
        match self {
            Self::Calico => calico::TABLES,
            _ => [&["iptables", "-t", "nat", "-S"], &["ip6tables", "-t", "nat", "-S"]],
        }
    }

    /// Whether the running daemon soon writes its rules again if another program deletes them. kube-router writes its masquerade
    /// rule only when it starts; Calico takes 90 s for the sets of addresses, and drops VXLAN packets without them.
    pub(super) fn restores_rules(self) -> bool {
        matches!(self, Self::Flannel | Self::FlannelHostGw)
    }

    /// Returns the name and the content of the file that configures the plugin on a node.
    pub fn network_config(self, workdir: &Workdir, node: Node) -> (&'static str, Value) {
        let (file, version, name, first) = match self {
            Self::Bridge => ("10-bridge.conflist", "1.0.0", "pods", bridge(node)),
            Self::Flannel | Self::FlannelHostGw => {
                ("10-flannel.conflist", "1.0.0", "cbr0", flannel::plugin())
            }
            Self::KubeRouter => (kube_router::NETWORK, "0.3.0", "mynet", kube_router::plugin()),
            Self::Calico | Self::CalicoIptables => {
                ("10-calico.conflist", "0.3.1", "k8s-pod-network", calico::plugin(workdir, node))
            }
            Self::Cilium => ("05-cilium.conflist", "1.0.0", "portmap", cilium::plugin()),
        };
        let ports = json!({ "type": "portmap", "capabilities": { "portMappings": true } });
        (file, json!({ "cniVersion": version, "name": name, "plugins": [first, ports] }))
    }

    /// Builds or finds the plugin for the cluster.
    pub fn prepare(self, workspace: &Workspace, workdir: &Workdir) -> Result<()> {
        workdir.write(CNI, &self.to_string())?;
        if matches!(self, Self::Calico | Self::CalicoIptables) {
            return calico::prepare(workdir);
        }
        if self == Self::Cilium {
            cilium::prepare(workspace, workdir)?;
        }
        let files = gotools::build(workspace, self.tools())?;
        self.tools().iter().zip(files).try_for_each(|(tool, file)| workdir.link(tool.name, file))
    }

    /// Connects the pods of all nodes.
    pub fn start(self, workdir: &Workdir) -> Result<()> {
        let nodes = workdir.nodes();
        if self != Self::Bridge {
            apply_text(workdir, include_str!("../../../tools/cluster/rbac.yaml"))?;
        }
        match self {
            Self::Bridge => {
                return nodes.iter().try_for_each(|node| {
                    let inside = workdir.node(*node).pid().with_context(|| format!("{node} does not run"))?;
                    batch(inside, &plan::route_lines(*node, &nodes))
                });
            }
            Self::Flannel => flannel::configure(workdir, "vxlan")?,
            Self::FlannelHostGw => flannel::configure(workdir, "host-gw")?,
            Self::KubeRouter => kube_router::configure(workdir)?,
            Self::Cilium => cilium::configure(workdir)?,
            Self::Calico => calico::configure(workdir, calico::DataPlane::Nftables)?,
            Self::CalicoIptables => calico::configure(workdir, calico::DataPlane::Iptables)?,
        }
        each(&nodes, |node| self.start_daemon(workdir, node))
    }

    /// Starts the plugin's daemon on a node, and waits until it is ready.
    pub(super) fn start_daemon(self, workdir: &Workdir, node: Node) -> Result<()> {
        match self {
            Self::Bridge => Ok(()),
            Self::Flannel | Self::FlannelHostGw => flannel::start(workdir, node),
            Self::KubeRouter => kube_router::start(workdir, node),
            Self::Cilium => cilium::start(workdir, node),
            Self::Calico | Self::CalicoIptables => calico::start(workdir, node),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plugin_is_followed_by_portmap() {
        for cni in <Cni as clap::ValueEnum>::value_variants() {
            let (_, config) = cni.network_config(&Workdir::of("test").unwrap(), Node(1));
            assert_eq!(config["plugins"][1]["type"], "portmap", "{cni}");
        }
    }

    #[test]
    fn a_daemon_is_built_or_given() {
        for cni in <Cni as clap::ValueEnum>::value_variants() {
            let is_there =
                |daemon| daemon == calico::DAEMON || cni.tools().iter().any(|tool| tool.name == daemon);
            assert!(cni.program().is_none_or(is_there), "{cni}");
        }
    }
}
