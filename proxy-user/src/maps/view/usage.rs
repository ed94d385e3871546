//! How full and how large the maps are.

use std::path::PathBuf;

use aya::maps::{MapData, MapInfo, MapType};
use proxy_common::abi::Plain;
use proxy_common::backend::{BACKEND_FREE, BackendEntry};
use proxy_common::flow::{FLOW_USED, Flow, FlowKey, FlowRef};
use proxy_common::map_names as map;
use proxy_common::name::PortName;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::stats::RefusalKey;

use super::{View, ViewError};

/// One map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageRow {
    /// Its name.
    pub name: &'static str,
    /// Its number in this kernel.
    pub id: u32,
    /// Where it is pinned.
    pub pin: PathBuf,
    /// Its type, in the kernel's words.
    pub kind: String,
    /// Entries that fit.
    pub capacity: u32,
    /// Entries in use; `None` where all of them always are.
    pub used: Option<u32>,
    /// Bytes of kernel memory, where the kernel tells.
    pub memory: Option<u64>,
    /// The flag that makes it larger; empty where none does.
    pub setting: &'static str,
}

impl View {
    /// All maps, in the order of [`map::ALL`].
    pub fn usage(&self) -> Result<Vec<UsageRow>, ViewError> {
        map::ALL.iter().map(|name| self.one_usage(name)).collect()
    }

    fn one_usage(&self, name: &'static str) -> Result<UsageRow, ViewError> {
        let pin = self.maps.join(name);
        let error = |source| ViewError::map(&pin, source);
        let data = MapData::from_pin(&pin).map_err(error)?;
        let info = data.info().map_err(error)?;
        Ok(UsageRow {
            name,
            id: info.id(),
            kind: kind(&info),
            capacity: info.max_entries(),
            used: self.used(name)?,
            memory: super::links::fdinfo(data.fd()).get("memlock").and_then(|bytes| bytes.parse().ok()),
            setting: setting(name),
            pin,
        })
    }

    /// Entries of that map in use.
    fn used(&self, name: &'static str) -> Result<Option<u32>, ViewError> {
        let used = match name {
            map::SERVICES => self.entries::<ServiceKey<[u8; 4]>, ServiceEntry>(name, MapType::Hash)?,
            map::SERVICES6 => self.entries::<ServiceKey<[u8; 16]>, ServiceEntry>(name, MapType::Hash)?,
            map::NAMES => self.entries::<u32, PortName>(name, MapType::Hash)?,
            map::FLOWS => self.entries::<FlowKey<[u8; 4]>, FlowRef>(name, MapType::Hash)?,
            map::FLOWS6 => self.entries::<FlowKey<[u8; 16]>, FlowRef>(name, MapType::Hash)?,
            map::SOCKETS => {
                self.entries::<SocketKey<[u8; 4]>, SocketEntry<[u8; 4]>>(name, MapType::LruHash)?
            }
            map::SOCKETS6 => {
                self.entries::<SocketKey<[u8; 16]>, SocketEntry<[u8; 16]>>(name, MapType::LruHash)?
            }
            map::REFUSALS => self.entries::<RefusalKey, u64>(name, MapType::LruHash)?,
            map::BACKENDS => self.elements(name, |e: &BackendEntry<[u8; 4]>| e.state != BACKEND_FREE)?,
            map::BACKENDS6 => self.elements(name, |e: &BackendEntry<[u8; 16]>| e.state != BACKEND_FREE)?,
            map::FLOW_STATE => self.elements(name, |e: &Flow<[u8; 4]>| e.state & FLOW_USED != 0)?,
            map::FLOW_STATE6 => self.elements(name, |e: &Flow<[u8; 16]>| e.state & FLOW_USED != 0)?,
            // A slot that no frontend reaches keeps its last content, so extents are summed instead.
            map::SLOTS => self.services()?.iter().map(|row| row.backends.len() as u32).sum(),
            _ => return Ok(None),
        };
        Ok(Some(used))
    }

    fn entries<K: Plain, V: Plain>(&self, name: &'static str, kind: MapType) -> Result<u32, ViewError> {
        Ok(self.pin(name, kind)?.all::<K, V>()?.len() as u32)
    }

    fn elements<V: Plain>(&self, name: &'static str, used: impl Fn(&V) -> bool) -> Result<u32, ViewError> {
        let rows = self.pin(name, MapType::Array)?.all::<u32, V>()?;
        Ok(rows.iter().filter(|(_, value)| used(value)).count() as u32)
    }
}

/// The type as `bpftool` writes it.
fn kind(info: &MapInfo) -> String {
    match info.map_type() {
        Ok(MapType::Hash) => "hash".to_owned(),
        Ok(MapType::LruHash) => "lru_hash".to_owned(),
        Ok(MapType::Array) => "array".to_owned(),
        Ok(MapType::PerCpuArray) => "percpu_array".to_owned(),
        Ok(other) => format!("{other:?}").to_lowercase(),
        Err(_) => "unknown".to_owned(),
    }
}

/// The flag that makes a map larger.
fn setting(name: &str) -> &'static str {
    match name {
        map::SERVICES | map::SERVICES6 => "--max-frontends",
        map::SLOTS => "--max-slots",
        map::BACKENDS | map::BACKENDS6 | map::BACKEND_STATS => "--max-backends",
        map::FLOWS | map::FLOWS6 | map::FLOW_STATE | map::FLOW_STATE6 => "--max-flows",
        map::SOCKETS | map::SOCKETS6 => "--max-sockets",
        map::SERVICE_STATS | map::NAMES => "--max-services",
        _ => "",
    }
}
