//! All tables that the programs look up for a new connection, read at once: for `ballast explain`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use aya::Pod;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{HashMap, Map, MapData, MapType};
use proxy_common::abi::Plain;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::{BACKEND_FREE, BackendEntry};
use proxy_common::config::NodeConfig;
use proxy_common::map_names as map;
use proxy_common::node::{DEVICE_UPLINK, Device, NODE_ADDR_INTERNAL, NODE_ADDR_OWN, NodeAddr, NodeEntry};
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::source_range::{SET_BITS, SourceRangeKey};
use proxy_common::{Address, Family, V4, V6};

use super::flows::now;
use super::{NameRow, View, ViewError};

/// The tables that both families share.
#[derive(Clone, Debug, Default)]
pub struct Common {
    /// The settings of the programs on this node.
    pub config: NodeConfig,
    /// The low 32 bits of the kernel's jiffies.
    pub now: u32,
    /// Whether a device of this node is an uplink, on which clients outside arrive.
    pub has_uplink: bool,
    /// Backend ids by slot.
    pub slots: Vec<u32>,
    /// Observed health of backends, by id, if it is more than that the backend answers ([`proxy_common::health`]).
    pub health: BTreeMap<u32, u64>,
    /// Failures of clients, by index ([`proxy_common::health::skip_slot`]).
    pub skips: BTreeMap<u32, u64>,
    /// Words of the prefilter.
    pub prefilter: Vec<u64>,
    /// Names of Service ports.
    pub names: BTreeMap<u32, NameRow>,
    /// Session affinity of network namespaces.
    pub netns_affinity: BTreeMap<NetnsAffinityKey, AffinityEntry>,
}

/// The tables of one family.
#[derive(Clone, Debug)]
pub struct Rules<A: Address> {
    /// The tables that both families share.
    pub common: Common,
    /// Frontends.
    pub services: BTreeMap<ServiceKey<A>, ServiceEntry>,
    /// Endpoints in use or quarantined, by id.
    pub backends: BTreeMap<u32, BackendEntry<A>>,
    /// The row of this node.
    pub node: NodeEntry<A>,
    /// Addresses of the node.
    pub node_addrs: BTreeMap<A, NodeAddr>,
    /// Addresses of the other nodes, if packets are encapsulated to them.
    pub others: BTreeMap<A, NodeAddr>,
    /// Session affinity of clients.
    pub affinity: BTreeMap<AffinityKey<A>, AffinityEntry>,
    /// Allowed source ranges: the length of the prefix without the set's part, and the key.
    pub ranges: Vec<(u32, SourceRangeKey<A>)>,
}

/// Names of a family's maps.
pub trait Names: Family {
    /// Services, backends, node, addresses of the node, affinity, source ranges.
    const MAPS: [&'static str; 6];
}

impl Names for V4 {
    const MAPS: [&'static str; 6] =
        [map::SERVICES, map::BACKENDS, map::NODE, map::NODE_ADDRS, map::AFFINITY, map::SRC_RANGES];
}

impl Names for V6 {
    const MAPS: [&'static str; 6] =
        [map::SERVICES6, map::BACKENDS6, map::NODE6, map::NODE_ADDRS6, map::AFFINITY6, map::SRC_RANGES6];
}

/// A source range with the length of its prefix.
type Range<F> = (u32, SourceRangeKey<<F as Family>::Addr>);

impl View {
    /// Reads the tables of a family.
    pub fn rules<F: Names>(&self) -> Result<Rules<F::Addr>, ViewError>
    where
        F::Addr: Into<IpAddr> + Pod,
        ServiceKey<F::Addr>: Plain,
        BackendEntry<F::Addr>: Plain,
        NodeEntry<F::Addr>: Plain,
        AffinityKey<F::Addr>: Plain,
        SourceRangeKey<F::Addr>: Pod,
    {
        let [services, backends, node, node_addrs, affinity, ranges] = F::MAPS;
        let config = self.node_config()?;
        let netns_affinity = self.pin(map::AFFINITY_NETNS, MapType::Hash)?.all()?;
        let devices = self.pin(map::DEVICES, MapType::Hash)?.all::<u32, Device>()?;
        let slots = self.pin(map::SLOTS, MapType::Array)?.mapped::<u32>()?.all32();
        let prefilter = self.pin(map::PREFILTER, MapType::Array)?.mapped::<u64>()?.all64();
        let common = Common {
            has_uplink: devices.iter().any(|(_, device)| device & DEVICE_UPLINK != 0),
            now: now(config.hz),
            config,
            slots,
            health: self.health()?,
            skips: self.skips()?,
            prefilter,
            names: self.names()?,
            netns_affinity: netns_affinity.into_iter().collect(),
        };
        let entries = self.pin(backends, MapType::Array)?.mapped::<BackendEntry<F::Addr>>()?;
        let used = (0..entries.len()).filter_map(|id| Some((id as u32, entries.read(id)?)));
        let is_others = |_: &F::Addr, bits: &mut NodeAddr| {
            *bits & (NODE_ADDR_OWN | NODE_ADDR_INTERNAL) == NODE_ADDR_INTERNAL
        };
        let mut node_addrs = self.node_addrs::<F>(node_addrs)?;
        let others = node_addrs.extract_if(.., is_others).collect();
        let nodes = self.pin(node, MapType::Array)?.first::<u32, NodeEntry<F::Addr>>(1)?;
        Ok(Rules {
            common,
            services: self.pin(services, MapType::Hash)?.all()?.into_iter().collect(),
            backends: used
                .filter(|(_, entry): &(u32, BackendEntry<F::Addr>)| entry.state != BACKEND_FREE)
                .collect(),
            node: nodes.first().map_or(NodeEntry::UNKNOWN, |(_, node)| *node),
            node_addrs,
            others,
            affinity: self.pin(affinity, MapType::Hash)?.all()?.into_iter().collect(),
            ranges: self.ranges::<F>(ranges)?,
        })
    }

    fn node_addrs<F: Names>(&self, name: &'static str) -> Result<BTreeMap<F::Addr, NodeAddr>, ViewError>
    where
        F::Addr: Pod,
    {
        let (path, data) = self.pin(name, MapType::Hash)?.into_parts();
        let failed = |source| ViewError::map(&path, source);
        let map: HashMap<MapData, F::Addr, NodeAddr> = Map::HashMap(data).try_into().map_err(failed)?;
        map.iter().collect::<Result<_, _>>().map_err(failed)
    }

    /// Returns the source ranges of a family's map.
    pub(super) fn ranges<F: Names>(&self, name: &'static str) -> Result<Vec<Range<F>>, ViewError>
    where
        SourceRangeKey<F::Addr>: Pod,
    {
        let (path, data) = self.pin(name, MapType::LpmTrie)?.into_parts();
        let failed = |source| ViewError::map(&path, source);
        let trie: LpmTrie<MapData, SourceRangeKey<F::Addr>, u32> =
            Map::LpmTrie(data).try_into().map_err(failed)?;
        let keys = trie.keys().map(|key| {
            let key = key.map_err(failed)?;
            Ok((key.prefix_len().saturating_sub(SET_BITS), key.data()))
        });
        keys.collect()
    }
}
