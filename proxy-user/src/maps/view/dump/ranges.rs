//! The sets of source ranges, with the Service ports that use them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use aya::maps::MapType;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::source_range::SourceRangeKey;
use serde_json::json;

use super::{Entry, Names, title};
use crate::maps::family::MapFamily;
use crate::maps::view::{View, ViewError};

impl View {
    pub(super) fn dump_ranges<A: MapFamily>(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let services = self.pin(A::SERVICES, MapType::Hash)?.all::<ServiceKey<A>, ServiceEntry>()?;
        let mut users: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for (_, entry) in services {
            users.entry(entry.ranges).or_default().insert(entry.id);
        }
        let rows = self.ranges::<A>()?.into_iter();
        Ok(rows
            .map(|(length, SourceRangeKey { set, addr })| {
                let address: IpAddr = addr.into();
                let ids = users.get(&set).into_iter().flatten();
                let services: Vec<_> = ids.map(|id| title(*id, names)).collect();
                (
                    json!({ "set": set, "range": format!("{address}/{length}") }),
                    json!({ "services": services }),
                )
            })
            .collect())
    }
}
