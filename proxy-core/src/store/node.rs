//! The rows that describe the node to the programs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::Address;
use proxy_common::config::{
    CONFIG_DETECT_LOCAL, CONFIG_DSR, CONFIG_IPSEC, CONFIG_LAN_PORTS, CONFIG_MASQUERADE_ALL,
    CONFIG_MASQUERADE_EXTERNAL, CONFIG_NODE_PORT_BIND_REFUSE, CONFIG_OTHER_PROXY, CONFIG_POD_UDP_BY_PACKETS,
    CONFIG_POLICY_ROUTES, CONFIG_SNAT_MOVED, CONFIG_SOCKET_DROP_FAIL, CONFIG_SOCKET_LB_HOST_ONLY,
    CONFIG_SOCKET_LB_OFF, CONFIG_SOURCES, CONFIG_VIP_ECHO, NodeConfig, POD_CGROUPS, PortRange, SNAT_PORTS,
    SNAT_RANGES, UPLINKS,
};
use proxy_common::node::{
    Cidr, DEVICE_SOURCES, Device, DeviceSource, IPSEC_POLICIES, IpsecPolicy, NodeAddr, NodeEntry,
    SERVICE_CIDRS, TUNNEL_V4, TUNNEL_V6, Tunnel,
};

use super::Table;
use crate::model::settings::{FlowTimeouts, NodePortBind, SocketDrop, SocketLb};

/// Value of `node` or `node6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeRow {
    /// Value of `node`.
    V4(NodeFamily<Ipv4Addr, Ipv4Net>),
    /// Value of `node6`.
    V6(NodeFamily<Ipv6Addr, Ipv6Net>),
}

/// The node in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFamily<A, N> {
    /// The source address of packets that are forwarded with SNAT.
    pub source: Option<A>,
    /// The range of pod addresses, if local clients are recognised by it.
    pub pods: Option<N>,
    /// Ranges of Service addresses, at most [`SERVICE_CIDRS`].
    pub service_cidrs: Vec<N>,
    /// The devices whose packets have another source address, at most [`DEVICE_SOURCES`].
    pub sources: Vec<(u32, A)>,
    /// Source and destination addresses of IPsec policies, at most [`IPSEC_POLICIES`].
    pub ipsec: Vec<(N, N)>,
}

impl<A, N> Default for NodeFamily<A, N> {
    fn default() -> Self {
        Self { source: None, pods: None, service_cidrs: Vec::new(), sources: Vec::new(), ipsec: Vec::new() }
    }
}

impl NodeRow {
    /// Returns the table of the row.
    pub const fn table(&self) -> Table {
        match self {
            Self::V4(_) => Table::Node,
            Self::V6(_) => Table::Node6,
        }
    }
}

/// An address or a range of one family, and its form in the maps.
trait InMaps<T> {
    fn to_map(&self) -> T;
    fn from_map(value: &T) -> Option<Self>
    where
        Self: Sized;
}

macro_rules! in_maps {
    ($address:ty, $net:ty, $octets:ty) => {
        impl InMaps<$octets> for $address {
            fn to_map(&self) -> $octets {
                self.octets()
            }

            fn from_map(value: &$octets) -> Option<Self> {
                (*value != <$octets>::ZERO).then(|| (*value).into())
            }
        }

        impl InMaps<Cidr<$octets>> for $net {
            fn to_map(&self) -> Cidr<$octets> {
                Cidr { addr: self.network().octets(), mask: self.netmask().octets() }
            }

            fn from_map(value: &Cidr<$octets>) -> Option<Self> {
                let net = <$net>::with_netmask(value.addr.into(), value.mask.into()).ok()?;
                (*value != Cidr::NONE && net.to_map() == *value).then_some(net)
            }
        }
    };
}

in_maps!(Ipv4Addr, Ipv4Net, [u8; 4]);
in_maps!(Ipv6Addr, Ipv6Net, [u8; 16]);

#[expect(private_bounds, reason = "how maps hold an address is this module's matter")]
impl<A, N> NodeFamily<A, N> {
    /// Returns the entry of the map.
    pub fn entry<O: Address>(&self) -> NodeEntry<O>
    where
        A: InMaps<O>,
        N: InMaps<Cidr<O>>,
    {
        let mut entry = NodeEntry::UNKNOWN;
        if let Some(source) = &self.source {
            entry.source = source.to_map();
        }
        if let Some(pods) = &self.pods {
            entry.pods = pods.to_map();
        }
        for (slot, cidr) in entry.service_cidrs.iter_mut().zip(&self.service_cidrs) {
            *slot = cidr.to_map();
        }
        entry.service_cidr_count = self.service_cidrs.len().min(SERVICE_CIDRS) as u32;
        for (slot, (src, dst)) in entry.ipsec.iter_mut().zip(&self.ipsec) {
            *slot = IpsecPolicy { src: src.to_map(), dst: dst.to_map() };
        }
        entry.ipsec_count = self.ipsec.len().min(IPSEC_POLICIES) as u32;
        for (slot, (ifindex, addr)) in entry.sources.iter_mut().zip(&self.sources) {
            *slot = DeviceSource { ifindex: *ifindex, addr: addr.to_map() };
        }
        entry.source_count = self.sources.len().min(DEVICE_SOURCES) as u32;
        entry
    }

    /// Reads an entry. Values that this agent would not write are left out, so that a sync writes them again.
    pub fn from_entry<O: Address>(entry: &NodeEntry<O>) -> Self
    where
        A: InMaps<O>,
        N: InMaps<Cidr<O>>,
    {
        let count = (entry.service_cidr_count as usize).min(SERVICE_CIDRS);
        Self {
            source: A::from_map(&entry.source),
            pods: N::from_map(&entry.pods),
            service_cidrs: entry.service_cidrs.iter().take(count).filter_map(N::from_map).collect(),
            sources: entry
                .sources
                .iter()
                .take((entry.source_count as usize).min(DEVICE_SOURCES))
                .filter_map(|source| Some((source.ifindex, A::from_map(&source.addr)?)))
                .collect(),
            ipsec: entry
                .ipsec
                .iter()
                .take((entry.ipsec_count as usize).min(IPSEC_POLICIES))
                .filter_map(|policy| Some((N::from_map(&policy.src)?, N::from_map(&policy.dst)?)))
                .collect(),
        }
    }
}

/// Value of `tunnels`: another node, to which packets are encapsulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelRow {
    /// The address of the other node.
    pub addr: IpAddr,
    /// The source address of the outer header: an address of this node, of the same family.
    pub source: IpAddr,
}

impl TunnelRow {
    /// The entry of the map.
    pub fn entry(self) -> Tunnel {
        let words = |address: IpAddr| match address {
            IpAddr::V4(address) => address.octets().words(),
            IpAddr::V6(address) => address.octets().words(),
        };
        let family = if self.addr.is_ipv6() { TUNNEL_V6 } else { TUNNEL_V4 };
        Tunnel { addr: words(self.addr), source: words(self.source), family }
    }

    /// Reads an entry; `None` if the number is free.
    pub fn of(entry: &Tunnel) -> Option<Self> {
        let address = |words: [u32; 4]| -> Option<IpAddr> {
            match entry.family {
                TUNNEL_V4 => Some(<[u8; 4]>::from_words(words).into()),
                TUNNEL_V6 => Some(<[u8; 16]>::from_words(words).into()),
                _ => None,
            }
        };
        Some(Self { addr: address(entry.addr)?, source: address(entry.source)? })
    }
}

/// The settings in `config` that a sync writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a bit of the entry, in every combination")]
pub struct ConfigRow {
    /// [`CONFIG_MASQUERADE_ALL`].
    pub masquerade_all: bool,
    /// [`CONFIG_DETECT_LOCAL`].
    pub detect_local: bool,
    /// [`CONFIG_OTHER_PROXY`].
    pub other_proxy: bool,
    /// [`CONFIG_SOCKET_LB_HOST_ONLY`] and [`CONFIG_SOCKET_LB_OFF`].
    pub socket_lb: SocketLb,
    /// [`CONFIG_SOCKET_DROP_FAIL`].
    pub socket_drop: SocketDrop,
    /// [`CONFIG_NODE_PORT_BIND_REFUSE`].
    pub node_port_bind: NodePortBind,
    /// Timeouts of flows.
    pub timeouts: FlowTimeouts,
    /// [`CONFIG_SNAT_MOVED`].
    pub snat_moved: bool,
    /// Source ports for SNAT.
    pub snat_ports: [PortRange; SNAT_RANGES],
    /// Cookie of the network namespace that the agent serves.
    pub host_netns: u64,
    /// See [`NodeConfig::pod_cgroups`].
    pub pod_cgroups: [u64; POD_CGROUPS],
    /// See [`NodeConfig::pods4`].
    pub pods4: Option<Ipv4Net>,
    /// See [`NodeConfig::pods6`].
    pub pods6: Option<Ipv6Net>,
    /// See [`NodeConfig::uplinks`].
    pub uplinks: [u32; UPLINKS],
    /// See [`NodeConfig::macs`].
    pub macs: [u64; UPLINKS],
    /// [`CONFIG_LAN_PORTS`].
    pub lan_ports: bool,
    /// [`CONFIG_DSR`].
    pub dsr: bool,
    /// [`CONFIG_IPSEC`].
    pub ipsec: bool,
    /// [`CONFIG_SOURCES`].
    pub sources: bool,
    /// [`CONFIG_POLICY_ROUTES`].
    pub policy_routes: bool,
    /// [`NodeConfig::masquerade_mark`]; 0: without [`CONFIG_MASQUERADE_EXTERNAL`].
    pub masquerade_mark: u32,
    /// [`CONFIG_VIP_ECHO`].
    pub vip_echo: bool,
    /// [`CONFIG_POD_UDP_BY_PACKETS`].
    pub pod_udp_by_packets: bool,
}

impl Default for ConfigRow {
    fn default() -> Self {
        Self {
            masquerade_all: false,
            detect_local: false,
            other_proxy: false,
            socket_lb: SocketLb::default(),
            socket_drop: SocketDrop::default(),
            node_port_bind: NodePortBind::default(),
            timeouts: FlowTimeouts::default(),
            snat_moved: false,
            snat_ports: SNAT_PORTS,
            host_netns: 0,
            pod_cgroups: [0; POD_CGROUPS],
            pods4: None,
            pods6: None,
            uplinks: [0; UPLINKS],
            macs: [0; UPLINKS],
            lan_ports: false,
            dsr: false,
            ipsec: false,
            sources: false,
            policy_routes: false,
            masquerade_mark: 0,
            vip_echo: false,
            pod_udp_by_packets: false,
        }
    }
}

impl ConfigRow {
    const FLAGS: u32 = CONFIG_MASQUERADE_ALL
        | CONFIG_DETECT_LOCAL
        | CONFIG_OTHER_PROXY
        | CONFIG_SOCKET_LB_HOST_ONLY
        | CONFIG_SOCKET_LB_OFF
        | CONFIG_SOCKET_DROP_FAIL
        | CONFIG_NODE_PORT_BIND_REFUSE
        | CONFIG_DSR
        | CONFIG_IPSEC
        | CONFIG_LAN_PORTS
        | CONFIG_SOURCES
        | CONFIG_POLICY_ROUTES
        | CONFIG_MASQUERADE_EXTERNAL
        | CONFIG_VIP_ECHO
        | CONFIG_POD_UDP_BY_PACKETS
        | CONFIG_SNAT_MOVED;

    /// Reads these settings from an entry.
    pub fn of(entry: &NodeConfig) -> Self {
        Self {
            masquerade_all: entry.flags & CONFIG_MASQUERADE_ALL != 0,
            detect_local: entry.flags & CONFIG_DETECT_LOCAL != 0,
            other_proxy: entry.flags & CONFIG_OTHER_PROXY != 0,
            socket_lb: if entry.flags & CONFIG_SOCKET_LB_OFF != 0 {
                SocketLb::Off
            } else if entry.flags & CONFIG_SOCKET_LB_HOST_ONLY != 0 {
                SocketLb::HostOnly
            } else {
                SocketLb::All
            },
            socket_drop: if entry.flags & CONFIG_SOCKET_DROP_FAIL != 0 {
                SocketDrop::Fail
            } else {
                SocketDrop::Silent
            },
            node_port_bind: if entry.flags & CONFIG_NODE_PORT_BIND_REFUSE != 0 {
                NodePortBind::Refuse
            } else {
                NodePortBind::Allow
            },
            timeouts: FlowTimeouts::of(entry),
            snat_moved: entry.flags & CONFIG_SNAT_MOVED != 0,
            snat_ports: entry.snat,
            host_netns: entry.host_netns,
            pod_cgroups: entry.pod_cgroups,
            pods4: range4(entry.pods4),
            pods6: range6(&entry.pods6),
            uplinks: entry.uplinks,
            macs: entry.macs,
            lan_ports: entry.flags & CONFIG_LAN_PORTS != 0,
            dsr: entry.flags & CONFIG_DSR != 0,
            ipsec: entry.flags & CONFIG_IPSEC != 0,
            sources: entry.flags & CONFIG_SOURCES != 0,
            policy_routes: entry.flags & CONFIG_POLICY_ROUTES != 0,
            masquerade_mark: entry.masquerade_mark,
            vip_echo: entry.flags & CONFIG_VIP_ECHO != 0,
            pod_udp_by_packets: entry.flags & CONFIG_POD_UDP_BY_PACKETS != 0,
        }
    }

    /// Writes these settings to an entry; its other settings stay.
    pub fn apply(self, entry: &mut NodeConfig) {
        let bits = [
            (self.masquerade_all, CONFIG_MASQUERADE_ALL),
            (self.detect_local, CONFIG_DETECT_LOCAL),
            (self.dsr, CONFIG_DSR),
            (self.ipsec, CONFIG_IPSEC),
            (self.other_proxy, CONFIG_OTHER_PROXY),
            (self.lan_ports, CONFIG_LAN_PORTS),
            (self.sources, CONFIG_SOURCES),
            (self.policy_routes, CONFIG_POLICY_ROUTES),
            (self.masquerade_mark != 0, CONFIG_MASQUERADE_EXTERNAL),
            (self.vip_echo, CONFIG_VIP_ECHO),
            (self.pod_udp_by_packets, CONFIG_POD_UDP_BY_PACKETS),
            (self.snat_moved, CONFIG_SNAT_MOVED),
            (self.socket_lb == SocketLb::HostOnly, CONFIG_SOCKET_LB_HOST_ONLY),
            (self.socket_lb == SocketLb::Off, CONFIG_SOCKET_LB_OFF),
            (self.socket_drop == SocketDrop::Fail, CONFIG_SOCKET_DROP_FAIL),
            (self.node_port_bind == NodePortBind::Refuse, CONFIG_NODE_PORT_BIND_REFUSE),
        ];
        let bits = bits.iter().filter(|(is, _)| *is).fold(0, |bits, (_, bit)| bits | bit);
        entry.flags = entry.flags & !Self::FLAGS | bits;
        self.timeouts.apply(entry);
        entry.snat = self.snat_ports;
        entry.masquerade_mark = self.masquerade_mark;
        entry.host_netns = self.host_netns;
        entry.pod_cgroups = self.pod_cgroups;
        entry.pods4 = self.pods4.map_or(Cidr::NONE, |range| Cidr {
            addr: words(range.network().octets()),
            mask: words(range.netmask().octets()),
        });
        entry.pods6 = self.pods6.map_or(Cidr::NONE, |range| Cidr {
            addr: words(range.network().octets()),
            mask: words(range.netmask().octets()),
        });
        entry.uplinks = self.uplinks;
        entry.macs = self.macs;
    }
}

/// Returns an address in words, as programs keep it.
fn words<const OCTETS: usize, W: Address>(octets: [u8; OCTETS]) -> W
where
    [u8; OCTETS]: Address,
{
    W::from_words(octets.words())
}

fn range4(range: Cidr<[u32; 1]>) -> Option<Ipv4Net> {
    let [addr, mask] = [range.addr, range.mask].map(|words| <[u8; 4]>::from_words(words.words()));
    range.is_some().then(|| Ipv4Net::with_netmask(addr.into(), mask.into()).ok())?
}

fn range6(range: &Cidr<[u32; 4]>) -> Option<Ipv6Net> {
    let [addr, mask] = [range.addr, range.mask].map(|words| <[u8; 16]>::from_words(words.words()));
    range.is_some().then(|| Ipv6Net::with_netmask(addr.into(), mask.into()).ok())?
}

/// The contents of the tables about the node; if they are those of one table, the other parts are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeContents {
    /// `node` and `node6`.
    pub rows: BTreeMap<Table, NodeRow>,
    /// Both tables of addresses.
    pub addresses: BTreeMap<IpAddr, NodeAddr>,
    /// Other nodes, by number.
    pub tunnels: BTreeMap<u32, TunnelRow>,
    /// Devices, by index.
    pub devices: BTreeMap<u32, Device>,
    /// The settings in `config` that a sync writes.
    pub config: ConfigRow,
}

impl NodeContents {
    /// The tables about the node.
    pub const TABLES: [Table; 7] = [
        Table::Node,
        Table::Node6,
        Table::NodeAddrs,
        Table::NodeAddrs6,
        Table::Tunnels,
        Table::Devices,
        Table::Config,
    ];

    /// Returns the contents of one table.
    #[must_use]
    pub fn of(&self, table: Table) -> Self {
        let Self { rows, addresses, tunnels, devices, config } = self;
        let in_table = |(address, _): &(&IpAddr, _)| Table::node_addrs(**address) == table;
        Self {
            rows: rows
                .iter()
                .filter(|(key, _)| **key == table)
                .map(|(key, row)| (*key, row.clone()))
                .collect(),
            addresses: addresses.iter().filter(in_table).map(|(address, bits)| (*address, *bits)).collect(),
            tunnels: if table == Table::Tunnels { tunnels.clone() } else { BTreeMap::new() },
            devices: if table == Table::Devices { devices.clone() } else { BTreeMap::new() },
            config: if table == Table::Config { *config } else { ConfigRow::default() },
        }
    }

    /// Returns the contents of new tables.
    pub fn unknown() -> Self {
        let rows = [NodeRow::V4(NodeFamily::default()), NodeRow::V6(NodeFamily::default())];
        Self { rows: rows.into_iter().map(|row| (row.table(), row)).collect(), ..Self::default() }
    }
}

/// Returns the address of a source range and its prefix length, as `src_ranges` holds them.
pub fn range_parts(range: IpNet) -> (IpAddr, u32) {
    match range {
        IpNet::V4(range) => (IpAddr::V4(range.network()), range.prefix_len() as u32),
        IpNet::V6(range) => (IpAddr::V6(range.network()), range.prefix_len() as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_row_is_read_as_it_was_written(
            source: Option<u32>,
            pods in prop::option::of((any::<u32>(), 0u8..=32)),
            cidrs in prop::collection::vec((any::<u32>(), 1u8..=32), 0..SERVICE_CIDRS),
            sources in prop::collection::vec((any::<u32>(), 1u32..), 0..DEVICE_SOURCES),
            ipsec in prop::collection::vec(((any::<u32>(), 0u8..=31), (any::<u32>(), 0u8..=31)), 0..IPSEC_POLICIES),
        ) {
            let net = |(address, len): (u32, u8)| Ipv4Net::new(address.into(), len).unwrap().trunc();
            let row = NodeFamily {
                source: source.filter(|bits| *bits != 0).map(Ipv4Addr::from),
                pods: pods.map(net).filter(|net| net.network().to_bits() != 0 || net.prefix_len() != 32),
                service_cidrs: cidrs.into_iter().map(net).filter(|n| !n.network().is_unspecified()).collect(),
                sources: sources.into_iter().map(|(ifindex, bits)| (ifindex, bits.into())).collect(),
                ipsec: ipsec.into_iter().map(|(src, dst)| (net(src), net(dst))).collect(),
            };
            let entry: NodeEntry<[u8; 4]> = row.entry();
            prop_assert_eq!(NodeFamily::from_entry(&entry), row);
        }

        #[test]
        fn only_our_part_of_the_settings_changes(flags: u32, switches: [bool; 4], udp in 1u32..=2_147_483, host_netns: u64, uplinks: [u32; UPLINKS]) {
            // `off` wins over `host-only`: both together are never written.
            let flags = flags & !CONFIG_SOCKET_LB_HOST_ONLY;
            // The flag and the mark are written together.
            let masquerade_mark = flags & CONFIG_MASQUERADE_EXTERNAL;
            let before = NodeConfig { flags, masquerade_mark, ..NodeConfig::new(250, 10, 16, 3) };
            let [masquerade_all, detect_local, other_proxy, snat_moved] = switches;
            let (socket_lb, socket_drop) = (SocketLb::HostOnly, SocketDrop::Fail);
            let timeouts = FlowTimeouts { udp, tcp_established: FlowTimeouts::LONGEST, ..FlowTimeouts::default() };
            let row = ConfigRow {
                masquerade_all,
                detect_local,
                other_proxy,
                socket_lb,
                socket_drop,
                node_port_bind: NodePortBind::Refuse,
                timeouts,
                snat_moved,
                snat_ports: [PortRange::new(1, 2); SNAT_RANGES],
                host_netns,
                pod_cgroups: [host_netns, 7],
                pods4: other_proxy.then(|| "10.244.1.0/24".parse().unwrap()),
                pods6: snat_moved.then(|| "fd00:1::/64".parse().unwrap()),
                uplinks,
                macs: uplinks.map(u64::from),
                lan_ports: detect_local,
                dsr: other_proxy,
                ipsec: masquerade_all,
                sources: detect_local,
                policy_routes: snat_moved,
                masquerade_mark: u32::from(other_proxy) << 20,
                vip_echo: other_proxy,
                pod_udp_by_packets: snat_moved,
            };
            let mut after = before;
            row.apply(&mut after);
            prop_assert_eq!(ConfigRow::of(&after), row);
            let others = flags & !ConfigRow::FLAGS;
            prop_assert_eq!(after.flags & !ConfigRow::FLAGS, others);
            ConfigRow::of(&before).apply(&mut after);
            prop_assert_eq!(after, before);
        }
    }
}
