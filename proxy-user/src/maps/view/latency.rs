//! How long endpoints take to answer.

use std::collections::BTreeMap;

use aya::maps::MapType;
use proxy_common::latency::{LatencyEntry, LatencyKey};
use proxy_common::map_names as map;

use super::{View, ViewError};

impl View {
    /// What was measured (`--connect-latency`), by the ids of Service port and backend; backend 0: all of the Service. Empty
    /// where nothing is measured.
    pub fn latency(&self) -> Result<BTreeMap<(u32, u32), LatencyEntry>, ViewError> {
        // Programs of an earlier version have no such map.
        if !self.folder().join(map::CONNECT_LATENCY).exists() {
            return Ok(BTreeMap::new());
        }
        let rows = self.pin(map::CONNECT_LATENCY, MapType::LruHash)?.all::<LatencyKey, LatencyEntry>()?;
        Ok(rows.into_iter().map(|(key, entry)| ((key.service, key.backend), entry)).collect())
    }
}
