//! The facts about a node that `ballast check` evaluates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use proxy_common::config::PortRange;

use crate::cli::show::{AgentReport, AgentState};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::maps::view::UsageRow;
use crate::programs::{Attachment, Forbidden, MissingFeature};
use proxy_core::model::DeviceKind;
use proxy_core::model::ports::{LOCAL_PORTS, NODE_PORTS};

/// All facts.
#[derive(Clone, Debug, Default)]
pub struct CheckFacts {
    /// The kernel.
    pub kernel: Kernel,
    /// Mounts and privileges.
    pub environment: Environment,
    /// Devices, ports and settings of the network.
    pub network: Network,
    /// Other software on this node that handles Services or packets.
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
    /// Program types that the kernel does not support; `None`: this process may not query the kernel.
    pub missing_programs: Option<Vec<&'static str>>,
    /// Map types that the kernel does not support; `None`: this process may not query the kernel.
    pub missing_maps: Option<Vec<&'static str>>,
    /// Missing kernel features that Ballast can do without; `None`: this process may not query the kernel.
    pub missing_features: Option<Vec<MissingFeature>>,
    /// Whether tasks of one CPU may interrupt each other while they process packets (`PREEMPT_RT`).
    pub interleaves_packets: bool,
    /// Whether the kernel provides BTF (`/sys/kernel/btf/vmlinux`).
    pub has_btf: bool,
    /// Options that the kernel was built without; `None`: the list of its options cannot be read.
    pub missing_options: Option<Vec<&'static str>>,
    /// `net.core.bpf_jit_enable`.
    pub jit: Option<u32>,
    /// `net.core.bpf_jit_harden`.
    pub jit_harden: Option<u32>,
}

/// Mounts, and the privileges of this process.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The cgroup tree, and whether it is the whole tree; or why there is none.
    pub cgroup: Result<(PathBuf, bool), String>,
    /// Whether `--cgroup-root` is given: then a part of the tree is intended.
    pub cgroup_is_named: bool,
    /// Path at which a bpffs should be mounted.
    pub bpffs: PathBuf,
    /// Whether a bpffs is mounted there.
    pub has_bpffs: bool,
    /// Capabilities that this process lacks, or why they cannot be read.
    pub missing_capabilities: Result<Vec<&'static str>, String>,
    /// Why bpf(2) is forbidden to this process, which has all capabilities.
    pub forbidden: Option<Forbidden>,
}

impl Default for Environment {
    fn default() -> Self {
        Self {
            cgroup: Ok((PathBuf::from("/sys/fs/cgroup"), true)),
            cgroup_is_named: false,
            bpffs: PathBuf::from("/sys/fs/bpf"),
            has_bpffs: true,
            missing_capabilities: Ok(Vec::new()),
            forbidden: None,
        }
    }
}

/// A network device that is up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// What kind of device it is.
    pub kind: DeviceKind,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// Whether a default route uses the device.
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
    /// Ports that the kernel assigns to sockets, without the reserved ones (`net.ipv4.ip_local_reserved_ports`).
    pub local_ports: Vec<PortRange>,
    /// Ports that the API server assigns to Services.
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
            local_ports: vec![LOCAL_PORTS],
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
    /// The networks that its files define, each with its main plugin; `None`: the folder does not exist.
    pub cni: Option<Vec<String>>,
    /// Rules of kube-proxy, or why they cannot be read.
    pub kube_proxy: Result<KubeProxyRules, String>,
    /// Process id of a kube-proxy in this network namespace.
    pub kube_proxy_process: Option<u32>,
    /// Devices with addresses that another service proxy has probably left, and the number of addresses.
    pub leftovers: Vec<(String, usize)>,
    /// Chains of netfilter that drop what no rule accepts, or why they cannot be read.
    pub firewall: Result<Vec<String>, String>,
    /// Chains with rules that see no packet with the address of a Service, or why they cannot be read.
    pub bypassed: Result<Vec<String>, String>,
    /// Number of virtual servers of IPVS.
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
            leftovers: Vec::new(),
            firewall: Ok(Vec::new()),
            bypassed: Ok(Vec::new()),
            ipvs_servers: 0,
            programs: BTreeSet::new(),
        }
    }
}

/// Result of the query to the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ApiAccess {
    /// The API server was not queried.
    #[default]
    NotAsked,
    /// No credentials for an API server were found.
    NoCredentials(String),
    /// The kubeconfig cannot be read or parsed.
    BrokenKubeconfig(String),
    /// The API server does not answer.
    Unreachable(String),
    /// The certificate of the API server, or the certificates, keys and tokens of the kubeconfig, cannot be used.
    Certificates(String),
    /// The API server answers, but denies listing these kinds.
    Refused {
        /// `v1.36.1`.
        version: String,
        /// The kinds, each with the API server's message.
        kinds: Vec<String>,
    },
    /// The API server answers, and lists all needed kinds.
    Well {
        /// `v1.36.1`.
        version: String,
    },
}

/// The agent's report, and what it has installed in the kernel.
#[derive(Clone, Debug)]
pub struct Installed {
    /// Whether the agent answers.
    pub agent: AgentState,
    /// What the agent reports; if it does not answer, the problems are the faults that the maps have counted.
    pub report: AgentReport,
    /// The agent's metrics; `None`: the agent was not queried, or does not answer.
    pub metrics: Option<AgentMetrics>,
    /// The maps, and the ABI version that the agent wrote (0: none); or why they cannot be read.
    pub maps: Result<(Vec<UsageRow>, u32), String>,
    /// Whether the folders of the maps belong to root alone, or what is wrong with them; `None`: there are none.
    pub owner: Option<Result<(), String>>,
    /// This process may not read the pins, so it is not known what is attached.
    pub is_denied: bool,
    /// Attachments of the agent's programs.
    pub attachments: Vec<Attachment>,
    /// Names of the existing devices, by index.
    pub devices: BTreeMap<u32, String>,
}

/// Some of the agent's metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentMetrics {
    /// Version of the agent.
    pub version: Option<String>,
    /// Whether all listed objects have been written to the maps.
    pub synced: bool,
    /// The agent's setting; zero if it is not known.
    pub sync_period: Duration,
    /// Time since the maps were last known to be up to date, in the family where it is longer.
    pub sync_age: Option<Duration>,
    /// Number of changes that are not in the maps yet.
    pub pending: u64,
    /// Number of audits (comparisons with the API server) that found no difference.
    pub audits_clean: u64,
    /// Number of audits that repaired a difference.
    pub audits_repaired: u64,
    /// Number of audits that failed.
    pub audits_failed: u64,
    /// Names of the uplinks on which a program is not attached.
    pub detached: BTreeSet<String>,
}
