//! Flags that describe the network around this node.

use super::choices::choice;
use super::mirror::flags_of;
use clap::builder::FalseyValueParser;
use ipnet::IpNet;

use crate::config::devices;
use crate::config::network::{GateService, Network};
use crate::host::selection::Pattern;
use proxy_cli::value::{self, DetectLocalMode, NodePortAddress, NodePortRange, SnatPorts};

flags_of! {
    /// Flags about addresses, devices and who counts as a pod of this node.
    #[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
    #[command(next_help_heading = "Network")]
    NetworkArgs => Network {
        /// Addresses of this node that accept NodePort traffic: ranges like 192.0.2.0/24, `primary` (the `InternalIP`s of the
        /// Node), `all` (without loopback), `localhost` (for sockets of the node itself); each word at most once. Default: as
        /// kube-proxy in its mode (nftables: primary; iptables: all,127.0.0.0/8; otherwise all).
        #[arg(long, env = "BALLAST_NODEPORT_ADDRESSES", value_name = "LIST", value_delimiter = ',')]
        nodeport_addresses: Vec<NodePortAddress>,
        /// How Ballast recognizes traffic of pods of this node. Default: by its device (every device that is not an uplink), or by --cluster-cidr if that is given.
        #[arg(long, env = "BALLAST_DETECT_LOCAL_MODE", value_name = "MODE", ignore_case = true, value_parser = choice::<DetectLocalMode>())]
        detect_local_mode: Option<DetectLocalMode>,
        /// Address ranges of all pods of the cluster, at most one for each address family.
        #[arg(long, env = "BALLAST_CLUSTER_CIDR", value_name = "CIDR", value_delimiter = ',', value_parser = value::range)]
        cluster_cidr: Vec<IpNet>,
        /// Bridge to which the pods of this node are connected, for --detect-local-mode `BridgeInterface`.
        #[arg(long, env = "BALLAST_POD_BRIDGE_INTERFACE", value_name = "NAME")]
        pod_bridge_interface: Option<String>,
        /// Prefix of the device names of pods, for --detect-local-mode `InterfaceNamePrefix`.
        #[arg(long, env = "BALLAST_POD_INTERFACE_NAME_PREFIX", value_name = "PREFIX")]
        pod_interface_name_prefix: Option<String>,
        /// Additional uplinks (devices that receive packets of other machines): comma-separated names with * and ?. Ballast
        /// finds these itself: NICs, bonds, tunnels, and devices with a default route, an internal address of the node, or a
        /// network of their own.
        #[arg(
            long,
            env = "BALLAST_UPLINKS",
            value_name = "GLOB",
            value_delimiter = ',',
            value_parser = devices::uplink_pattern
        )]
        uplinks: Vec<Pattern>,
        /// Local devices (only pods, containers and virtual machines of this node are behind them), even if they look like
        /// uplinks: comma-separated names with * and ?.
        #[arg(
            long,
            env = "BALLAST_LOCAL_DEVICES",
            value_name = "GLOB",
            value_delimiter = ',',
            value_parser = devices::local_device_pattern
        )]
        local_devices: Vec<Pattern>,
        /// Ranges of ClusterIPs, in addition to the `ServiceCIDR` objects of the cluster. Packets to an address in such a range
        /// that no Service has are dropped.
        #[arg(long, env = "BALLAST_SERVICE_CIDRS", value_name = "CIDR", value_delimiter = ',', value_parser = value::range)]
        service_cidrs: Vec<IpNet>,
        /// SNAT all traffic to ClusterIPs to the node's address.
        #[arg(
            long,
            env = "BALLAST_MASQUERADE_ALL",
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "true",
            value_parser = FalseyValueParser::new()
        )]
        masquerade_all: Option<bool>,
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
        masquerade_external: bool,
        /// Answer ICMP echo requests (ping) to addresses of Services: cluster addresses, load balancer addresses and external
        /// addresses. The reply tells that this node serves the address, and nothing about endpoints.
        #[arg(long, env = "BALLAST_VIP_ECHO", value_parser = FalseyValueParser::new())]
        vip_echo: bool,
        /// Source ports for SNAT: one or two ranges. Nothing else on the node may use these ports. Default: the two largest
        /// ranges of ports from 1024 to 65535 outside `net.ipv4.ip_local_port_range` and --service-node-port-range.
        #[arg(long, env = "BALLAST_SNAT_PORTS", value_name = "FIRST-LAST[,FIRST-LAST]")]
        snat_ports: Option<SnatPorts>,
        /// Port range for NodePorts; the same value as the API server's flag of this name.
        #[arg(long, env = "BALLAST_SERVICE_NODE_PORT_RANGE", value_name = "FIRST-LAST", default_value_t)]
        service_node_port_range: NodePortRange,
        /// If loadBalancerSourceRanges has no range of an address family, drop all traffic to the load balancer addresses of
        /// that family. Without this flag every client is allowed, as with kube-proxy.
        #[arg(long, env = "BALLAST_SOURCE_RANGES_STRICT", value_parser = FalseyValueParser::new())]
        source_ranges_strict: bool,
        /// The Service whose endpoints are the agents of all nodes, as NAMESPACE/NAME. With it, agents answer pods that wait until
        /// every node has programmed them (`ballast gate`).
        #[arg(long, env = "BALLAST_GATE_SERVICE", value_name = "SERVICE")]
        gate_service: Option<GateService>,
    }
}
