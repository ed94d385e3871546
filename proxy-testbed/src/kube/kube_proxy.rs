//! The official kube-proxy.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::control::ControlPlane;
use super::process::Process;

/// The proxy mode: the kernel subsystem of kube-proxy's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Nftables,
    Iptables,
}

impl Mode {
    /// Returns the name of the mode in kube-proxy's configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }
}

/// Returns the path of kube-proxy, which `cargo xtask` sets in the environment.
pub fn binary() -> Result<PathBuf> {
    std::env::var_os("BALLAST_KUBE_PROXY").map(PathBuf::from).context("BALLAST_KUBE_PROXY is not set")
}

/// Returns a link to the binary with the file name `kube-proxy`: a process is recognized by this name, as on every node.
pub fn program(control: &ControlPlane) -> Result<PathBuf> {
    let link = control.folder().join("kube-proxy");
    if !link.exists() {
        symlink(binary()?, &link).context("cannot link kube-proxy")?;
    }
    Ok(link)
}

/// Starts kube-proxy; `command` runs [`program`] on the node. kube-proxy gets the setting that the devices `p...` lead to the node's pods,
/// which Ballast detects by itself.
pub fn start(command: Command, mode: Mode, node: &str, control: &ControlPlane) -> Result<Process> {
    start_with(command, &config(mode, node, control), node, control)
}

/// Returns the kube-proxy configuration of a node.
pub fn config(mode: Mode, node: &str, control: &ControlPlane) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode.name(),
        "detectLocalMode": "InterfaceNamePrefix",
        "detectLocal": { "interfaceNamePrefix": "p" },
        "hostnameOverride": node,
        "clientConnection": { "kubeconfig": control.admin_kubeconfig() },
        // 0 leaves the conntrack limits unchanged: they are limits of the whole machine.
        "conntrack": { "maxPerCore": 0, "min": 0 },
    })
}

/// Starts kube-proxy with this configuration.
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

/// Path of kube-proxy's log.
pub fn log(control: &ControlPlane, node: &str) -> PathBuf {
    control.folder().join(format!("kube-proxy-{node}.log"))
}
