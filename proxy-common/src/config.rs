//! `config`: the node's settings, which the agent writes for the programs.

use crate::node::{Cidr, DEVICE_MAC, DEVICE_UPLINK, Device};

/// The only value of `config`. Durations are in jiffies: a program reads jiffies at no cost, while reading nanoseconds
/// costs more than the rest of the packet's processing. The agent measures [`NodeConfig::hz`] at start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// Version of the layout of the maps: [`crate::version::ABI_VERSION`].
    pub abi: u32,
    /// Jiffies per second.
    pub hz: u32,
    /// Timeout of an unreplied TCP flow: the backend has not answered.
    pub tcp_syn_sent: u32,
    /// Timeout of a half-open TCP flow: the backend has answered, and the client has not acknowledged the answer.
    pub tcp_syn_recv: u32,
    /// Timeout of an established TCP flow.
    pub tcp_established: u32,
    /// Timeout of a TCP flow of which one end has sent FIN.
    pub tcp_close_wait: u32,
    /// Timeout of a TCP flow of which both ends have sent FIN.
    pub tcp_time_wait: u32,
    /// Timeout of a TCP flow that was reset.
    pub tcp_close: u32,
    /// Timeout of a UDP flow that is unreplied, or has had one exchange only.
    pub udp: u32,
    /// Timeout of a UDP flow with more than one exchange.
    pub udp_stream: u32,
    /// Seed of the hash of a flow's key, so that an attacker cannot fill one bucket. Never 0; it stays the same while flows
    /// exist.
    pub flow_seed: u32,
    /// `CONFIG_*` bits.
    pub flags: u32,
    /// Sizes of the flow tables, by the index of the family.
    pub flows: [FlowSize; 2],
    /// Source ports for SNAT, in two ranges.
    pub snat: [PortRange; SNAT_RANGES],
    /// The uplinks with the lowest indexes among `devices`; unused places are 0. Reading them needs no helper call. If all
    /// places are used, there may be more uplinks.
    pub uplinks: [u32; UPLINKS],
    /// The ceilings of the maps that grow. No program reads them.
    pub limits: Limits,
    /// The bit of `skb->mark` that the programs set for netfilter ([`CONFIG_MASQUERADE_EXTERNAL`]).
    pub masquerade_mark: u32,
    /// Low 32 bits of jiffies until which an agent attaches programs to new devices; 0: none does. Without programs, a pod's device
    /// does not translate packets, so rules that leave a pod's sockets to packets have no effect later, except for `mesh_ports`.
    pub attended_until: u32,
    /// Cookie of the network namespace that the agent serves: sockets in this namespace are the node's own.
    pub host_netns: u64,
    /// The MAC address at which this node receives the frames of each of `uplinks`: [`DEVICE_MAC`] of its entry.
    pub macs: [u64; UPLINKS],
    /// Ids of the cgroups below which the kubelet puts the cgroups of pods; unused places are 0. If all are 0, the sockets of
    /// every network namespace are translated; otherwise those of the node's own namespace, and of processes below these
    /// cgroups.
    pub pod_cgroups: [u64; POD_CGROUPS],
    /// Ports at which the proxy of a service mesh listens in a pod, host byte order; unused places are 0. While a pod has such a
    /// listener, its sockets are not translated: rules in the pod redirect packets by the Service's address.
    pub mesh_ports: [u16; MESH_PORTS],
    /// The ranges of this node's pods (`spec.podCIDRs`), which show what a pod is where `pod_cgroups` is not known:
    /// [`Cidr::NONE`] if there is none. Then the sockets of a namespace are translated once a connection of it had a source in
    /// the range.
    pub pods4: Cidr<[u32; 1]>,
    /// The same for IPv6.
    pub pods6: Cidr<[u32; 4]>,
    /// The range of the sources of outer IPv4 headers (DSR): a hash of the flow selects an address, so that the queues of the receiver's
    /// network card share the packets between two nodes. [`Cidr::NONE`]: the source is [`Tunnel::source`](crate::node::Tunnel::source).
    pub dsr_sources4: Cidr<[u32; 1]>,
    /// The same for IPv6.
    pub dsr_sources6: Cidr<[u32; 4]>,
    /// Number of flows to other nodes (DSR) that may begin on a CPU in a second. Packets of others are sent by the Maglev table alone,
    /// and keep no entry. 0: not limited.
    pub dsr_flow_rate: u32,
    /// Zero.
    pub reserved: u32,
}

/// Number of ports in [`NodeConfig::mesh_ports`].
pub const MESH_PORTS: usize = 4;

/// Number of cgroups in [`NodeConfig::pod_cgroups`].
pub const POD_CGROUPS: usize = 2;

/// Size of the flow table of one address family: `flows` and `flow_index`, or `flows6` and `flow_index6`.
///
/// The index grows while packets pass: for a while keys are in buckets by the old number of buckets or by the new one, and
/// every program looks in both. The agent changes one field at a time, and waits until no program runs that has read the old
/// value: first `searched`, then `buckets`; it moves the keys; and then `searched` again.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowSize {
    /// Number of entries.
    pub entries: u32,
    /// Number of buckets by which keys are added; a power of two.
    pub buckets: u32,
    /// Numbers of buckets by which keys are looked up, powers of two; the second is 0 unless the index grows.
    pub searched: [u32; 2],
}

impl FlowSize {
    /// Returns the size of a table whose index does not grow.
    pub const fn new(entries: u32, buckets: u32) -> Self {
        Self { entries, buckets, searched: [buckets, 0] }
    }
}

/// The number of elements up to which maps grow; 0: not limited.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Service port ids: `service_stats`, `turns`, and an eighth of the words of `maglev_index`.
    pub services: u32,
    /// Elements of `slots`.
    pub slots: u32,
    /// Words of `maglev`.
    pub maglev_words: u32,
    /// Backend ids.
    pub backends: u32,
    /// Flows of each address family.
    pub flows: u32,
}

/// Number of ranges of source ports for SNAT: one below and one above the local ports that the kernel gives to sockets.
pub const SNAT_RANGES: usize = 2;

/// A range of ports, host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// Number of ports; 0: the range is empty.
    pub count: u16,
}

impl PortRange {
    /// Returns the range from `first` to `last`, inclusive; an empty range if `first` is 0 or `last` is lower.
    pub const fn new(first: u16, last: u16) -> Self {
        if first == 0 || last < first {
            Self { first: 0, count: 0 }
        } else {
            Self { first, count: last - first + 1 }
        }
    }

    /// Returns the last port; 0 if the range is empty.
    pub const fn last(self) -> u16 {
        if self.count == 0 { 0 } else { self.first + (self.count - 1) }
    }

    /// Whether the port is in the range.
    #[inline(always)]
    pub const fn contains(self, port: u16) -> bool {
        port.wrapping_sub(self.first) < self.count
    }
}

/// The highest rate of a token bucket: its product with the jiffies of a second is a number of 32 bits.
pub const MAX_RATE: u32 = 1_000_000;

/// Number of uplinks that `config` holds; few nodes have more.
pub const UPLINKS: usize = 3;

flags! {
    /// All flags of [`NodeConfig::flags`].
    CONFIG_BITS {
        /// Every packet to a cluster address gets SNAT (`masqueradeAll`).
        pub const CONFIG_MASQUERADE_ALL: u32 = 1 << 0;
        /// The programs recognize pods only by their addresses (`detectLocalMode` `ClusterCIDR` and `NodeCIDR`). Without this
        /// bit they also recognize them by their devices.
        pub const CONFIG_DETECT_LOCAL: u32 = 1 << 1;
        /// Another proxy's rules are or were on this node: the programs leave a TCP packet that begins no connection and
        /// belongs to no flow to netfilter, which may have translated its connection from the start.
        pub const CONFIG_OTHER_PROXY: u32 = 1 << 2;
        /// Only sockets in the node's own network namespace are translated; those of pods are left to the packet programs
        /// (`--socket-lb host-only`).
        pub const CONFIG_SOCKET_LB_HOST_ONLY: u32 = 1 << 3;
        /// No socket is translated (`--socket-lb off`).
        pub const CONFIG_SOCKET_LB_OFF: u32 = 1 << 4;
        /// A socket call fails at once if kube-proxy would drop the packet silently (`--socket-drop fail`).
        pub const CONFIG_SOCKET_DROP_FAIL: u32 = 1 << 5;
        /// The SNAT port ranges have changed, and some flows still use ports of the old ranges. The programs look up replies to
        /// all ports of the node's own addresses, until the agent finds no such flow.
        pub const CONFIG_SNAT_MOVED: u32 = 1 << 6;
        /// Nothing on this node ends the connected UDP sockets of pods when their endpoint is removed: their packets are
        /// translated instead of their calls of connect(2).
        pub const CONFIG_POD_UDP_BY_PACKETS: u32 = 1 << 7;
        /// Other nodes of the cluster send encapsulated packets to this node (DSR), so the programs examine IP-in-IP packets.
        /// The agent clears this bit when no Service has DSR and no flow is left that began with it.
        pub const CONFIG_DSR: u32 = 1 << 8;
        /// The kernel has `IPsec` policies ([`NodeEntry::ipsec`](crate::node::NodeEntry::ipsec)), or routes by mark
        /// ([`NodeEntry::routes_by_mark`](crate::node::NodeEntry::routes_by_mark)).
        pub const CONFIG_IPSEC: u32 = 1 << 9;
        /// Some local devices are ports of a bridge that is an uplink or has a NIC ([`DEVICE_LAN_PORT`](crate::node::DEVICE_LAN_PORT)).
        pub const CONFIG_LAN_PORTS: u32 = 1 << 10;
        /// The kernel has rules for routes besides its own three (`ip rule`): packets of two sources may take different routes
        /// to one destination.
        pub const CONFIG_POLICY_ROUTES: u32 = 1 << 11;
        /// Netfilter masquerades the packets of clients outside to endpoints of this node, unless the policy is Local
        /// (`--masquerade-external`). The programs mark these packets with [`NodeConfig::masquerade_mark`].
        pub const CONFIG_MASQUERADE_EXTERNAL: u32 = 1 << 12;
        /// Some devices have a source address for SNAT of their own: [`NodeEntry::sources`](crate::node::NodeEntry::sources).
        pub const CONFIG_SOURCES: u32 = 1 << 13;
        /// A process of the node cannot bind a port that is a node port of a Service (`--node-port-bind refuse`).
        pub const CONFIG_NODE_PORT_BIND_REFUSE: u32 = 1 << 14;
        /// The programs answer ICMP echo requests to addresses of Services (`--vip-echo`).
        pub const CONFIG_VIP_ECHO: u32 = 1 << 15;
    }
}

/// Default of [`NodeConfig::masquerade_mark`]: kube-proxy's default bit.
pub const MASQUERADE_MARK: u32 = 1 << 14;

/// Default source ports for SNAT, unless a flag or the node's sysctl requires other ports. They exclude the local ports
/// that kernels give to sockets (`net.ipv4.ip_local_port_range`, 32768 to 60999), and the node ports (30000 to 32767).
pub const SNAT_PORTS: [PortRange; SNAT_RANGES] =
    [PortRange::new(1_024, 29_999), PortRange::new(61_000, 65_535)];

/// Default timeouts in seconds: those of `nf_conntrack` and kube-proxy (`net/netfilter/nf_conntrack_proto_tcp.c`,
/// `nf_conntrack_proto_udp.c`; kube-proxy: 24 h, 1 h).
pub mod seconds {
    /// See [`super::NodeConfig::tcp_syn_sent`].
    pub const TCP_SYN_SENT: u32 = 60;
    /// See [`super::NodeConfig::tcp_syn_recv`].
    pub const TCP_SYN_RECV: u32 = 60;
    /// See [`super::NodeConfig::tcp_established`].
    pub const TCP_ESTABLISHED: u32 = 86_400;
    /// See [`super::NodeConfig::tcp_close_wait`].
    pub const TCP_CLOSE_WAIT: u32 = 3_600;
    /// See [`super::NodeConfig::tcp_time_wait`].
    pub const TCP_TIME_WAIT: u32 = 120;
    /// See [`super::NodeConfig::tcp_close`]. Longer than the 10 s of `nf_conntrack`, which accepts only a RST with the
    /// exact sequence number: here, a connection survives a forged RST unless it is silent for this time. Until then, its
    /// entry may be evicted.
    pub const TCP_CLOSE: u32 = 120;
    /// See [`super::NodeConfig::udp`].
    pub const UDP: u32 = 30;
    /// See [`super::NodeConfig::udp_stream`].
    pub const UDP_STREAM: u32 = 120;
}

impl NodeConfig {
    /// Whether a device is an uplink. `device` reads the device's bits in `devices`; it is called only if all places of
    /// [`NodeConfig::uplinks`] are used.
    #[inline(always)]
    pub fn is_uplink(&self, index: u32, device: impl FnOnce(u32) -> Device) -> bool {
        let [first, second, third] = self.uplinks;
        index == first
            || index == second
            || index == third
            || third != 0 && device(index) & DEVICE_UPLINK != 0
    }

    /// Returns the MAC address at which this node receives the frames of a device; 0: it is not known, or no other machine
    /// sends frames to the device. `device` reads the device's entry of `devices`; it is called only if these fields do not
    /// answer.
    #[inline(always)]
    pub fn mac(&self, index: u32, device: impl FnOnce(u32) -> Device) -> u64 {
        let [first, second, third] = self.uplinks;
        if index == first {
            self.macs[0]
        } else if index == second {
            self.macs[1]
        } else if index == third {
            self.macs[2]
        } else if third != 0 || self.flags & CONFIG_LAN_PORTS != 0 {
            device(index) & DEVICE_MAC
        } else {
            0
        }
    }

    /// Whether the port is a SNAT port: replies to packets that were forwarded with SNAT arrive at such ports.
    #[inline(always)]
    pub const fn is_snat_port(&self, port: u16) -> bool {
        let [low, high] = self.snat;
        low.contains(port) || high.contains(port)
    }

    /// Returns the number of source ports for SNAT.
    #[inline(always)]
    pub const fn snat_count(&self) -> u32 {
        let [low, high] = self.snat;
        low.count as u32 + high.count as u32
    }

    /// Returns the source port for SNAT with this number, from 0 to [`NodeConfig::snat_count`] - 1.
    #[inline(always)]
    pub const fn snat_port(&self, number: u32) -> u16 {
        let [low, high] = self.snat;
        let above = number.wrapping_sub(low.count as u32);
        // There is no branch here: it would double the paths that the verifier walks.
        let is_low = (number < low.count as u32) as u32;
        (is_low * (low.first as u32 + number) + (1 - is_low) * (high.first as u32).wrapping_add(above)) as u16
    }

    /// Returns the defaults for a kernel with `hz` jiffies per second. `flow_entries` is limited to [`MAX_FLOWS`].
    ///
    /// [`MAX_FLOWS`]: crate::flow::MAX_FLOWS
    pub fn new(hz: u32, flow_entries: u32, flow_buckets: u32, flow_seed: u32) -> Self {
        let entries =
            if flow_entries > crate::flow::MAX_FLOWS { crate::flow::MAX_FLOWS } else { flow_entries };
        Self {
            abi: crate::version::ABI_VERSION,
            hz,
            tcp_syn_sent: hz * seconds::TCP_SYN_SENT,
            tcp_syn_recv: hz * seconds::TCP_SYN_RECV,
            tcp_established: hz * seconds::TCP_ESTABLISHED,
            tcp_close_wait: hz * seconds::TCP_CLOSE_WAIT,
            tcp_time_wait: hz * seconds::TCP_TIME_WAIT,
            tcp_close: hz * seconds::TCP_CLOSE,
            udp: hz * seconds::UDP,
            udp_stream: hz * seconds::UDP_STREAM,
            flow_seed,
            flags: 0,
            flows: [FlowSize::new(entries, flow_buckets); 2],
            snat: SNAT_PORTS,
            uplinks: [0; UPLINKS],
            limits: Limits::default(),
            masquerade_mark: 0,
            attended_until: 0,
            host_netns: 0,
            macs: [0; UPLINKS],
            pod_cgroups: [0; POD_CGROUPS],
            mesh_ports: [0; MESH_PORTS],
            pods4: Cidr::NONE,
            pods6: Cidr::NONE,
            dsr_sources4: Cidr::NONE,
            dsr_sources6: Cidr::NONE,
            dsr_flow_rate: 0,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uplinks_that_do_not_fit_the_entry_are_looked_up() {
        let none = |_| panic!("asked without need");
        let mut config = NodeConfig { uplinks: [2, 5, 0], ..NodeConfig::default() };
        assert!(config.is_uplink(2, none) && config.is_uplink(5, none) && !config.is_uplink(7, none));
        config.uplinks = [2, 5, 6];
        assert!(config.is_uplink(6, none));
        assert!(config.is_uplink(7, |_| DEVICE_UPLINK) && !config.is_uplink(7, |_| 0));
    }

    #[test]
    fn a_devices_mac_is_looked_up_only_where_needed() {
        let none = |_| panic!("asked without need");
        let mut config = NodeConfig { uplinks: [2, 5, 0], macs: [20, 50, 0], ..NodeConfig::default() };
        assert_eq!([2, 5, 7].map(|index| config.mac(index, none)), [20, 50, 0]);
        config.flags = CONFIG_LAN_PORTS;
        assert_eq!(config.mac(7, |_| crate::node::DEVICE_LAN_PORT | 0x46), 0x46);
        (config.uplinks, config.macs, config.flags) = ([2, 5, 6], [20, 50, 60], 0);
        assert_eq!((config.mac(6, none), config.mac(7, |_| DEVICE_UPLINK | 0x46)), (60, 0x46));
    }
}
