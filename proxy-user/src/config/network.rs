//! Settings of the network around this node.

use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;

use clap::builder::FalseyValueParser;
use ipnet::IpNet;
use proxy_common::config::SNAT_PORTS;
use serde::{Serialize, Serializer};

use super::choices::choice;
use super::error::ConfigError;
use crate::host::selection::Pattern;
use proxy_cli::value::{self, DetectLocalMode, NodePortAddress, NodePortRange, SnatPorts, ValueError};
use proxy_core::model::ServiceName;
use proxy_core::model::settings::{DetectLocal, NodePortAddresses, NodeSettings, UnallocatedAddresses};

/// Addresses, devices, and how pods of this node are recognized. The fields are the flags with these names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, clap::Args)]
#[serde(rename_all = "camelCase")]
#[command(next_help_heading = "Network")]
pub struct Network {
    /// Addresses of this node that accept NodePort traffic: ranges like 192.0.2.0/24, `primary` (one address of each
    /// family: --bind-address, else the first `InternalIP`, else the first `ExternalIP`), `all` (without loopback), `localhost` (for sockets of the node itself); each word at most once. Default: as
    /// kube-proxy in its mode (nftables: primary; iptables: all,127.0.0.0/8; otherwise all).
    #[serde(serialize_with = "texts")]
    #[arg(long, env = "BALLAST_NODEPORT_ADDRESSES", value_name = "LIST", value_delimiter = ',')]
    pub nodeport_addresses: Vec<NodePortAddress>,
    /// How Ballast recognizes traffic of pods of this node. Default: by its device (every device that is not an uplink), or by --cluster-cidr if that is given.
    #[arg(long, env = "BALLAST_DETECT_LOCAL_MODE", value_name = "MODE", ignore_case = true, value_parser = choice::<DetectLocalMode>())]
    pub detect_local_mode: Option<DetectLocalMode>,
    /// Address ranges of all pods of the cluster, at most one for each address family.
    #[serde(rename = "clusterCIDR", serialize_with = "texts")]
    #[arg(long, env = "BALLAST_CLUSTER_CIDR", value_name = "CIDR", value_delimiter = ',', value_parser = value::range)]
    pub cluster_cidr: Vec<IpNet>,
    /// Bridge to which the pods of this node are connected, for --detect-local-mode `BridgeInterface`.
    #[arg(long, env = "BALLAST_POD_BRIDGE_INTERFACE", value_name = "NAME")]
    pub pod_bridge_interface: Option<String>,
    /// Prefix of the device names of pods, for --detect-local-mode `InterfaceNamePrefix`.
    #[arg(long, env = "BALLAST_POD_INTERFACE_NAME_PREFIX", value_name = "PREFIX")]
    pub pod_interface_name_prefix: Option<String>,
    /// Additional uplinks (devices that receive packets of other machines): comma-separated names with * and ?. Ballast
    /// finds these itself: NICs, bonds, tunnels, tun devices with an address, and devices with a default route, an internal address of the node, or a
    /// network of their own.
    #[arg(
        long,
        env = "BALLAST_UPLINKS",
        value_name = "GLOB",
        value_delimiter = ',',
        value_parser = |text: &str| text.parse::<Pattern>().map_err(|_| ValueError::Uplinks)
    )]
    pub uplinks: Vec<Pattern>,
    /// Local devices (only pods, containers and virtual machines of this node are behind them), even if they look like
    /// uplinks: comma-separated names with * and ?.
    #[arg(
        long,
        env = "BALLAST_LOCAL_DEVICES",
        value_name = "GLOB",
        value_delimiter = ',',
        value_parser = |text: &str| text.parse::<Pattern>().map_err(|_| ValueError::LocalDevices)
    )]
    pub local_devices: Vec<Pattern>,
    /// Ranges of ClusterIPs, in addition to the `ServiceCIDR` objects of the cluster. Packets to an address in such a range
    /// that no Service has are dropped.
    #[serde(rename = "serviceCIDRs", serialize_with = "texts")]
    #[arg(long, env = "BALLAST_SERVICE_CIDRS", value_name = "CIDR", value_delimiter = ',', value_parser = value::range)]
    pub service_cidrs: Vec<IpNet>,
    /// What happens to packets to an address in a range of ClusterIPs that no Service has, and to a port that the Service of a
    /// ClusterIP does not have. Default: pass if the mode iptables is given by name, otherwise drop; drop with
    /// --service-cidrs.
    #[arg(long, env = "BALLAST_UNALLOCATED_ADDRESSES", value_name = "HOW", value_parser = choice::<UnallocatedAddresses>())]
    pub unallocated_addresses: Option<UnallocatedAddresses>,
    /// SNAT all traffic to ClusterIPs to the node's address.
    #[arg(
        long,
        env = "BALLAST_MASQUERADE_ALL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = FalseyValueParser::new()
    )]
    pub masquerade_all: Option<bool>,
    /// SNAT clients outside also if the endpoint is on this node and the policy is Cluster, as kube-proxy does. A rule of
    /// netfilter translates the source, so rules in FORWARD and policies see the client. `false`: such an endpoint sees the
    /// client's address, and does not answer if its replies do not return through this node by themselves (a pod with a
    /// default route of its own: a VPN, Multus, an egress gateway).
    #[arg(
        long,
        env = "BALLAST_MASQUERADE_EXTERNAL",
        num_args = 0..=1,
        require_equals = true,
        default_value = "true",
        default_missing_value = "true",
        action = clap::ArgAction::Set,
        value_parser = FalseyValueParser::new()
    )]
    pub masquerade_external: bool,
    /// Answer ICMP echo requests (ping) to addresses of Services: cluster addresses, load balancer addresses and external
    /// addresses. The reply tells that this node serves the address, and nothing about endpoints.
    #[arg(long, env = "BALLAST_VIP_ECHO", value_parser = FalseyValueParser::new())]
    pub vip_echo: bool,
    /// Source ports for SNAT: one or two ranges. Nothing else on the node may use these ports. Default: the two largest
    /// ranges of ports from 1024 to 65535 outside `net.ipv4.ip_local_port_range` and --service-node-port-range; if these have
    /// fewer than 8192 ports, those outside of 32768-60999.
    #[serde(serialize_with = "text_if_any")]
    #[arg(long, env = "BALLAST_SNAT_PORTS", value_name = "FIRST-LAST[,FIRST-LAST]")]
    pub snat_ports: Option<SnatPorts>,
    /// Port range for NodePorts; the same value as the API server's flag of this name.
    #[serde(serialize_with = "text")]
    #[arg(long, env = "BALLAST_SERVICE_NODE_PORT_RANGE", value_name = "FIRST-LAST", default_value_t)]
    pub service_node_port_range: NodePortRange,
    /// If loadBalancerSourceRanges has no range of an address family, drop all traffic to the load balancer addresses of
    /// that family. Without this flag every client is allowed, as with kube-proxy.
    #[arg(long, env = "BALLAST_SOURCE_RANGES_STRICT", value_parser = FalseyValueParser::new())]
    pub source_ranges_strict: bool,
    /// The Service whose endpoints are the agents of all nodes, as NAMESPACE/NAME. With it, agents answer pods that wait until
    /// every node has programmed them (`ballast gate`).
    #[arg(long, env = "BALLAST_GATE_SERVICE", value_name = "SERVICE")]
    pub gate_service: Option<GateService>,
}

/// The value of `--gate-service`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateService(pub ServiceName);

/// The text is no name of a Service.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a Service: give NAMESPACE/NAME")]
pub struct NoService(String);

impl FromStr for GateService {
    type Err = NoService;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text
            .split_once('/')
            .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty() && !name.contains('/'));
        let (namespace, name) = parts.ok_or_else(|| NoService(text.to_owned()))?;
        Ok(Self(ServiceName::new(namespace, name)))
    }
}

impl Serialize for GateService {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// Returns the checked settings; `address` is the value of `--bind-address`, `masquerade_mark` that of kube-proxy's
/// `masqueradeBit`.
pub fn node_settings(
    network: &Network,
    address: IpAddr,
    masquerade_mark: u32,
) -> Result<NodeSettings, ConfigError> {
    if let Some(both) = network.uplinks.iter().find(|pattern| network.local_devices.contains(pattern)) {
        return Err(ConfigError::BothSides(both.to_string()));
    }
    Ok(NodeSettings {
        address: Some(address).filter(|address| !address.is_unspecified()),
        node_port_addresses: node_port_addresses(&network.nodeport_addresses)?,
        detect_local: detect_local(network)?,
        masquerade_all: network.masquerade_all.unwrap_or_default(),
        masquerade_mark: if network.masquerade_external { masquerade_mark } else { 0 },
        vip_echo: network.vip_echo,
        snat_ports: network.snat_ports.map_or(SNAT_PORTS, |ports| ports.0),
        node_ports: network.service_node_port_range.0,
        service_cidrs: network.service_cidrs.clone(),
        unallocated: network.unallocated_addresses.unwrap_or_default(),
        ..NodeSettings::default()
    })
}

/// Converts the list; an empty list means all addresses, as in kube-proxy's iptables mode. A word that is given twice is an error.
fn node_port_addresses(list: &[NodePortAddress]) -> Result<NodePortAddresses, ConfigError> {
    let mut wanted = NodePortAddresses { all: list.is_empty(), ..NodePortAddresses::default() };
    for one in list {
        let word = match one {
            NodePortAddress::All => &mut wanted.all,
            NodePortAddress::Primary => &mut wanted.primary,
            NodePortAddress::Localhost => &mut wanted.localhost,
            NodePortAddress::Range(range) => {
                wanted.ranges.push(*range);
                continue;
            }
        };
        if std::mem::replace(word, true) {
            return Err(ConfigError::Twice(one.to_string()));
        }
    }
    Ok(wanted)
}

/// Returns how pods are recognized; an error if the mode lacks the value that it needs. Values of other modes are ignored.
fn detect_local(network: &Network) -> Result<DetectLocal, ConfigError> {
    let needs = |mode: DetectLocalMode, flag| ConfigError::DetectLocal { mode: mode.name(), flag };
    Ok(match network.detect_local_mode {
        None if network.cluster_cidr.is_empty() => DetectLocal::Devices,
        Some(mode @ DetectLocalMode::ClusterCidr) if network.cluster_cidr.is_empty() => {
            return Err(needs(mode, "--cluster-cidr"));
        }
        None | Some(DetectLocalMode::ClusterCidr) => DetectLocal::ClusterCidr(network.cluster_cidr.clone()),
        Some(DetectLocalMode::NodeCidr) => DetectLocal::NodeCidr,
        Some(mode @ DetectLocalMode::BridgeInterface) => {
            let named = network.pod_bridge_interface.clone().filter(|name| !name.is_empty());
            DetectLocal::Bridge(named.ok_or_else(|| needs(mode, "--pod-bridge-interface"))?)
        }
        Some(mode @ DetectLocalMode::InterfaceNamePrefix) => {
            let named = network.pod_interface_name_prefix.clone().filter(|prefix| !prefix.is_empty());
            let missing = || needs(mode, "--pod-interface-name-prefix");
            DetectLocal::InterfaceNamePrefix(named.ok_or_else(missing)?)
        }
    })
}

fn text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

#[expect(clippy::ref_option, reason = "serde hands over the field")]
fn text_if_any<T: Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

fn texts<T: Display, S: Serializer>(values: &[T], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(values.iter().map(ToString::to_string))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rstest::rstest;

    use proxy_common::config::{MASQUERADE_MARK, PortRange};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        network: Network,
    }

    fn settings(flags: &str) -> Result<NodeSettings, String> {
        let cli = Cli::try_parse_from([""].into_iter().chain(flags.split_whitespace()));
        let args = cli.map_err(|error| error.to_string())?.network;
        node_settings(&args, std::net::Ipv4Addr::UNSPECIFIED.into(), MASQUERADE_MARK)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_node_ports_use_every_address_and_pods_are_known_by_devices() {
        let error = settings("--nodeport-addresses primary,10.0.0.0/8,primary").unwrap_err();
        assert!(error.contains("--nodeport-addresses") && error.contains("primary"), "{error}");
        let all = NodePortAddresses { all: true, ..NodePortAddresses::default() };
        assert_eq!(
            settings("").unwrap(),
            NodeSettings {
                node_port_addresses: all,
                masquerade_mark: MASQUERADE_MARK,
                ..NodeSettings::default()
            }
        );
    }

    #[test]
    fn addresses_of_node_ports_add_up() {
        let wanted =
            settings("--nodeport-addresses primary,10.1.2.3/8,localhost").unwrap().node_port_addresses;
        let ranges = vec!["10.0.0.0/8".parse().unwrap()];
        assert_eq!(
            wanted,
            NodePortAddresses { primary: true, localhost: true, ranges, ..NodePortAddresses::default() }
        );
        assert!(settings("--nodeport-addresses all,localhost").unwrap().node_port_addresses.all);
        assert!(settings("--nodeport-addresses 10.0.0.1").unwrap_err().contains("primary"));
    }

    #[rstest]
    #[case("--cluster-cidr 10.244.0.0/16", DetectLocal::ClusterCidr(vec!["10.244.0.0/16".parse().unwrap()]))]
    #[case("--detect-local-mode nodecidr --cluster-cidr 10.244.0.0/16", DetectLocal::NodeCidr)]
    #[case("--detect-local-mode BridgeInterface --pod-bridge-interface cni0", DetectLocal::Bridge("cni0".into()))]
    #[case(
        "--detect-local-mode InterfaceNamePrefix --pod-interface-name-prefix cali",
        DetectLocal::InterfaceNamePrefix("cali".into())
    )]
    fn modes(#[case] flags: &str, #[case] expected: DetectLocal) {
        assert_eq!(settings(flags).unwrap().detect_local, expected);
    }

    #[rstest]
    #[case("--detect-local-mode ClusterCIDR", "--cluster-cidr")]
    #[case("--detect-local-mode BridgeInterface", "--pod-bridge-interface")]
    #[case("--detect-local-mode InterfaceNamePrefix", "--pod-interface-name-prefix")]
    fn a_mode_asks_for_what_it_needs(#[case] flags: &str, #[case] flag: &str) {
        assert!(settings(flags).unwrap_err().contains(flag));
    }

    #[test]
    fn a_device_is_on_one_side() {
        assert!(settings("--uplinks tun*,eth1 --local-devices tap*,tun0").is_ok());
        let error = settings("--uplinks tun*,eth1 --local-devices tap*,tun*").unwrap_err();
        assert!(error.contains("--uplinks") && error.contains("--local-devices") && error.contains("tun*"));
        assert!(settings("--local-devices !eth0").unwrap_err().contains("expected an interface name"));
    }

    #[rstest]
    #[case("--snat-ports 61000-65535", Some([(61_000, 65_535), (0, 0)]))]
    #[case("--snat-ports 50000-50000", Some([(50_000, 50_000), (0, 0)]))]
    #[case("--snat-ports 1024-29999,61000-65535", Some([(1_024, 29_999), (61_000, 65_535)]))]
    #[case("--snat-ports 61000-65535,1024-29999", None)]
    #[case("--snat-ports 1024-1025,2000-2001,3000-3001", None)]
    #[case("--snat-ports 65535-61000", None)]
    #[case("--snat-ports 80-90", None)]
    #[case("--snat-ports 61000", None)]
    fn ports(#[case] flags: &str, #[case] expected: Option<[(u16, u16); 2]>) {
        let expected = expected.map(|ranges| ranges.map(|(first, last)| PortRange::new(first, last)));
        assert_eq!(settings(flags).ok().map(|settings| settings.snat_ports), expected);
    }
}
