//! Applies the file and the flags of kube-proxy to the agent's options.
//!
//! With a file, all flags that kube-proxy has are ignored, as kube-proxy does, except those for the log,
//! `--hostname-override` and `--master`. Flags that only Ballast has are always in effect.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use proxy_common::config::MASQUERADE_MARK;
use proxy_common::select::Algorithm;
use serde::Serialize;

use super::fields::Modes;
use super::file::{self, FileError};
use super::values::Values;
use crate::config::options::{Options, SYNC_PERIOD};
use proxy_cli::value::{
    self, AlgorithmName, DetectLocalMode, Listen, LogFormat, LogLevel, NodePortAddress, ProxyMode,
};
use proxy_core::model::settings::{Conntrack, UnallocatedAddresses};
use proxy_core::model::spread;

/// The shortest period between full comparisons.
pub const SHORTEST_PERIOD: Duration = Duration::from_secs(1);
/// The feature that permits external addresses of Services.
const EXTERNAL_IPS: &str = "AllowServiceExternalIPs";

/// Settings that come only from kube-proxy's file and flags.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Overlay {
    /// The file.
    pub config_file: Option<PathBuf>,
    /// Whether the agent exits if the address of a server is in use.
    pub bind_address_hard_fail: bool,
    /// The value for `/proc/self/oom_score_adj`.
    pub oom_score_adj: Option<i32>,
    /// The given settings of connection tracking.
    pub conntrack: Conntrack,
    /// Sysctls of the node's netfilter: the given settings, and kube-proxy's defaults.
    pub netfilter: Conntrack,
    /// The bit of a packet's mark by which netfilter knows the packets to masquerade.
    pub masquerade_mark: u32,
    /// Whether external addresses of Services are ignored.
    pub no_external_ips: bool,
    /// Whether node ports never answer at loopback addresses, whatever the list of addresses contains.
    pub no_loopback_node_ports: bool,
    /// The mode of kube-proxy that is given, or whose behaviour is wanted.
    #[serde(skip)]
    pub mode: &'static str,
    /// The name of the node, as it was given.
    #[serde(skip)]
    pub hostname_override: String,
    /// The addresses of node ports in kube-proxy's list: as they were given, or kube-proxy's default in mode nftables.
    #[serde(skip)]
    pub node_port_list: Vec<String>,
    /// Why node ports answer where they do, if no list of addresses was given.
    #[serde(skip)]
    pub node_ports: Option<&'static str>,
    /// Lines for the log: given settings that are ignored.
    #[serde(skip)]
    pub notes: Vec<String>,
    /// The flags that were given and that the file replaces.
    #[serde(skip)]
    pub ignored_flags: Vec<String>,
    /// All given settings.
    #[serde(skip)]
    pub values: Values,
    /// The text of the file.
    #[serde(skip)]
    pub text: String,
}

/// Reads the file that `options` name, and merges its settings and those of kube-proxy's flags into `options`.
pub fn apply(options: &mut Options) -> Result<Overlay, FileError> {
    let mut merge = Overlay { config_file: options.config.clone(), ..Overlay::default() };
    let flags = std::mem::take(&mut options.kube_proxy);
    if let Some(path) = &merge.config_file {
        (merge.text, merge.values) = file::read(path)?;
        take_log_flags(options, &flags);
        let ignored = ignored_flags(options, &flags, &merge.values);
        let path = path.display();
        merge
            .notes
            .extend(ignored.iter().map(|flag| format!("{flag} is ignored: --config {path} is used instead")));
        merge.ignored_flags = ignored;
        take_log_flags(options, &merge.values);
        shared(options, &merge.values);
    } else {
        merge.values = flags;
        let proxy = match options.proxy_mode {
            Some(ProxyMode::Legacy(mode)) => mode,
            _ => "iptables",
        };
        let local = options.network.detect_local_mode.map_or("", DetectLocalMode::name);
        let errors = merge.values.settle(Modes { proxy, local, is_file: false });
        if !errors.is_empty() {
            return Err(FileError(errors));
        }
        take_log_flags(options, &merge.values);
        old_ports(options, &merge.values);
    }
    let values = merge.values.clone();
    merge.notes.extend(values.idle());
    for (gate, on) in values.gates() {
        if gate == EXTERNAL_IPS {
            merge.no_external_ips = !on;
        } else {
            merge.notes.push(format!("feature {gate}={on} is ignored"));
        }
    }
    merge.bind_address_hard_fail = values.switch("bindAddressHardFail").unwrap_or_default();
    merge.oom_score_adj = values.number("oomScoreAdj").map(|number| number as i32);
    merge.conntrack = conntrack(&values);
    merge.netfilter = netfilter(&values, &merge.conntrack);
    let bit = values.number(&format!("{}.masqueradeBit", rules_section(options.proxy_mode.as_ref())));
    merge.masquerade_mark = bit
        .and_then(|bit| u32::try_from(bit).ok().and_then(|bit| 1u32.checked_shl(bit)))
        .unwrap_or(MASQUERADE_MARK);
    let scheduler = scheduler(options, &values, &mut merge.notes);
    options.paths.algorithm = options.paths.algorithm.or(scheduler.map(AlgorithmName));
    merge.mode = mode(options, &values);
    merge.hostname_override = options.hostname_override.clone().unwrap_or_default();
    merge.node_port_list = values.list("nodePortAddresses").map_or_else(
        || options.network.nodeport_addresses.iter().map(ToString::to_string).collect(),
        <[String]>::to_vec,
    );
    if merge.mode == "nftables" && merge.node_port_list.is_empty() {
        merge.node_port_list.push(NodePortAddress::Primary.to_string());
    }
    merge.node_ports = node_port_addresses(options, &values, &mut merge);
    // kube-proxy's mode iptables routes packets to unused addresses and ports; nftables drops and rejects them (`cluster-ips` in
    // `pkg/proxy/nftables/proxier.go`), ipvs rejects unused ports (`KUBE-IPVS-FILTER`). Ranges that the operator names are there to
    // be dropped, and a file without the field is no file of kube-proxy.
    let names_mode = options.proxy_mode.is_some() || values.given("mode").is_some();
    if merge.mode == "iptables" && names_mode && options.network.service_cidrs.is_empty() {
        options.network.unallocated_addresses.get_or_insert(UnallocatedAddresses::Pass);
    }
    periods(options, &values, &mut merge.notes)?;
    detect_local(options, &values, &mut merge.notes)?;
    Ok(merge)
}

/// Takes the settings of the log. Flags for the log are in effect beside a file, and have priority over it; among the
/// flags, Ballast's have priority.
fn take_log_flags(options: &mut Options, values: &Values) {
    options.log_format = options.log_format.or(match values.text("logging.format") {
        Some("json") => Some(LogFormat::Json),
        Some(_) => Some(LogFormat::Text),
        None => None,
    });
    let level = values.number("logging.verbosity").map(|number| number.min(10).to_string());
    options.log_level = options.log_level.or_else(|| level?.parse::<LogLevel>().ok());
}

/// Returns the section that has the settings of rules for the mode.
fn rules_section(mode: Option<&ProxyMode>) -> &'static str {
    if mode == Some(&ProxyMode::Legacy("nftables")) { "nftables" } else { "iptables" }
}

/// Returns the address of a server.
fn listen(values: &Values, field: &str) -> Option<Listen> {
    values.text(field)?.parse().ok()
}

/// Removes the flags that a file replaces from `options`; returns those that were given.
fn ignored_flags(options: &mut Options, flags: &Values, file: &Values) -> Vec<String> {
    let network = &mut options.network;
    // The chart sets the variable of this flag for the commands in the pod, which do not read the file.
    let metrics = options.metrics_bind_address.take();
    let differs = metrics.is_some() && metrics != listen(file, "metricsBindAddress");
    let own = [
        (options.kubeconfig.take().is_some(), "--kubeconfig"),
        (options.bind_address.take().is_some(), "--bind-address"),
        (options.healthz_bind_address.take().is_some(), "--healthz-bind-address"),
        (differs, "--metrics-bind-address"),
        (options.proxy_mode.take().is_some(), "--proxy-mode"),
        (network.masquerade_all.take().is_some(), "--masquerade-all"),
        (network.detect_local_mode.take().is_some(), "--detect-local-mode"),
        (network.pod_bridge_interface.take().is_some(), "--pod-bridge-interface"),
        (network.pod_interface_name_prefix.take().is_some(), "--pod-interface-name-prefix"),
        (!std::mem::take(&mut network.cluster_cidr).is_empty(), "--cluster-cidr"),
        (!std::mem::take(&mut network.nodeport_addresses).is_empty(), "--nodeport-addresses"),
    ];
    let own = own.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.to_owned());
    let others = flags.iter().filter(|(key, _)| !key.starts_with("logging."));
    own.chain(others.map(|(_, given)| given.place.clone())).collect()
}

/// Takes the fields of the file for which the agent has flags. Their values were checked when the file was read.
fn shared(options: &mut Options, values: &Values) {
    let text = |key| values.text(key);
    let network = &mut options.network;
    options.kubeconfig = text("clientConnection.kubeconfig").map(PathBuf::from);
    options.hostname_override =
        options.hostname_override.take().or_else(|| text("hostnameOverride").map(str::to_owned));
    options.bind_address = text("bindAddress").and_then(|text| value::address(text).ok());
    options.healthz_bind_address = listen(values, "healthzBindAddress");
    options.metrics_bind_address = listen(values, "metricsBindAddress");
    options.proxy_mode = text("mode").and_then(|text| text.parse::<ProxyMode>().ok());
    let section = rules_section(options.proxy_mode.as_ref());
    network.masquerade_all = values.switch(&format!("{section}.masqueradeAll"));
    network.detect_local_mode = text("detectLocalMode").and_then(DetectLocalMode::from_name);
    network.pod_bridge_interface = text("detectLocal.bridgeInterface").map(str::to_owned);
    network.pod_interface_name_prefix = text("detectLocal.interfaceNamePrefix").map(str::to_owned);
    network.cluster_cidr = text("clusterCIDR")
        .into_iter()
        .flat_map(|text| text.split(','))
        .filter_map(|range| value::range(range).ok())
        .collect();
    network.nodeport_addresses = values
        .list("nodePortAddresses")
        .into_iter()
        .flatten()
        .filter_map(|text| text.parse::<NodePortAddress>().ok())
        .collect();
}

/// Applies `--healthz-port` and `--metrics-port`: 0 switches a server off, and a port is used for an address without a port.
fn old_ports(options: &mut Options, values: &Values) {
    let take = |address: &mut Option<Listen>, flag| match (values.number(flag), *address) {
        (Some(0), _) => *address = Some(Listen::Off),
        (Some(port), Some(listen @ Listen::Address(_))) => {
            *address = listen.resolve(u16::try_from(port).unwrap_or_default()).map(Listen::Socket);
        }
        _ => {}
    };
    take(&mut options.healthz_bind_address, "healthz-port");
    take(&mut options.metrics_bind_address, "metrics-port");
}

fn conntrack(values: &Values) -> Conntrack {
    let count = |key| values.number(key).and_then(|number| u32::try_from(number).ok());
    let (max_per_core, min) = (count("conntrack.maxPerCore"), count("conntrack.min"));
    // Used if only `conntrack.min` is given.
    let default = min.filter(|min| *min > 0).map(|_| Conntrack::MAX_PER_CORE);
    Conntrack {
        max_per_core: max_per_core.or(default).filter(|max| *max > 0),
        min,
        tcp_established: values.duration("conntrack.tcpEstablishedTimeout"),
        tcp_close_wait: values.duration("conntrack.tcpCloseWaitTimeout"),
        tcp_be_liberal: values.switch("conntrack.tcpBeLiberal").unwrap_or_default(),
        udp: values.duration("conntrack.udpTimeout"),
        udp_stream: values.duration("conntrack.udpStreamTimeout"),
    }
}

/// Returns what netfilter gets: where nothing is given, kube-proxy's defaults (`pkg/proxy/apis/config/v1alpha1/defaults.go`). 0 leaves
/// a value as it is.
fn netfilter(values: &Values, given: &Conntrack) -> Conntrack {
    fn or<T>(values: &Values, key: &str, given: Option<T>, default: T) -> Option<T> {
        given.or_else(|| values.given(key).is_none().then_some(default))
    }
    let Conntrack { max_per_core, min, tcp_established, tcp_close_wait, .. } = given.clone();
    Conntrack {
        max_per_core: or(values, "conntrack.maxPerCore", max_per_core, Conntrack::MAX_PER_CORE),
        min: or(values, "conntrack.min", min, Conntrack::MIN),
        tcp_established: or(
            values,
            "conntrack.tcpEstablishedTimeout",
            tcp_established,
            Conntrack::TCP_ESTABLISHED,
        ),
        tcp_close_wait: or(
            values,
            "conntrack.tcpCloseWaitTimeout",
            tcp_close_wait,
            Conntrack::TCP_CLOSE_WAIT,
        ),
        ..given.clone()
    }
}

/// Returns the algorithm for the scheduler of IPVS (`pkg/proxy/ipvs/proxier.go`: `rr` if none is given). kube-proxy lets `mh` hash
/// the client's port, too (`FlagSourceHash`, which is `IP_VS_SVC_F_SCHED_MH_PORT`).
fn scheduler(options: &Options, values: &Values, notes: &mut Vec<String>) -> Option<Algorithm> {
    let is_ipvs = options.proxy_mode == Some(ProxyMode::Legacy("ipvs"));
    let Some(name) = values.text("ipvs.scheduler").filter(|name| !name.is_empty()) else {
        return is_ipvs.then_some(Algorithm::RoundRobin);
    };
    let place = values.place("ipvs.scheduler");
    if !is_ipvs {
        notes.push(format!("{place} is ignored: only mode ipvs uses it"));
        return None;
    }
    let found = match name {
        "mh" => Some(Algorithm::Maglev),
        // `twos` takes two random endpoints, and selects the one with fewer connections for its weight: this is `wlc` here.
        "twos" => Some(Algorithm::WeightedLeastConnections),
        // Both keep the connections to one address together, and each Service of kube-proxy has one address.
        "lblc" | "lblcr" => {
            notes.push(format!("{place}: Ballast does not have {name}, and uses wlc, which is closest"));
            Some(Algorithm::WeightedLeastConnections)
        }
        _ => spread::algorithm(name),
    };
    if found.is_none() {
        let names = spread::algorithm_names();
        notes.push(format!("{place}: unknown scheduler {name}: give one of {names}; until then rr is used"));
    }
    found.or(Some(Algorithm::RoundRobin))
}

/// Returns the mode of kube-proxy whose behaviour is wanted. kube-proxy uses iptables if its file names no mode.
fn mode(options: &Options, values: &Values) -> &'static str {
    match options.proxy_mode {
        Some(ProxyMode::Legacy(mode)) => mode,
        None if options.config.is_some() || values.switch("iptables.localhostNodePorts") == Some(true) => {
            "iptables"
        }
        _ => "ebpf",
    }
}

/// Completes the addresses of node ports as kube-proxy does in the given mode, so that a migration opens no port and closes
/// none; returns why, if no list was given. kube-proxy's nftables mode answers at the primary address of each family, its
/// iptables mode at all addresses and, unless that is switched off, at IPv4 loopback, its ipvs mode at all addresses but
/// loopback.
fn node_port_addresses(options: &mut Options, values: &Values, merge: &mut Overlay) -> Option<&'static str> {
    let mode = merge.mode;
    let addresses = &mut options.network.nodeport_addresses;
    let is_empty = addresses.is_empty();
    let why = match mode {
        "iptables" if values.switch("iptables.localhostNodePorts") == Some(false) => {
            Some("iptables.localhostNodePorts is false")
        }
        "ipvs" => Some("mode ipvs"),
        _ => None,
    };
    merge.no_loopback_node_ports = why.is_some();
    if let Some((why, first)) = why.zip(addresses.iter().find(|one| one.is_loopback())) {
        let place = values
            .given("nodePortAddresses")
            .map_or_else(|| "--nodeport-addresses".to_owned(), |given| given.place.clone());
        merge
            .notes
            .push(format!("{place}: {first} is ignored: no loopback address accepts node ports: {why}"));
    }
    match mode {
        "nftables" if is_empty => {
            addresses.push(NodePortAddress::Primary);
            Some(
                "node ports answer at the node's InternalIP of each family only: mode nftables, no nodePortAddresses",
            )
        }
        "iptables" if why.is_none() => {
            add_loopback(addresses);
            is_empty.then_some(
                "node ports answer at all addresses, and at 127.0.0.0/8 for the node itself: mode iptables, no nodePortAddresses",
            )
        }
        _ => is_empty.then_some("node ports answer at all addresses but loopback: no nodePortAddresses"),
    }
}

/// Adds IPv4 loopback if a range contains it (`ContainsIPv4Loopback` in `pkg/proxy/util/nodeport_addresses.go`). A list without
/// IPv4 ranges means all of IPv4. This adds no word, which would be of both families.
fn add_loopback(addresses: &mut Vec<NodePortAddress>) {
    let is_v4 = |one: &NodePortAddress| match one {
        NodePortAddress::Range(range) => range.addr().is_ipv4(),
        // A word is of both families.
        _ => true,
    };
    if addresses.is_empty() {
        addresses.push(NodePortAddress::All);
    }
    if !addresses.iter().any(is_v4) {
        addresses.push(NodePortAddress::Range(Ipv4Net::default().into()));
    }
    let loopback = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
    let is_wider = |one: &NodePortAddress| match one {
        NodePortAddress::Range(IpNet::V4(range)) => range.contains(&loopback) && *range != loopback,
        one => *one == NodePortAddress::All,
    };
    let loopback = NodePortAddress::Range(loopback.into());
    if addresses.iter().any(is_wider) && !addresses.contains(&loopback) {
        addresses.push(loopback);
    }
}

/// Takes the periods of the given mode. Ballast's own flags have priority.
fn periods(options: &mut Options, values: &Values, notes: &mut Vec<String>) -> Result<(), FileError> {
    let section = match options.proxy_mode {
        Some(ProxyMode::Legacy("ipvs")) => "ipvs",
        // kube-proxy has no flags for its nftables mode, which uses those for iptables.
        Some(ProxyMode::Legacy("nftables")) if options.config.is_some() => "nftables",
        _ => "iptables",
    };
    let (max, min) = (format!("{section}.syncPeriod"), format!("{section}.minSyncPeriod"));
    if options.sync_period.is_none() {
        options.sync_period = values.duration(&max).map(|period| {
            if period < SHORTEST_PERIOD {
                notes.push(format!(
                    "{}: {period:?} is too short; {SHORTEST_PERIOD:?} is used",
                    values.place(&max)
                ));
            }
            period.max(SHORTEST_PERIOD)
        });
    }
    if options.min_sync_period.is_none() {
        options.min_sync_period = values.duration(&min);
        let longest = options.sync_period.unwrap_or(SYNC_PERIOD);
        if let Some(period) = options.min_sync_period.filter(|period| *period > longest) {
            let place = values.place(&min);
            return Err(FileError(vec![format!(
                "{place}: {period:?} is longer than {max} {longest:?}; shorten the first or lengthen the second"
            )]));
        }
    }
    Ok(())
}

/// Checks the mode. A mode without its name is an error. The mode `ClusterCIDR` without a range is replaced by
/// recognition by devices; kube-proxy considers no client local then.
fn detect_local(options: &mut Options, values: &Values, notes: &mut Vec<String>) -> Result<(), FileError> {
    let network = &mut options.network;
    let place = values.place("detectLocalMode");
    let needs = |mode, field: &str| Err(FileError(vec![format!("{place}: {mode} needs {field}; set it")]));
    match network.detect_local_mode {
        Some(DetectLocalMode::ClusterCidr) if network.cluster_cidr.is_empty() => {
            network.detect_local_mode = None;
            notes.push(format!(
                "{place} is ClusterCIDR without a range: pods are recognized by their devices"
            ));
            Ok(())
        }
        Some(DetectLocalMode::BridgeInterface)
            if options.config.is_some() && network.pod_bridge_interface.is_none() =>
        {
            needs("BridgeInterface", "detectLocal.bridgeInterface")
        }
        Some(DetectLocalMode::InterfaceNamePrefix)
            if options.config.is_some() && network.pod_interface_name_prefix.is_none() =>
        {
            needs("InterfaceNamePrefix", "detectLocal.interfaceNamePrefix")
        }
        _ => Ok(()),
    }
}
