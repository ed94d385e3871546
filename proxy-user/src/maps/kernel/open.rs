//! Opens pinned maps, and checks that their types and sizes are those that this agent writes.

use std::path::Path;

use aya::maps::{MapData, MapType};
use proxy_common::abi::Plain;

use super::super::segments::Segments;
use super::super::sys::io_error;
use super::super::windows::Array;
use proxy_core::store::{MapError, Table};

pub(super) fn shape(
    table: Table,
    what: &'static str,
    found: &dyn ToString,
    expected: &dyn ToString,
) -> MapError {
    MapError::Shape { table, what, found: found.to_string(), expected: expected.to_string() }
}

/// Opens the map of a table; returns it with its number of entries.
pub(super) fn open<K: Plain, V: Plain>(
    dir: &Path,
    table: Table,
    kind: MapType,
) -> Result<(MapData, u32), MapError> {
    open_as::<K, V>(dir, table, table.name(), kind)
}

/// Opens the map `name` that belongs to a table; returns it with its number of entries.
pub(super) fn open_as<K: Plain, V: Plain>(
    dir: &Path,
    table: Table,
    name: &str,
    kind: MapType,
) -> Result<(MapData, u32), MapError> {
    let path = dir.join(name);
    let failed = |error| MapError::Open { table, path: path.clone(), source: io_error(error) };
    let map = MapData::from_pin(&path).map_err(failed)?;
    let info = map.info().map_err(failed)?;
    let found_kind = info.map_type().map_err(failed)?;
    if found_kind != kind {
        return Err(shape(table, "the type", &format!("{found_kind:?}"), &format!("{kind:?}")));
    }
    if info.key_size() as usize != size_of::<K>() {
        return Err(shape(table, "a key size of", &info.key_size(), &size_of::<K>()));
    }
    if info.value_size() as usize != size_of::<V>() {
        return Err(shape(table, "a value size of", &info.value_size(), &size_of::<V>()));
    }
    Ok((map, info.max_entries()))
}

/// Opens the array `name`, which may grow and belongs to a table.
pub(super) fn open_array<V: Plain>(
    dir: &Path,
    table: Table,
    name: &'static str,
    kind: MapType,
) -> Result<Segments, MapError> {
    let opened = Segments::open(dir, name);
    let map = opened.map_err(|source| MapError::Open { table, path: dir.join(name), source })?;
    let found = map.shape();
    if found.kind != kind as u32 {
        return Err(shape(table, "the type", &found.kind, &(kind as u32)));
    }
    if found.value_size as usize != size_of::<V>() {
        return Err(shape(table, "a value size of", &found.value_size, &size_of::<V>()));
    }
    Ok(map)
}

/// Opens the array `name`, which is written through memory.
pub(super) fn map_memory<V: Plain>(dir: &Path, table: Table, name: &'static str) -> Result<Array, MapError> {
    let array = Array::new(open_array::<V>(dir, table, name, MapType::Array)?);
    array.map_err(|source| MapError::Open { table, path: dir.join(name), source })
}
