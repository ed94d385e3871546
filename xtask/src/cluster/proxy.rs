//! The proxy that serves the cluster's Services.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::deployed;
use super::plan::{Node, POD_RANGES, each};
use super::workdir::Workdir;
use crate::cross;
use crate::signal::wait_for;
use crate::workspace::Workspace;

/// File in a cluster's directory with the name of its proxy.
pub(super) const PROXY: &str = "proxy";

/// Time limit for a proxy to program all Services of an idle cluster.
const PATIENCE: Duration = Duration::from_secs(30);

/// A proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Proxy {
    /// Ballast as released: image and chart
    Ballast,
    /// Ballast as a process on each node
    BallastHost,
    /// The official kube-proxy in mode nftables
    KubeProxyNftables,
    /// The official kube-proxy in mode iptables
    KubeProxyIptables,
    /// No proxy: neither Services nor DNS work
    None,
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&cross::name(self))
    }
}

impl Proxy {
    /// Returns the program that runs on each node.
    pub fn program(self) -> Option<&'static str> {
        match self {
            Self::BallastHost => Some("ballast"),
            Self::KubeProxyNftables | Self::KubeProxyIptables => Some("kube-proxy"),
            // The kubelet runs an agent in a pod.
            Self::Ballast | Self::None => None,
        }
    }

    /// Starts the proxy on all nodes, and waits until it works; `image` is for the proxy that has one.
    pub fn start(self, workspace: &Workspace, workdir: &Workdir, image: Option<&Path>) -> Result<()> {
        if self == Self::Ballast {
            return deployed::install(workspace, workdir, image);
        }
        each(&workdir.nodes(), |node| self.start_on(workdir, node))
    }

    /// Stops the proxy on all nodes, and removes what it left in the kernel.
    pub fn stop(self, workspace: &Workspace, workdir: &Workdir) -> Result<()> {
        if self == Self::Ballast {
            return deployed::uninstall(workspace, workdir);
        }
        each(&workdir.nodes(), |node| self.stop_on(workdir, node))
    }

    /// Starts the proxy on a node, if it is a process there.
    pub fn start_on(self, workdir: &Workdir, node: Node) -> Result<()> {
        let user = workdir.kubeconfig("proxy").display().to_string();
        match self {
            Self::BallastHost => ballast(workdir, node, &user),
            Self::KubeProxyNftables => kube_proxy(workdir, node, "nftables", &user),
            Self::KubeProxyIptables => kube_proxy(workdir, node, "iptables", &user),
            Self::Ballast | Self::None => Ok(()),
        }
    }

    fn stop_on(self, workdir: &Workdir, node: Node) -> Result<()> {
        let Some(program) = self.program() else { return Ok(()) };
        let machine = workdir.node(node);
        machine.stop(program, libc::SIGTERM)?;
        let clean: &[&str] = match self {
            Self::BallastHost => &["ballast", "cleanup", "--yes"],
            _ => &["kube-proxy", "--cleanup"],
        };
        machine.command(clean).read().map(|_| ())
    }
}

/// Starts the agent, and waits until it is healthy.
fn ballast(workdir: &Workdir, node: Node, user: &str) -> Result<()> {
    let (machine, name, settings) = (workdir.node(node), node.to_string(), workdir.settings());
    let settings = settings.iter().map(String::as_str);
    let agent = ["ballast", "run", "--kubeconfig", user, "--hostname-override", &name];
    let words: Vec<_> = std::iter::once("env").chain(settings).chain(agent).collect();
    machine.run("ballast", &words)?;
    let log = machine.log("ballast");
    wait_for(&format!("the agent on {node}; its log is {}", log.display()), PATIENCE, || {
        Ok(machine.command(&["ballast", "status"]).try_read())
    })?;
    Ok(())
}

fn kube_proxy(workdir: &Workdir, node: Node, mode: &str, user: &str) -> Result<()> {
    let config = serde_json::json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clusterCIDR": POD_RANGES,
        "detectLocalMode": "ClusterCIDR",
        "hostnameOverride": node.to_string(),
        "clientConnection": { "kubeconfig": user },
        // 0 changes no limit: these limits apply to the whole machine.
        "conntrack": { "maxPerCore": 0, "min": 0 },
    });
    let file = workdir.write(&format!("machines/{node}/kube-proxy.json"), &config.to_string())?;
    let machine = workdir.node(node);
    machine.run("kube-proxy", &["kube-proxy", &format!("--config={}", file.display()), "--v=2"])?;
    let log = machine.log("kube-proxy");
    wait_for(&format!("kube-proxy on {node}; its log is {}", log.display()), PATIENCE, || {
        Ok(machine.command(&["curl", "-sf", "http://127.0.0.1:10256/healthz"]).try_read())
    })?;
    Ok(())
}

/// Returns the proxy that serves a cluster.
pub(super) fn current_proxy(workdir: &Workdir) -> Result<Proxy> {
    workdir.choice(PROXY)
}
