//! The sets of source ranges, with the Service ports that use them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use aya::Pod;
use proxy_common::abi::Plain;
use proxy_common::affinity::AffinityKey;
use proxy_common::backend::BackendEntry;
use proxy_common::node::NodeEntry;
use proxy_common::service::ServiceKey;
use proxy_common::source_range::SourceRangeKey;
use serde_json::json;

use super::{Entry, Names, title};
use crate::maps::view::rules::Names as MapsOf;
use crate::maps::view::{View, ViewError};

impl View {
    pub(super) fn dump_ranges<F: MapsOf>(&self, names: &Names) -> Result<Vec<Entry>, ViewError>
    where
        F::Addr: Into<IpAddr> + Pod,
        ServiceKey<F::Addr>: Plain,
        BackendEntry<F::Addr>: Plain,
        NodeEntry<F::Addr>: Plain,
        AffinityKey<F::Addr>: Plain,
        SourceRangeKey<F::Addr>: Pod,
    {
        let rules = self.rules::<F>()?;
        let mut users: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for entry in rules.services.values() {
            users.entry(entry.ranges).or_default().insert(entry.id);
        }
        let rows = rules.ranges.into_iter();
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
