//! All tables that the programs look up for a new connection, read at once: for `ballast explain`.

use std::collections::BTreeMap;

use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{Map, MapData, MapType};
use proxy_common::Address;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::{BACKEND_FREE, BackendEntry};
use proxy_common::config::NodeConfig;
use proxy_common::map_names as map;
use proxy_common::node::{DEVICE_UPLINK, Device, NODE_ADDR_INTERNAL, NODE_ADDR_OWN, NodeAddr, NodeEntry};
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::source_range::{SET_BITS, SourceRangeKey};

use super::flows::now;
use super::{NameRow, View, ViewError};
use crate::maps::family::MapFamily;

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

/// A source range with the length of its prefix.
type Range<A> = (u32, SourceRangeKey<A>);

impl View {
    /// Reads the tables of a family.
    pub fn rules<A: MapFamily>(&self) -> Result<Rules<A>, ViewError> {
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
        let is_others =
            |_: &A, bits: &mut NodeAddr| *bits & (NODE_ADDR_OWN | NODE_ADDR_INTERNAL) == NODE_ADDR_INTERNAL;
        let mut node_addrs: BTreeMap<A, NodeAddr> = self.node_addrs()?.into_iter().collect();
        let others = node_addrs.extract_if(.., is_others).collect();
        let nodes = self.pin(A::NODE, MapType::Array)?.first::<u32, NodeEntry<A>>(1)?;
        Ok(Rules {
            common,
            services: self.pin(A::SERVICES, MapType::Hash)?.all()?.into_iter().collect(),
            backends: self.rows::<A>(|state| state != BACKEND_FREE)?,
            node: nodes.first().map_or(NodeEntry::UNKNOWN, |(_, node)| *node),
            node_addrs,
            others,
            affinity: self.pin(A::AFFINITY, MapType::Hash)?.all()?.into_iter().collect(),
            ranges: self.ranges::<A>()?,
        })
    }

    /// Returns the source ranges of a family's map.
    pub(super) fn ranges<A: MapFamily>(&self) -> Result<Vec<Range<A>>, ViewError> {
        let (path, data) = self.pin(A::SRC_RANGES, MapType::LpmTrie)?.into_parts();
        let failed = |source| ViewError::map(&path, source);
        let trie: LpmTrie<MapData, SourceRangeKey<A>, u32> = Map::LpmTrie(data).try_into().map_err(failed)?;
        let keys = trie.keys().map(|key| {
            let key = key.map_err(failed)?;
            Ok((key.prefix_len().saturating_sub(SET_BITS), key.data()))
        });
        keys.collect()
    }
}
