//! Counters of repairs, and the ids by which maps are recognised.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::MapInfo;
use proxy_common::map_names;

use super::error::Error;
use super::pins::Paths;

/// Number of repairs since the start.
#[derive(Debug, Default)]
pub struct Repairs {
    pub(super) socket_programs: AtomicU64,
    pub(super) packet_programs: AtomicU64,
    pub(super) map_pins: AtomicU64,
}

impl Repairs {
    /// Returns the counters, by what was restored; packet programs count by device.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [
            ("socket_program", read(&self.socket_programs)),
            ("packet_program", read(&self.packet_programs)),
            ("map_pin", read(&self.map_pins)),
        ]
    }

    pub(super) fn add_device(&self) {
        self.packet_programs.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the kernel's ids of the maps that were opened or created, by name.
pub(super) fn map_ids(paths: &Paths) -> Result<BTreeMap<&'static str, u32>, Error> {
    let id = |name: &&'static str| match pinned_map(paths, name) {
        Ok(Some(id)) => Ok((*name, id)),
        Ok(None) => Err(Error::Incomplete { kind: "map", name }),
        Err(source) => Err(Error::Map { name, source }),
    };
    map_names::ALL.iter().chain(map_names::OPTIONAL).map(id).collect()
}

/// Returns the id of the map that is pinned under this name; `None` if there is no such pin.
pub(super) fn pinned_map(paths: &Paths, name: &'static str) -> Result<Option<u32>, aya::maps::MapError> {
    let path = paths.maps().join(name);
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    MapInfo::from_pin(path).map(|info| Some(info.id()))
}
