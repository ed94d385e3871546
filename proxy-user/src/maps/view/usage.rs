//! Usage and sizes of the maps.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;

use aya::maps::{MapData, MapError, MapType};
use proxy_common::abi::Plain;
use proxy_common::config::Limits;
use proxy_common::flow::buckets_for;
use proxy_common::maglev;
use proxy_common::map_names as map;
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::stats::RefusalKey;
use serde::{Serialize, Serializer};

use super::{FlowCounts, Snapshot, View, ViewError};
use crate::maps::family::MapFamily;
use crate::maps::segments::Segments;

/// One map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    /// Its name.
    pub name: &'static str,
    /// Its id in this kernel, as `bpftool` shows it.
    pub id: u32,
    /// Where it is pinned.
    pub pin: PathBuf,
    /// Its type, as `bpftool` writes it.
    #[serde(rename = "type")]
    pub kind: String,
    /// Number of entries in use; `None` if it is not counted.
    pub used: Option<u32>,
    /// Maximum number of entries, to which the map may still have to grow; 0 (`null`): as many as there are sockets.
    #[serde(serialize_with = "unless_zero")]
    pub capacity: u32,
    /// Bytes of kernel memory that the map has now, if the kernel reports them.
    pub memory: Option<u64>,
    /// The flag that sets the size of the map; empty if there is none.
    pub setting: &'static str,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over the field")]
fn unless_zero<S: Serializer>(number: &u32, serializer: S) -> Result<S::Ok, S::Error> {
    (*number != 0).then_some(number).serialize(serializer)
}

impl View {
    /// Returns all maps, in the order of [`map::ALL`].
    pub fn usage(&self) -> Result<Vec<UsageRow>, ViewError> {
        Ok(self.overview()?.maps)
    }

    /// Returns all maps, from what was read already.
    pub(super) fn usage_of(
        &self,
        snapshot: &Snapshot,
        flows: &FlowCounts,
    ) -> Result<Vec<UsageRow>, ViewError> {
        let limits = self.node_config()?.limits;
        map::ALL.iter().map(|name| self.one_usage(name, snapshot, flows, &limits)).collect()
    }

    fn one_usage(
        &self,
        name: &'static str,
        snapshot: &Snapshot,
        flows: &FlowCounts,
        limits: &Limits,
    ) -> Result<UsageRow, ViewError> {
        let pin = self.maps.join(name);
        let error = |source| ViewError::map(&pin, source);
        let data = MapData::from_pin(&pin).map_err(error)?;
        let info = data.info().map_err(error)?;
        let (mut shape, mut capacity, mut bytes) =
            (kind(&info.map_type()), info.max_entries(), memory(data.fd()));
        if map::SEGMENTED.contains(&name) {
            let array = Segments::open(&self.maps, name);
            let array = array.map_err(|source| ViewError::Read { path: pin.clone(), source })?;
            let is_per_cpu = array.shape().kind == MapType::PerCpuArray as u32;
            shape = kind(&Ok(if is_per_cpu { MapType::PerCpuArray } else { MapType::Array }));
            capacity = limit(name, limits).filter(|limit| *limit != 0).unwrap_or(array.len() as u32);
            let segments = array.all();
            bytes = segments.iter().fold(bytes, |sum, segment| Some(sum? + memory(&**segment)?));
        }
        Ok(UsageRow {
            name,
            id: info.id(),
            kind: shape,
            capacity,
            used: self.used(name, snapshot, flows)?,
            memory: bytes,
            setting: map::flag(name),
            pin,
        })
    }

    /// Returns the number of entries in use of that map.
    fn used(
        &self,
        name: &'static str,
        snapshot: &Snapshot,
        flows: &FlowCounts,
    ) -> Result<Option<u32>, ViewError> {
        let frontends = |v6: bool| {
            let served = snapshot.frontends.iter().filter(|row| row.address.is_ipv6() == v6).count();
            served + snapshot.addresses[usize::from(v6)]
        };
        let backends = |v6: bool| snapshot.backends.values().filter(|row| row.socket.is_ipv6() == v6).count();
        let used = match name {
            map::SERVICES => frontends(false) as u32,
            map::SERVICES6 => frontends(true) as u32,
            map::NAMES => snapshot.names.len() as u32,
            map::SOCKETS => self.entries::<SocketKey<[u8; 4]>, SocketEntry<[u8; 4]>>(name, MapType::Hash)?,
            map::SOCKETS6 => {
                self.entries::<SocketKey<[u8; 16]>, SocketEntry<[u8; 16]>>(name, MapType::Hash)?
            }
            map::REFUSALS => self.entries::<RefusalKey, u64>(name, MapType::LruHash)?,
            map::BACKENDS => backends(false) as u32,
            map::BACKENDS6 => backends(true) as u32,
            map::FLOWS => flows.v4,
            map::FLOWS6 => flows.v6,
            map::SRC_RANGES => self.range_count::<[u8; 4]>()?,
            map::SRC_RANGES6 => self.range_count::<[u8; 16]>()?,
            map::MAGLEV => {
                let index = self.pin(map::MAGLEV_INDEX, MapType::Array)?.mapped::<u64>()?.all64();
                let words = self.pin(map::MAGLEV, MapType::Array)?.mapped::<u64>()?;
                maglev_words(index, |at| words.read(at as usize))
            }
            // A slot that no frontend refers to keeps its last content, so extents are summed instead.
            map::SLOTS => snapshot.frontends.iter().map(|row| row.slots).sum(),
            _ => return Ok(None),
        };
        Ok(Some(used))
    }

    /// Returns the number of source ranges of a family's map. A walk begins again when the range is removed at which it is, so
    /// equal ranges count once.
    fn range_count<A: MapFamily>(&self) -> Result<u32, ViewError> {
        Ok(self.ranges::<A>()?.into_iter().collect::<BTreeSet<_>>().len() as u32)
    }

    fn entries<K: Plain, V: Plain>(&self, name: &'static str, kind: MapType) -> Result<u32, ViewError> {
        self.pin(name, kind)?.count::<K, V>()
    }
}

/// Returns the number of words of the Maglev tables to which the elements of `maglev_index` refer; Service ports with the same
/// endpoints share a table. `word` returns a word of `maglev`.
fn maglev_words(index: impl IntoIterator<Item = u64>, word: impl Fn(u32) -> Option<u64>) -> u32 {
    let both = |word| [0, 1].map(|number| maglev::base_in(word, number));
    let tables: BTreeSet<u32> = index.into_iter().flat_map(both).filter(|base| *base != 0).collect();
    let words = |base| {
        let (size, backends) = maglev::size_and_backends(word(base)?);
        // Another process may have changed the word.
        (backends <= maglev::MAX_BACKENDS && size == maglev::size(backends))
            .then(|| maglev::words(size, backends))
    };
    tables.into_iter().filter_map(words).fold(0, u32::saturating_add)
}

/// Returns the bytes of memory of an open map, as `/proc` reports them.
fn memory(fd: &impl AsFd) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("memlock:"))?.trim().parse().ok()
}

/// Returns the ceiling of a map that grows; `None` if its elements have no ceiling of their own.
fn limit(name: &str, limits: &Limits) -> Option<u32> {
    Some(match name {
        map::SLOTS => limits.slots,
        map::MAGLEV => limits.maglev_words,
        map::MAGLEV_INDEX => limits.services.saturating_mul(2),
        map::SERVICE_STATS | map::TURNS => limits.services,
        name if map::OF_BACKENDS.contains(&name) => limits.backends,
        map::FLOWS | map::FLOWS6 => limits.flows,
        map::FLOW_INDEX | map::FLOW_INDEX6 => buckets_for(limits.flows),
        _ => return None,
    })
}

/// Returns the type as `bpftool` writes it; of a map that grows, the type of its segments.
fn kind(kind: &Result<MapType, MapError>) -> String {
    match kind {
        Ok(MapType::Hash) => "hash".to_owned(),
        Ok(MapType::LruHash) => "lru_hash".to_owned(),
        Ok(MapType::Array) => "array".to_owned(),
        Ok(MapType::LpmTrie) => "lpm_trie".to_owned(),
        Ok(MapType::PerCpuArray) => "percpu_array".to_owned(),
        Ok(MapType::RingBuf) => "ringbuf".to_owned(),
        Ok(MapType::SkStorage) => "sk_storage".to_owned(),
        Ok(other) => format!("{other:?}").to_lowercase(),
        Err(_) => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maglev_tables_in_use_are_counted_once() {
        let size = maglev::size(2);
        let each = maglev::words(size, 2);
        let word = |at: u32| match at {
            1 | 500 => Some(maglev::shape(size, 2)),
            // No table.
            900 => Some(u64::MAX),
            _ => None,
        };
        let index_of = maglev::index_of;
        assert_eq!(maglev_words([0, 0], word), 0);
        assert_eq!(maglev_words([index_of([1, 0]), index_of([1, 0]), 0], word), each);
        assert_eq!(maglev_words([[1, 500], [900, 0], [9_999, 0]].map(index_of), word), 2 * each);
    }
}
