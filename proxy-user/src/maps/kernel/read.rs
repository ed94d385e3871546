//! Reading parts of maps.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::AsFd;

use aya::maps::MapData;
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::backend::BackendEntry;

use super::super::segments::Segments;
use super::super::sys;
use proxy_core::store::{Backend, MapError, Table};

/// Reads about `count` entries of a hash map; returns where the next read continues.
pub(super) fn hash<K: Plain, V: Plain, T: From<K> + Ord>(
    map: &MapData,
    table: Table,
    from: Option<u32>,
    count: u32,
    into: &mut BTreeMap<T, V>,
) -> Result<Option<u32>, MapError> {
    let read = sys::lookup::<K, V>(map.fd().as_fd(), from, count as usize);
    let (found, next) = read.map_err(|source| MapError::Read { table, source })?;
    into.extend(found.into_iter().map(|(key, value)| (key.into(), value)));
    Ok(next)
}

pub(super) fn endpoints<A: Address + Into<IpAddr>>(
    map: &Segments,
    table: Table,
    range: Range<u32>,
) -> Result<BTreeMap<u32, Backend>, MapError> {
    let rows = map.lookup::<BackendEntry<A>>(range).map_err(|source| MapError::Read { table, source })?;
    let used = |(id, entry)| Backend::from_entry(entry).map(|row| (id, row));
    Ok(rows.into_iter().filter_map(used).collect())
}
