//! `refusals`, `connect_latency` and `socket_examples`: the agent removes what these maps counted for an id that is freed.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use aya::maps::{MapData, MapType};
use proxy_common::abi::Plain;
use proxy_common::latency::{ExampleKey, LatencyEntry, LatencyKey, SocketExample};
use proxy_common::map_names::{CONNECT_LATENCY, REFUSALS, SOCKET_EXAMPLES};
use proxy_common::stats::RefusalKey;

use super::open::open_as;
use crate::maps::sys;
use proxy_core::store::{MapError, Table};

/// Maps whose rows belong to the id of a Service port or a backend.
pub(super) struct Counted {
    refusals: MapData,
    /// `None` if latency is not measured.
    latency: Option<MapData>,
    examples: Option<MapData>,
}

impl Counted {
    /// Opens the maps. An earlier version has no `connect_latency` or no `socket_examples`.
    pub(super) fn open(dir: &Path) -> Result<Self, MapError> {
        let (refusals, _) = open_as::<RefusalKey, u64>(dir, Table::Names, REFUSALS, MapType::LruHash)?;
        let latency = measured::<LatencyKey, LatencyEntry>(dir, CONNECT_LATENCY)?;
        let examples = measured::<ExampleKey, SocketExample>(dir, SOCKET_EXAMPLES)?;
        Ok(Self { refusals, latency, examples })
    }

    /// Removes the rows of these Service ports. The rows are few: a Service has at most one for each reason.
    pub(super) fn forget_services(&self, ids: &[u32]) -> io::Result<()> {
        let ids: BTreeSet<_> = ids.iter().collect();
        forget::<RefusalKey, u64>(&self.refusals, |key| ids.contains(&key.service))?;
        if let Some(map) = &self.examples {
            forget::<ExampleKey, SocketExample>(map, |key| ids.contains(&key.service))?;
        }
        self.forget_latency(|key| ids.contains(&key.service))
    }

    /// Removes the rows of these backends.
    pub(super) fn forget_backends(&self, ids: &[u32]) -> io::Result<()> {
        let ids: BTreeSet<_> = ids.iter().collect();
        if ids.is_empty() { Ok(()) } else { self.forget_latency(|key| ids.contains(&key.backend)) }
    }

    fn forget_latency(&self, is_gone: impl Fn(&LatencyKey) -> bool) -> io::Result<()> {
        match &self.latency {
            Some(map) => forget::<LatencyKey, LatencyEntry>(map, is_gone),
            None => Ok(()),
        }
    }
}

/// Opens a map of latencies; `None` if it does not exist, or has only one entry because latency is not measured.
fn measured<K: Plain, V: Plain>(dir: &Path, name: &str) -> Result<Option<MapData>, MapError> {
    if !dir.join(name).exists() {
        return Ok(None);
    }
    let (map, size) = open_as::<K, V>(dir, Table::Names, name, MapType::LruHash)?;
    Ok((size > 1).then_some(map))
}

fn forget<K: Plain, V: Plain>(map: &MapData, is_gone: impl Fn(&K) -> bool) -> io::Result<()> {
    let map = map.fd().as_fd();
    let (rows, _) = sys::lookup::<K, V>(map, None, u32::MAX as usize)?;
    let gone: Vec<_> = rows.into_iter().map(|(key, _)| key).filter(is_gone).collect();
    sys::delete(map, &gone).map_err(|stopped| stopped.source)
}
