//! Calico without BGP, as its manifest `calico-vxlan.yaml` runs it: VXLAN between the nodes, network policies, and the
//! Kubernetes API as its datastore.
//!
//! Calico's releases are no versions of its Go module, so its programs are given, not built.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::cluster::control::{apply, kubectl};
use crate::cluster::machine::Machine;
use crate::cluster::plan::{Node, each};
use crate::cluster::workdir::Workdir;
use crate::host;

/// The daemon of each node.
pub const DAEMON: &str = "calico-node";
/// Part of the rule, and of the chain's name, by which packets of pods are masqueraded.
pub const MASQUERADE: &str = "cali-nat-outgoing";
/// Commands that list the rules of each family in the nftables data plane.
pub const TABLES: [&[&str]; 2] =
    [&["nft", "list", "table", "ip", "calico"], &["nft", "list", "table", "ip6", "calico"]];
/// Names of the CNI plugins, which are one program.
const PLUGINS: [&str; 2] = ["calico", "calico-ipam"];
/// File of a release with the definitions of Calico's resources.
const DEFINITIONS: &str = "crds.yaml";
/// Environment variable with the folder of Calico's files.
const FOLDER: &str = "XTASK_CALICO";
/// The users of the daemon and of the CNI plugin.
const USERS: [&str; 2] = [DAEMON, "calico-cni-plugin"];
/// Time limit until the daemon is ready, and has routes to all other nodes.
const PATIENCE: Duration = Duration::from_mins(2);
/// Where the daemon mounts cgroup2.
const CGROUP: &str = "/run/calico/cgroup";
/// API of Calico's resources.
const API: &str = "crd.projectcalico.org/v1";

/// How the daemon writes rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlane {
    Nftables,
    Iptables,
}

/// Returns the configuration of the CNI plugin, as in the manifest, with both families.
pub fn plugin(workdir: &Workdir, node: Node) -> Value {
    json!({
        "type": PLUGINS[0],
        "log_level": "info",
        "log_file_path": "/var/log/calico/cni/cni.log",
        "datastore_type": "kubernetes",
        "nodename": node.to_string(),
        "mtu": 0,
        "ipam": { "type": PLUGINS[1], "assign_ipv4": "true", "assign_ipv6": "true" },
        "policy": { "type": "k8s" },
        "kubernetes": { "kubeconfig": workdir.kubeconfig(USERS[1]) },
    })
}

/// Links the programs into the cluster's directory.
pub fn prepare(workdir: &Workdir) -> Result<()> {
    let folder = folder(std::env::var_os(FOLDER))?;
    for (name, file) in [(DAEMON, DAEMON), (PLUGINS[0], PLUGINS[0]), (PLUGINS[1], PLUGINS[0])] {
        workdir.link(name, folder.join(file))?;
    }
    Ok(())
}

/// Returns the folder with the files of a release.
fn folder(value: Option<OsString>) -> Result<PathBuf> {
    let folder = PathBuf::from(value.with_context(|| {
        format!(
            "Calico's programs are not built here: set {FOLDER} to a folder with the programs `{DAEMON}` and `{}` and with \
             the release's {DEFINITIONS}",
            PLUGINS[0]
        )
    })?);
    for file in [DAEMON, PLUGINS[0], DEFINITIONS] {
        ensure!(folder.join(file).is_file(), "{FOLDER}: {} has no file {file}", folder.display());
    }
    folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))
}

/// Creates what the daemons need.
pub fn configure(workdir: &Workdir, data_plane: DataPlane) -> Result<()> {
    let definitions = folder(std::env::var_os(FOLDER))?.join(DEFINITIONS).display().to_string();
    kubectl(workdir, &["apply", "--server-side", "-f", &definitions]).read()?;
    kubectl(workdir, &["wait", "--for=condition=Established", "--timeout=60s", "-f", &definitions]).read()?;
    each(&workdir.nodes(), |node| own_cgroup(&workdir.node(node)))?;
    let mut items = vec![configuration(data_plane)];
    items.extend(workdir.nodes().into_iter().flat_map(pools));
    apply(workdir, &json!({ "apiVersion": "v1", "kind": "List", "items": items }))
}

/// Mounts the machine's own part of the cgroup tree where the daemon would mount the whole tree of the host.
fn own_cgroup(machine: &Machine) -> Result<()> {
    machine.command(&["mkdir", "-p", CGROUP]).run()?;
    machine.command(&["mount", "--bind", &host::cgroup2()?.to_string_lossy(), CGROUP]).run()
}

/// Returns the configuration of the daemons: as in the manifest, with both families and without the data plane that replaces
/// kube-proxy. The daemon needs files of its image for XDP, which it uses only for policies of host endpoints.
fn configuration(data_plane: DataPlane) -> Value {
    json!({
        "apiVersion": API,
        "kind": "FelixConfiguration",
        "metadata": { "name": "default" },
        "spec": {
            "bpfEnabled": false,
            "nftablesMode": match data_plane {
                DataPlane::Nftables => "Enabled",
                DataPlane::Iptables => "Disabled",
            },
            // That of the nodes' `iptables`; Calico looks for rules of the kubelet, which writes none here.
            "iptablesBackend": "NFT",
            "ipv6Support": true,
            "usageReportingEnabled": false,
            "xdpEnabled": false,
        },
    })
}

/// Returns the address pools of a node. Calico's default is one pool of each family for all nodes; the machine `control` has
/// routes to the range of each node.
fn pools(node: Node) -> [Value; 2] {
    let pool = |family: &str, range: String, block: u8| {
        json!({
            "apiVersion": API,
            "kind": "IPPool",
            "metadata": { "name": format!("{node}-{family}") },
            "spec": {
                "cidr": range,
                "blockSize": block,
                "ipipMode": "Never",
                "vxlanMode": "Always",
                "natOutgoing": true,
                "nodeSelector": format!("kubernetes.io/hostname == '{node}'"),
                "allowedUses": ["Workload", "Tunnel"],
            },
        })
    };
    [pool("ipv4", node.pods_v4(), 26), pool("ipv6", node.pods_v6(), 122)]
}

/// Starts the daemon as the container of its manifest does, but as a process of the node, and waits until it is ready and
/// the node has routes to all others.
pub fn start(workdir: &Workdir, node: Node) -> Result<()> {
    let machine = workdir.node(node);
    let once = "-allocate-tunnel-addrs -allocate-tunnel-addrs-run-once";
    let script = format!("{DAEMON} -startup && {DAEMON} {once} && exec {DAEMON} -felix");
    machine.run(
        DAEMON,
        &[
            "env",
            &format!("NODENAME={node}"),
            &format!("FELIX_FELIXHOSTNAME={node}"),
            &format!("CALICO_K8S_NODE_REF={node}"),
            &format!("KUBECONFIG={}", workdir.kubeconfig(USERS[0]).display()),
            "DATASTORE_TYPE=kubernetes",
            "FELIX_DATASTORETYPE=kubernetes",
            "WAIT_FOR_DATASTORE=true",
            "CALICO_NETWORKING_BACKEND=vxlan",
            "CLUSTER_TYPE=k8s",
            "IP=autodetect",
            "IP6=autodetect",
            "NO_DEFAULT_POOLS=true",
            "CALICO_DISABLE_FILE_LOGGING=true",
            "FELIX_DEFAULTENDPOINTTOHOSTACTION=ACCEPT",
            "FELIX_HEALTHENABLED=true",
            "sh",
            "-c",
            &script,
        ],
    )?;
    let others = workdir.nodes().len() - 1;
    machine.await_ready(DAEMON, &format!("Calico on {node}"), PATIENCE, || {
        let is_ready =
            machine.command(&["curl", "-sf", "http://127.0.0.1:9099/readiness"]).try_read().is_some();
        let routes = |family, device| {
            let output = machine.command(&["ip", family, "route", "show", "dev", device]).try_read();
            output.unwrap_or_default().lines().filter(|line| line.contains(" via ")).count()
        };
        let is_connected =
            routes("-4", "vxlan.calico") >= others && routes("-6", "vxlan-v6.calico") >= others;
        (is_ready && is_connected).then_some(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_the_programs_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |value: Option<OsString>| format!("{:#}", folder(value).unwrap_err());
        assert!(refused(None).contains(FOLDER));
        assert!(refused(Some(dir.path().into())).contains("no file calico-node"));
        for file in [DAEMON, PLUGINS[0], DEFINITIONS] {
            fs_err::write(dir.path().join(file), "").unwrap();
        }
        assert!(folder(Some(dir.path().into())).is_ok());
    }
}
