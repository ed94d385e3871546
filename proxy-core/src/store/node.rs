//! The rows that describe the node to the programs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::Address;
use proxy_common::config::NodeConfig;
use proxy_common::node::{
    Cidr, DEVICE_SOURCES, Device, DeviceSource, IPSEC_POLICIES, IpsecPolicy, NodeAddr, NodeEntry,
    SERVICE_CIDRS, TUNNEL_V4, TUNNEL_V6, Tunnel,
};

use super::Table;
use crate::model::settings::FlowTimeouts;

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
    /// The stack routes packets with SNAT.
    pub routes_by_mark: bool,
}

impl<A, N> Default for NodeFamily<A, N> {
    fn default() -> Self {
        Self {
            source: None,
            pods: None,
            service_cidrs: Vec::new(),
            sources: Vec::new(),
            ipsec: Vec::new(),
            routes_by_mark: false,
        }
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
        entry.routes_by_mark = self.routes_by_mark.into();
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
            routes_by_mark: entry.routes_by_mark != 0,
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

/// The settings in `config` that a sync writes: an entry with one jiffy per second, so that timeouts are in seconds, and without
/// the fields that a sync leaves as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigRow(pub NodeConfig);

impl Default for ConfigRow {
    fn default() -> Self {
        Self(NodeConfig::new(1, 0, 0, 0))
    }
}

impl ConfigRow {
    /// Reads these settings from an entry.
    pub fn of(entry: &NodeConfig) -> Self {
        Self(with_settings(&Self::default().0, entry))
    }

    /// Writes these settings to an entry; its other settings stay.
    pub const fn apply(&self, entry: &mut NodeConfig) {
        *entry = with_settings(entry, &self.0);
    }

    /// Whether a flag is set.
    pub const fn has(&self, flag: u32) -> bool {
        self.0.flags & flag != 0
    }
}

/// Returns `entry` with the settings of another entry that a sync writes.
const fn with_settings(entry: &NodeConfig, settings: &NodeConfig) -> NodeConfig {
    let NodeConfig { abi, hz, flow_seed, flows, limits, attended_until, reserved, .. } = *entry;
    let mut entry = NodeConfig { abi, hz, flow_seed, flows, limits, attended_until, reserved, ..*settings };
    FlowTimeouts::of(settings).apply(&mut entry);
    entry
}

/// Returns a range as programs keep it; [`Cidr::NONE`] if there is none.
#[expect(private_bounds, reason = "how maps hold an address is this module's matter")]
pub fn range_words<N: InMaps<Cidr<O>>, O: Address, W: Address>(range: Option<N>) -> Cidr<W> {
    range.map_or(Cidr::NONE, |range| {
        let Cidr { addr, mask } = range.to_map();
        Cidr { addr: W::from_words(addr.words()), mask: W::from_words(mask.words()) }
    })
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

    /// Whether the address is in a range of Service addresses in which the programs answer for all addresses.
    pub fn is_in_service_range(&self, address: IpAddr) -> bool {
        self.rows.values().any(|row| match (row, address) {
            (NodeRow::V4(row), IpAddr::V4(address)) => {
                row.service_cidrs.iter().any(|range| range.contains(&address))
            }
            (NodeRow::V6(row), IpAddr::V6(address)) => {
                row.service_cidrs.iter().any(|range| range.contains(&address))
            }
            _ => false,
        })
    }

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
    use proxy_common::config::{PortRange, SNAT_RANGES, UPLINKS};

    proptest! {
        #[test]
        fn a_row_is_read_as_it_was_written(
            source: Option<u32>,
            pods in prop::option::of((any::<u32>(), 0u8..=32)),
            cidrs in prop::collection::vec((any::<u32>(), 1u8..=32), 0..SERVICE_CIDRS),
            sources in prop::collection::vec((any::<u32>(), 1u32..), 0..DEVICE_SOURCES),
            routes_by_mark: bool,
            ipsec in prop::collection::vec(((any::<u32>(), 0u8..=31), (any::<u32>(), 0u8..=31)), 0..IPSEC_POLICIES),
        ) {
            let net = |(address, len): (u32, u8)| Ipv4Net::new(address.into(), len).unwrap().trunc();
            let row = NodeFamily {
                source: source.filter(|bits| *bits != 0).map(Ipv4Addr::from),
                pods: pods.map(net).filter(|net| net.network().to_bits() != 0 || net.prefix_len() != 32),
                service_cidrs: cidrs.into_iter().map(net).filter(|n| !n.network().is_unspecified()).collect(),
                sources: sources.into_iter().map(|(ifindex, bits)| (ifindex, bits.into())).collect(),
                ipsec: ipsec.into_iter().map(|(src, dst)| (net(src), net(dst))).collect(),
                routes_by_mark,
            };
            let entry: NodeEntry<[u8; 4]> = row.entry();
            prop_assert_eq!(NodeFamily::from_entry(&entry), row);
        }

        #[test]
        fn only_our_part_of_the_settings_changes(flags: u32, udp in 1u32..=2_147_483, number: u64, uplinks: [u32; UPLINKS]) {
            let before = NodeConfig::new(250, 10, 16, 3);
            let range = |number: u32| Cidr { addr: [number], mask: [!0] };
            let row = ConfigRow(NodeConfig {
                flags,
                udp,
                tcp_established: FlowTimeouts::LONGEST,
                snat: [PortRange::new(1, 2); SNAT_RANGES],
                masquerade_mark: number as u32,
                host_netns: number,
                mesh_ports: [15_001, 0, 7, 0],
                pod_cgroups: [number, 7],
                pods4: range(flags),
                pods6: Cidr { addr: [flags; 4], mask: [!0, !0, 0, 0] },
                dsr_sources4: range(!flags),
                dsr_sources6: Cidr { addr: [!flags; 4], mask: [!0, 0, 0, 0] },
                dsr_flow_rate: flags,
                uplinks,
                macs: uplinks.map(u64::from),
                ..ConfigRow::default().0
            });
            let mut after = before;
            row.apply(&mut after);
            prop_assert_eq!((after.udp, after.hz, after.flow_seed), (udp * 250, 250, 3));
            prop_assert_eq!(ConfigRow::of(&after), row);
            ConfigRow::of(&before).apply(&mut after);
            prop_assert_eq!(after, before);
        }
    }
}
