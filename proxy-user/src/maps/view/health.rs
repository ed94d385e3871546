//! The health of endpoints, as observed from connections.

use std::collections::{BTreeMap, BTreeSet};

use aya::maps::MapType;
use proxy_common::health::{SKIP_USED, Standing, current, ejected_for, is_plain, standing};
use proxy_common::map_names as map;
use proxy_common::node::{DEVICE_UPLINK, Device};

use super::flows::now;
use super::{View, ViewError};

impl View {
    /// Returns the indexes of the devices on which packets of other machines arrive.
    pub fn uplinks(&self) -> Result<BTreeSet<u32>, ViewError> {
        let devices = self.pin(map::DEVICES, MapType::Hash)?.all::<u32, Device>()?;
        Ok(devices
            .into_iter()
            .filter(|(_, bits)| bits & DEVICE_UPLINK != 0)
            .map(|(index, _)| index)
            .collect())
    }

    /// Returns the words of `health` with more information than that an endpoint answers, by backend id.
    pub fn health(&self) -> Result<BTreeMap<u32, u64>, ViewError> {
        let words = self.pin(map::HEALTH, MapType::Array)?.mapped::<u64>()?;
        let all = (0..words.len()).filter_map(|id| Some((id as u32, words.read(id)?)));
        Ok(all.filter(|(_, word)| !is_plain(*word)).collect())
    }

    /// Returns the words of `skips` in use, by index.
    pub fn skips(&self) -> Result<BTreeMap<u32, u64>, ViewError> {
        let words = self.pin(map::SKIPS, MapType::Array)?.mapped::<u64>()?;
        let all = (0..words.len()).filter_map(|index| Some((index as u32, words.read(index)?)));
        Ok(all.filter(|(_, word)| word & SKIP_USED != 0).collect())
    }

    /// Returns the endpoints that all new connections skip, by backend id, with the remaining seconds.
    pub fn ejected(&self) -> Result<BTreeMap<u32, u32>, ViewError> {
        let hz = self.node_config()?.hz;
        if hz == 0 {
            return Ok(BTreeMap::new());
        }
        let seconds = |word| ejected_for(word, now(hz), hz).map(|left: u32| left.div_ceil(hz));
        Ok(self.health()?.into_iter().filter_map(|(id, word)| Some((id, seconds(word)?))).collect())
    }

    /// Returns the ids of backends that get only a small share of new connections, from any client, until they answer.
    pub fn on_trial(&self) -> Result<BTreeSet<u32>, ViewError> {
        let hz = self.node_config()?.hz;
        if hz == 0 {
            return Ok(BTreeSet::new());
        }
        let now = now(hz);
        let standing = |word: u64| standing(current(word, now, hz), now, hz);
        let is_trial = |word: u64| matches!(standing(word), Standing::Joining | Standing::Trial);
        Ok(self.health()?.into_iter().filter(|(_, word)| is_trial(*word)).map(|(id, _)| id).collect())
    }
}
