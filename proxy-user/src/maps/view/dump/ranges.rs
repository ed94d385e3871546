//! The sets of source ranges, with the Service ports that use them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use aya::Pod;
use aya::maps::MapType;
use proxy_common::abi::Plain;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::source_range::SourceRangeKey;
use serde_json::json;

use super::{Entry, Names, title};
use crate::maps::view::rules::Names as MapsOf;
use crate::maps::view::{View, ViewError};

impl View {
    pub(super) fn dump_ranges<F: MapsOf>(&self, names: &Names) -> Result<Vec<Entry>, ViewError>
    where
        F::Addr: Into<IpAddr>,
        ServiceKey<F::Addr>: Plain,
        SourceRangeKey<F::Addr>: Pod,
    {
        let [services, .., ranges] = F::MAPS;
        let services = self.pin(services, MapType::Hash)?.all::<ServiceKey<F::Addr>, ServiceEntry>()?;
        let mut users: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for (_, entry) in services {
            users.entry(entry.ranges).or_default().insert(entry.id);
        }
        let rows = self.ranges::<F>(ranges)?.into_iter();
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
