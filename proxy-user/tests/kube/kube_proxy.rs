//! The official kube-proxy.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::control::ControlPlane;
use super::process::Process;

/// What its rules are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Nftables,
    Iptables,
}

impl Mode {
    /// As its configuration names it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }
}

/// The program, as `cargo xtask` names it.
pub fn binary() -> Result<PathBuf> {
    std::env::var_os("BALLAST_KUBE_PROXY").map(PathBuf::from).context("BALLAST_KUBE_PROXY is not set")
}

/// The same under the name that it has on every node: a process is known by it.
pub fn program(control: &ControlPlane) -> Result<PathBuf> {
    let link = control.folder().join("kube-proxy");
    if !link.exists() {
        symlink(binary()?, &link).context("cannot link kube-proxy")?;
    }
    Ok(link)
}

/// Starts it; `command` begins [`program`] where the node is. Pods of the node are those behind the devices `p...`,
/// as Ballast finds by itself.
pub fn start(command: Command, mode: Mode, node: &str, control: &ControlPlane) -> Result<Process> {
    start_with(command, &config(mode, node, control), node, control)
}

/// A node's configuration.
pub fn config(mode: Mode, node: &str, control: &ControlPlane) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode.name(),
        "detectLocalMode": "InterfaceNamePrefix",
        "detectLocal": { "interfaceNamePrefix": "p" },
        "hostnameOverride": node,
        "clientConnection": { "kubeconfig": control.admin_kubeconfig() },
        // These limits are the whole machine's.
        "conntrack": { "maxPerCore": 0, "min": 0 },
    })
}

/// Starts it with this configuration.
pub fn start_with(
    mut command: Command,
    config: &Value,
    node: &str,
    control: &ControlPlane,
) -> Result<Process> {
    let file = control.folder().join(format!("kube-proxy-{node}.json"));
    fs::write(&file, config.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
    command.arg("--config").arg(&file);
    Process::start(&mut command, &log(control, node))
}

/// Where it logs.
pub fn log(control: &ControlPlane, node: &str) -> PathBuf {
    control.folder().join(format!("kube-proxy-{node}.log"))
}
