//! Cilium, as its chart runs it with `kubeProxyReplacement=false`: VXLAN between the nodes, and network policies by BPF.
//!
//! The agent compiles its BPF programs on the node, from the sources in its Go module.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use fs_err as fs;
use fs_err::os::unix::fs::symlink;
use serde_json::{Value, json};

use crate::cluster::control::kubectl;
use crate::cluster::plan::Node;
use crate::cluster::workdir::Workdir;
use crate::workspace::Workspace;
use crate::{apt, gotools, host};

/// The agent of each node.
pub const DAEMON: &str = "cilium-agent";
/// Part of the rule by which packets of pods are masqueraded.
pub const MASQUERADE: &str = "cilium masquerade non-cluster";
/// The program beside the agents, which creates the definitions of Cilium's resources.
const OPERATOR: &str = "cilium-operator-generic";
/// Debian's compiler, of the release that Cilium's image has, and the package of that name.
const COMPILER: &str = "clang-19";
/// The users of the agent and of the operator.
const USERS: [&str; 2] = ["cilium", "cilium-operator"];
/// Time limit until the operator has created the definitions, and until an agent has compiled its programs.
const PATIENCE: Duration = Duration::from_mins(5);
/// A definition that agents need, created last.
const DEFINITION: &str = "crd/ciliumendpoints.cilium.io";

/// What the agents and the operator have to know, as in the chart, with both families and the pods' ranges of the nodes.
const SETTINGS: [&str; 8] = [
    "--cluster-name=default",
    "--enable-ipv4=true",
    "--enable-ipv6=true",
    "--identity-allocation-mode=crd",
    "--ipam=kubernetes",
    "--kube-proxy-replacement=false",
    // It needs Envoy.
    "--enable-l7-proxy=false",
    "--k8s-namespace=kube-system",
];

/// Returns the configuration of the CNI plugin, as the agent would write it.
pub fn plugin() -> Value {
    json!({ "type": "cilium-cni", "log-file": "/var/log/cilium-cni.log" })
}

/// Installs the compiler, and links it and the sources of the BPF programs into the cluster's directory.
pub fn prepare(workspace: &Workspace, workdir: &Workdir) -> Result<()> {
    let compiler = Path::new("/usr/bin").join(COMPILER);
    if !compiler.exists() {
        apt::install(&[COMPILER])?;
    }
    workdir.link("clang", compiler)?;
    let source = gotools::source(workspace, &gotools::CILIUM[0])?.join("bpf");
    Ok(symlink(source, workdir.dir().join("cilium-bpf"))?)
}

/// Starts the operator, and waits until it has created the definitions of Cilium's resources.
pub fn configure(workdir: &Workdir) -> Result<()> {
    let user = format!("--k8s-kubeconfig-path={}", workdir.kubeconfig(USERS[1]).display());
    let control = workdir.control();
    control.run(OPERATOR, &[&[OPERATOR, &user], &SETTINGS[..]].concat())?;
    control.await_ready(OPERATOR, "the operator of Cilium", PATIENCE, || {
        kubectl(workdir, &["get", DEFINITION]).try_read()
    })?;
    kubectl(workdir, &["wait", "--for=condition=Established", "--timeout=60s", DEFINITION]).read().map(|_| ())
}

/// Starts the agent as the `DaemonSet` of the chart does, but as a process of the node, and waits until it is ready and the
/// node has routes to all others.
pub fn start(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    let library = machine.dir().join("lib/cilium");
    if !library.exists() {
        fs::create_dir_all(&library)?;
        symlink(workdir.dir().join("cilium-bpf"), library.join("bpf"))?;
    }
    let name = format!("K8S_NODE_NAME={node}");
    let user = format!("--k8s-kubeconfig-path={}", workdir.kubeconfig(USERS[0]).display());
    // The agent would mount the whole tree of the host.
    let cgroup = format!("--cgroup-root={}", host::cgroup2()?.display());
    let own = [
        "env",
        &name,
        DAEMON,
        &user,
        &cgroup,
        "--routing-mode=tunnel",
        "--tunnel-protocol=vxlan",
        "--cni-chaining-mode=portmap",
        "--enable-host-legacy-routing=true",
        "--k8s-require-ipv4-pod-cidr=true",
        "--k8s-require-ipv6-pod-cidr=true",
        "--enable-ipv4-masquerade=true",
        "--enable-ipv6-masquerade=true",
        "--bpf-map-dynamic-size-ratio=0.0025",
        // Probes between the nodes need programs of the image.
        "--enable-health-checking=false",
        "--enable-endpoint-health-checking=false",
        "--enable-hubble=false",
    ];
    machine.run(DAEMON, &[&own[..], &SETTINGS[..]].concat())?;
    let others: Vec<_> = workdir.nodes().into_iter().filter(|other| *other != node).collect();
    machine.await_ready(DAEMON, &format!("Cilium on {node}"), PATIENCE, || {
        let health = ["curl", "-sf", "-H", "brief: true", "http://127.0.0.1:9879/healthz"];
        let is_ready = machine.command(&health).try_read().is_some();
        let routes = |family| machine.command(&["ip", family, "route"]).try_read().unwrap_or_default();
        let (v4, v6) = (routes("-4"), routes("-6"));
        let is_known = |other: &Node| v4.contains(&other.pods_v4()) && v6.contains(&other.pods_v6());
        (is_ready && others.iter().all(is_known)).then_some(())
    })
}
