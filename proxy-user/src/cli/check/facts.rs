//! What `ballast check` knows of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use proxy_common::config::PortRange;

use crate::cli::show::AgentState;
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::maps::view::UsageRow;
use crate::model::DeviceKind;
use crate::model::ports::{LOCAL_PORTS, NODE_PORTS};
use crate::programs::{Attachment, Lack};

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The kernel.
    pub kernel: Kernel,
    /// Mounts and privileges.
    pub environment: Environment,
    /// Devices, ports and settings of the network.
    pub network: Network,
    /// Who else handles Services or packets here.
    pub others: Others,
    /// The API server.
    pub api: ApiAccess,
    /// What is installed; `None` with `--pre`.
    pub installed: Option<Installed>,
}

/// The running kernel.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// `6.12.43-amd64`.
    pub release: String,
    /// Types of programs that it does not know; `None`: it does not let us ask.
    pub missing_programs: Option<Vec<&'static str>>,
    /// Types of maps that it does not know; `None`: it does not let us ask.
    pub missing_maps: Option<Vec<&'static str>>,
    /// What it lacks, and Ballast does without.
    pub lacks: Vec<Lack>,
    /// Whether it tells its types (`/sys/kernel/btf/vmlinux`).
    pub has_btf: bool,
    /// Options that it was built without; `None`: the list of its options cannot be read.
    pub missing_options: Option<Vec<&'static str>>,
    /// `net.core.bpf_jit_enable`.
    pub jit: Option<u32>,
    /// `net.core.bpf_jit_harden`.
    pub jit_harden: Option<u32>,
}

/// Where programs and maps go, and what this process may do.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The cgroup tree, and whether that is all of it; or why there is none.
    pub cgroup: Result<(PathBuf, bool), String>,
    /// `--cgroup-root` names it: a part of the tree is intended then.
    pub cgroup_is_named: bool,
    /// Where the bpffs should be.
    pub bpffs: PathBuf,
    /// Whether it is there.
    pub has_bpffs: bool,
    /// Capabilities that this process lacks, or why they cannot be read.
    pub missing_capabilities: Result<Vec<&'static str>, String>,
}

impl Default for Environment {
    fn default() -> Self {
        Self {
            cgroup: Ok((PathBuf::from("/sys/fs/cgroup"), true)),
            cgroup_is_named: false,
            bpffs: PathBuf::from("/sys/fs/bpf"),
            has_bpffs: true,
            missing_capabilities: Ok(Vec::new()),
        }
    }
}

/// A network device that is up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// What kind of device it is.
    pub kind: DeviceKind,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// A default route leads over it.
    pub is_uplink: bool,
}

/// The network of the node.
#[derive(Clone, Debug)]
pub struct Network {
    /// `net.ipv4.ip_forward`.
    pub forwards4: Option<bool>,
    /// `net.ipv6.conf.all.forwarding`; `None` where the kernel has no IPv6.
    pub forwards6: Option<bool>,
    /// Whether a device has an IPv4 address that other machines know.
    pub has_ipv4: bool,
    /// Whether a device has an IPv6 address that other machines know.
    pub has_ipv6: bool,
    /// Ports that the kernel gives to sockets.
    pub local_ports: PortRange,
    /// Ports that it does not give to sockets, `net.ipv4.ip_local_reserved_ports`.
    pub reserved_ports: Vec<PortRange>,
    /// Ports that the API server gives to Services.
    pub node_ports: PortRange,
    /// Devices that are up, without loopback.
    pub devices: Vec<Device>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            forwards4: Some(true),
            forwards6: Some(true),
            has_ipv4: true,
            has_ipv6: false,
            local_ports: LOCAL_PORTS,
            reserved_ports: Vec::new(),
            node_ports: NODE_PORTS,
            devices: Vec::new(),
        }
    }
}

/// Other software.
#[derive(Clone, Debug)]
pub struct Others {
    /// The folder of the CNI configuration.
    pub cni_folder: PathBuf,
    /// The networks that its files name, with their main plugin; `None`: there is no such folder.
    pub cni: Option<Vec<String>>,
    /// Rules of kube-proxy, or why they cannot be read.
    pub kube_proxy: Result<KubeProxyRules, String>,
    /// The process of a kube-proxy in this network namespace.
    pub kube_proxy_process: Option<u32>,
    /// Virtual servers of IPVS.
    pub ipvs_servers: usize,
    /// Names of all loaded BPF programs.
    pub programs: BTreeSet<String>,
}

impl Default for Others {
    fn default() -> Self {
        Self {
            cni_folder: PathBuf::from("/etc/cni/net.d"),
            cni: None,
            kube_proxy: Ok(KubeProxyRules::default()),
            kube_proxy_process: None,
            ipvs_servers: 0,
            programs: BTreeSet::new(),
        }
    }
}

/// What the API server answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ApiAccess {
    /// It was not asked.
    #[default]
    NotAsked,
    /// There is no word of an API server here.
    NoCredentials(String),
    /// It does not answer, or the credentials cannot be used.
    Unreachable(String),
    /// It answers, and does not let us list these kinds.
    Refused {
        /// `v1.36.1`.
        version: String,
        /// The kinds, with its words.
        kinds: Vec<String>,
    },
    /// It answers, and lists what is needed.
    Well {
        /// `v1.36.1`.
        version: String,
    },
}

/// What the agent tells and what it has put into the kernel.
#[derive(Clone, Debug)]
pub struct Installed {
    /// Whether it answers.
    pub agent: AgentState,
    /// What it says is wrong.
    pub problems: Vec<String>,
    /// What its metrics tell; `None`: it was not asked, or does not answer.
    pub told: Option<Told>,
    /// The maps, and the layout that the agent wrote (0: none); or why they cannot be read.
    pub maps: Result<(Vec<UsageRow>, u32), String>,
    /// Whether the folders of the maps are root's alone, or what is wrong with them.
    pub owner: Result<(), String>,
    /// Its programs.
    pub attachments: Vec<Attachment>,
    /// Names of the devices that exist, by their indexes.
    pub devices: BTreeMap<u32, String>,
}

/// Some of the agent's metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Its version.
    pub version: Option<String>,
    /// Whether all that was listed was in the maps once.
    pub synced: bool,
    /// How long ago the maps were last made right.
    pub sync_age: Option<Duration>,
    /// Changes that are not in the maps yet.
    pub pending: u64,
    /// Comparisons with the API server that found nothing.
    pub audits_clean: u64,
    /// Those that repaired something.
    pub audits_repaired: u64,
    /// Those that could not be made.
    pub audits_failed: u64,
}
