//! Usage and sizes of the maps.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;

use aya::maps::{MapData, MapInfo, MapType};
use proxy_common::abi::Plain;
use proxy_common::map_names as map;
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::stats::RefusalKey;

use super::{FlowCounts, Snapshot, View, ViewError};

/// One map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageRow {
    /// Its name.
    pub name: &'static str,
    /// Its id in this kernel.
    pub id: u32,
    /// Where it is pinned.
    pub pin: PathBuf,
    /// Its type, as `bpftool` writes it.
    pub kind: String,
    /// Maximum number of entries; 0: as many as there are sockets.
    pub capacity: u32,
    /// Number of entries in use; `None` if it is not counted.
    pub used: Option<u32>,
    /// Bytes of kernel memory, if the kernel reports them.
    pub memory: Option<u64>,
    /// The flag that sets the size of the map; empty if there is none.
    pub setting: &'static str,
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
        map::ALL.iter().map(|name| self.one_usage(name, snapshot, flows)).collect()
    }

    fn one_usage(
        &self,
        name: &'static str,
        snapshot: &Snapshot,
        flows: &FlowCounts,
    ) -> Result<UsageRow, ViewError> {
        let pin = self.maps.join(name);
        let error = |source| ViewError::map(&pin, source);
        let data = MapData::from_pin(&pin).map_err(error)?;
        let info = data.info().map_err(error)?;
        Ok(UsageRow {
            name,
            id: info.id(),
            kind: kind(&info),
            capacity: info.max_entries(),
            used: self.used(name, snapshot, flows)?,
            memory: memory(data.fd()),
            setting: setting(name),
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
            let dialled = snapshot.frontends.iter().filter(|row| row.address.is_ipv6() == v6).count();
            dialled + snapshot.addresses[usize::from(v6)]
        };
        let backends = |v6: bool| snapshot.backends.values().filter(|row| row.socket.is_ipv6() == v6).count();
        let used = match name {
            map::SERVICES => frontends(false) as u32,
            map::SERVICES6 => frontends(true) as u32,
            map::NAMES => snapshot.names.len() as u32,
            map::SOCKETS => {
                self.entries::<SocketKey<[u8; 4]>, SocketEntry<[u8; 4]>>(name, MapType::LruHash)?
            }
            map::SOCKETS6 => {
                self.entries::<SocketKey<[u8; 16]>, SocketEntry<[u8; 16]>>(name, MapType::LruHash)?
            }
            map::REFUSALS => self.entries::<RefusalKey, u64>(name, MapType::LruHash)?,
            map::BACKENDS => backends(false) as u32,
            map::BACKENDS6 => backends(true) as u32,
            map::FLOWS => flows.v4,
            map::FLOWS6 => flows.v6,
            // A slot that no frontend refers to keeps its last content, so extents are summed instead.
            map::SLOTS => snapshot.frontends.iter().map(|row| row.slots).sum(),
            _ => return Ok(None),
        };
        Ok(Some(used))
    }

    fn entries<K: Plain, V: Plain>(&self, name: &'static str, kind: MapType) -> Result<u32, ViewError> {
        self.pin(name, kind)?.count::<K, V>()
    }
}

/// Returns the bytes of memory of an open map, as `/proc` reports them.
fn memory(fd: &impl AsFd) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("memlock:"))?.trim().parse().ok()
}

/// Returns the type as `bpftool` writes it.
fn kind(info: &MapInfo) -> String {
    match info.map_type() {
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

/// Returns the flag that sets the size of a map.
fn setting(name: &str) -> &'static str {
    match name {
        map::SERVICES | map::SERVICES6 => "--max-frontends",
        map::SLOTS => "--max-slots",
        map::MAGLEV => "--max-maglev-words",
        map::BACKENDS | map::BACKENDS6 | map::BACKEND_STATS | map::CONNECTIONS => "--max-backends",
        map::FLOWS | map::FLOWS6 | map::FLOW_INDEX | map::FLOW_INDEX6 => "--max-flows",
        map::SOCKETS | map::SOCKETS6 => "--max-sockets",
        map::SRC_RANGES | map::SRC_RANGES6 => "--max-source-ranges",
        map::SERVICE_STATS | map::NAMES => "--max-services",
        _ => "",
    }
}
