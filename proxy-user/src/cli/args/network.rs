//! The flags that say what the network around this node is like.

use clap::builder::FalseyValueParser;
use ipnet::IpNet;

use crate::config::network::Network;
use crate::config::value::{self, DetectLocalMode, NodePortAddress, NodePortRange, SnatPorts};
use crate::host::selection::Pattern;

/// Flags about addresses, devices and who counts as a pod of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "The network")]
pub struct NetworkArgs {
    /// Which addresses of this node answer at node ports: ranges like 192.0.2.0/24, `primary` (the node's
    /// internal addresses), `all` (without loopback), `localhost` (for sockets of the node itself). Default: all.
    #[arg(long, env = "BALLAST_NODEPORT_ADDRESSES", value_name = "LIST", value_delimiter = ',')]
    pub nodeport_addresses: Vec<NodePortAddress>,
    /// How pods of this node are known. Default: by their devices, which are all that other machines are not behind; by --cluster-cidr where that is given.
    #[arg(long, env = "BALLAST_DETECT_LOCAL_MODE", value_name = "MODE", ignore_case = true)]
    pub detect_local_mode: Option<DetectLocalMode>,
    /// The ranges of all pods of the cluster, at most one of each address family.
    #[arg(long, env = "BALLAST_CLUSTER_CIDR", value_name = "CIDR", value_delimiter = ',', value_parser = value::range)]
    pub cluster_cidr: Vec<IpNet>,
    /// The bridge that pods of this node are behind, for --detect-local-mode `BridgeInterface`.
    #[arg(long, env = "BALLAST_POD_BRIDGE_INTERFACE", value_name = "NAME")]
    pub pod_bridge_interface: Option<String>,
    /// How the names of the devices of pods begin, for --detect-local-mode `InterfaceNamePrefix`.
    #[arg(long, env = "BALLAST_POD_INTERFACE_NAME_PREFIX", value_name = "PREFIX")]
    pub pod_interface_name_prefix: Option<String>,
    /// Devices by which packets of other machines come in, as names with * and ?, beside those that are found: NICs,
    /// bonds, tunnels, and what has a default route, an internal address of the node, or a network of its own.
    #[arg(
        long,
        env = "BALLAST_UPLINKS",
        value_name = "GLOB",
        value_delimiter = ',',
        value_parser = value::uplink_pattern
    )]
    pub uplinks: Vec<Pattern>,
    /// Devices that only pods, containers and virtual machines of this node are behind, as names with * and ?,
    /// whatever else is known of them.
    #[arg(
        long,
        env = "BALLAST_LOCAL_DEVICES",
        value_name = "GLOB",
        value_delimiter = ',',
        value_parser = value::local_device_pattern
    )]
    pub local_devices: Vec<Pattern>,
    /// Ranges of Service addresses, beside those that the cluster tells (`ServiceCIDR`). Inside them, packets to
    /// addresses that no Service has are dropped.
    #[arg(long, env = "BALLAST_SERVICE_CIDRS", value_name = "CIDR", value_delimiter = ',', value_parser = value::range)]
    pub service_cidrs: Vec<IpNet>,
    /// Send every packet to a cluster address on under the node's own address.
    #[arg(
        long,
        env = "BALLAST_MASQUERADE_ALL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = FalseyValueParser::new()
    )]
    pub masquerade_all: Option<bool>,
    /// Source ports of packets that are sent on under the node's own address: one range, or two. Nothing else on the node
    /// may use them. Default: every port from 1024 up that is neither in `net.ipv4.ip_local_port_range` nor in
    /// --service-node-port-range, in the two largest ranges.
    #[arg(long, env = "BALLAST_SNAT_PORTS", value_name = "FIRST-LAST[,FIRST-LAST]")]
    pub snat_ports: Option<SnatPorts>,
    /// Ports that the API server gives to Services as node ports, as its flag of this name says.
    #[arg(long, env = "BALLAST_SERVICE_NODE_PORT_RANGE", value_name = "FIRST-LAST", default_value_t)]
    pub service_node_port_range: NodePortRange,
    /// Close a load balancer's address of a family that loadBalancerSourceRanges says nothing about. Without
    /// this it is open to every client, as with kube-proxy.
    #[arg(long, env = "BALLAST_SOURCE_RANGES_STRICT", value_parser = FalseyValueParser::new())]
    pub source_ranges_strict: bool,
}

impl From<NetworkArgs> for Network {
    fn from(args: NetworkArgs) -> Self {
        let NetworkArgs {
            nodeport_addresses,
            detect_local_mode,
            cluster_cidr,
            pod_bridge_interface,
            pod_interface_name_prefix,
            uplinks,
            local_devices,
            service_cidrs,
            masquerade_all,
            snat_ports,
            service_node_port_range,
            source_ranges_strict,
        } = args;
        Self {
            nodeport_addresses,
            detect_local_mode,
            cluster_cidr,
            pod_bridge_interface,
            pod_interface_name_prefix,
            uplinks,
            local_devices,
            service_cidrs,
            masquerade_all,
            snat_ports,
            service_node_port_range,
            source_ranges_strict,
        }
    }
}
