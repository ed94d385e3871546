//! Programs of a node: containerd with Debian's runc and CNI plugins, and a kubelet.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::cni::current_cni;
use super::image::PAUSE;
use super::plan::{DNS_SERVICE, Node};
use super::workdir::Workdir;
use crate::signal::wait_for;

/// Time limit until containerd listens.
const PATIENCE: Duration = Duration::from_secs(30);
/// Socket of containerd on the node.
pub const SOCKET: &str = "/run/containerd/containerd.sock";

/// The programs, in the order of their start.
pub const PROGRAMS: [&str; 2] = ["containerd", "kubelet"];

/// Starts both programs, and imports the images before the first pod starts.
pub fn start(workdir: &Workdir, node: Node, images: &Path) -> Result<()> {
    start_containerd(workdir, node)?;
    load(workdir, node, images)?;
    start_kubelet(workdir, node)
}

/// Starts or restarts the kubelet; its pods run on while there is none.
pub fn start_kubelet(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    let write = |name: &str, text: &str| workdir.write(&format!("machines/{node}/{name}"), text);
    let resolv = write("resolv.conf", "nameserver 127.0.0.1\n")?.display().to_string();
    let kubelet = write("kubelet.yaml", &kubelet_config(node, &resolv))?.display().to_string();
    let user = workdir.kubeconfig(&node.to_string()).display().to_string();
    machine.run(
        "kubelet",
        &[
            "kubelet",
            &format!("--config={kubelet}"),
            &format!("--kubeconfig={user}"),
            &format!("--hostname-override={node}"),
            &format!("--node-ip={},{}", node.v4(), node.v6()),
        ],
    )
}

/// Starts containerd, and waits until it listens.
pub fn start_containerd(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    let network = machine.dir().join("lib/cni/net.d");
    fs_err::create_dir_all(&network)?;
    let write = |name: &str, text: &str| workdir.write(&format!("machines/{node}/{name}"), text);
    let (name, network) = current_cni(workdir)?.network_config(workdir, node);
    write(&format!("lib/cni/net.d/{name}"), &network.to_string())?;
    let programs = workdir.programs().display().to_string();
    let config = CONTAINERD.replace("PAUSE", PAUSE).replace("PROGRAMS", &programs);
    let containerd = write("containerd.toml", &config)?.display().to_string();
    machine.run("containerd", &["containerd", "--config", &containerd])?;
    wait_for(&format!("containerd; its log is {}", machine.log("containerd").display()), PATIENCE, || {
        Ok(machine.command(&["ctr", "-a", SOCKET, "version"]).try_read())
    })?;
    Ok(())
}

/// Imports the images of an archive (Docker or OCI layout) on a node.
pub fn load(workdir: &Workdir, node: Node, archive: &Path) -> Result<()> {
    let archive = archive.display().to_string();
    let import = ["ctr", "-a", SOCKET, "-n", "k8s.io", "image", "import", &archive];
    workdir.node(node).command(&import).read().map(|_| ())
}

/// Returns the Node object to create before the kubelet starts, so that pod ranges and zone do not depend on the order of
/// registration.
pub fn object(node: Node) -> serde_json::Value {
    let name = node.to_string();
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": { "topology.kubernetes.io/zone": node.zone(), "kubernetes.io/hostname": name },
        },
        "spec": { "podCIDR": node.pods_v4(), "podCIDRs": [node.pods_v4(), node.pods_v6()] },
    })
}

/// Uses Debian's directory of plugins, and our own builds; needs neither `AppArmor` nor the permission to lower an `oom_score_adj`.
const CONTAINERD: &str = r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['/usr/lib/cni', 'PROGRAMS']
    conf_dir = '/var/lib/cni/net.d'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'PAUSE'
"#;

/// Settings of every kubelet.
pub const KUBELET: &str = include_str!("../../tools/cluster/kubelet.yaml");

fn kubelet_config(node: Node, resolv: &str) -> String {
    let own = include_str!("../../tools/cluster/kubelet-node.yaml")
        .replace("ADDRESS", &node.v4())
        .replace("SOCKET", SOCKET)
        .replace("DNS]", &format!("{DNS_SERVICE}]"))
        .replace("RESOLV", resolv);
    own + KUBELET
}
