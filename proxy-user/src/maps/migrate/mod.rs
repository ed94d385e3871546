//! Maps of another layout: some are shared; the flows are copied.
//!
//! Only `flows`, `flow_index` and the maps about the node differ between layout 2 and this one. Maps of the same shape and
//! meaning are pinned in the folders of both versions, so that the programs of both use the same maps. Flows are copied in
//! both directions, entry by entry, while programs of both layouts run.

mod copy;
mod index;
mod layout;
mod table;
#[cfg(test)]
mod tests;
mod v2;

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use aya::maps::{MapData, MapType};
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{Bucket, FlowEntry};
use proxy_common::map_names as names;

use self::copy::copy;
use self::layout::{Current, Layout, Second};
use self::table::{Sizes, Table};
use self::v2::{ConfigV2, FlowV2};
use super::mapping::Mapping;
use super::sys;
pub use copy::Copied;
pub use table::Scope;

/// The layout before this one; flows can be copied from and to it.
pub const PREVIOUS: u32 = v2::ABI;

/// Maps that both layouts have: the name in layout 2, and the name here.
///
/// Not shared: `reasons` has more entries now; `node`, `node_addrs` and `devices` have other contents, which the first sync
/// writes before any program reads them.
pub const SHARED: &[(&str, &str)] = &[
    (names::SERVICES, names::SERVICES),
    (names::SERVICES6, names::SERVICES6),
    (names::SLOTS, names::SLOTS),
    (names::BACKENDS, names::BACKENDS),
    (names::BACKENDS6, names::BACKENDS6),
    (names::SOCKETS, names::SOCKETS),
    (names::SOCKETS6, names::SOCKETS6),
    ("filter", names::PREFILTER),
    (names::SERVICE_STATS, names::SERVICE_STATS),
    (names::BACKEND_STATS, names::BACKEND_STATS),
    (names::REFUSALS, names::REFUSALS),
    (names::NAMES, names::NAMES),
    (names::AFFINITY, names::AFFINITY),
    (names::AFFINITY6, names::AFFINITY6),
    (names::AFFINITY_NETNS, names::AFFINITY_NETNS),
    (names::SRC_RANGES, names::SRC_RANGES),
    (names::SRC_RANGES6, names::SRC_RANGES6),
    (names::EVENTS, names::EVENTS),
    (names::MONITOR, names::MONITOR),
];

/// Maps of layout 2 that flows are copied to: name, bytes of a value, and whether the map can be mapped into memory.
pub const MADE: &[(&str, u32, bool)] = &[
    (names::FLOWS, size_of::<FlowV2<[u8; 4]>>() as u32, true),
    (names::FLOWS6, size_of::<FlowV2<[u8; 16]>>() as u32, true),
    (names::FLOW_INDEX, size_of::<Bucket>() as u32, true),
    (names::FLOW_INDEX6, size_of::<Bucket>() as u32, true),
    (names::CONFIG, size_of::<ConfigV2>() as u32, false),
];

/// The reason why flows cannot be copied.
#[derive(Debug, thiserror::Error)]
#[error("map {}: {source}", path.display())]
pub struct MigrateError {
    path: PathBuf,
    source: io::Error,
}

type Pair<A> = (Table<A, Second>, Table<A, Current>);

/// The flow tables of both layouts.
pub struct Migration {
    /// Settings with the timeouts of flows.
    config: NodeConfig,
    v4: Pair<[u8; 4]>,
    v6: Pair<[u8; 16]>,
}

/// The result of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Flows copied from the previous layout to this one.
    pub forward: Copied,
    /// Flows copied from this layout to the previous one.
    pub back: Copied,
}

impl Migration {
    /// Opens the maps of the previous layout that are pinned in `previous`, and those of this layout in `current`.
    pub fn open(previous: &Path, current: &Path) -> Result<Self, MigrateError> {
        let old: ConfigV2 = config(previous)?;
        let settings: NodeConfig = config(current)?;
        let new = settings;
        let old =
            Sizes { entries: old.flow_entries, buckets: old.flow_buckets, seed: old.flow_seed, hz: old.hz };
        let new =
            Sizes { entries: new.flow_entries, buckets: new.flow_buckets, seed: new.flow_seed, hz: new.hz };
        let (v4, v6) = ([names::FLOWS, names::FLOW_INDEX], [names::FLOWS6, names::FLOW_INDEX6]);
        Ok(Self {
            config: settings,
            v4: (
                table::<_, _, FlowV2<[u8; 4]>>(previous, v4, old)?,
                table::<_, _, FlowEntry<[u8; 4]>>(current, v4, new)?,
            ),
            v6: (
                table::<_, _, FlowV2<[u8; 16]>>(previous, v6, old)?,
                table::<_, _, FlowEntry<[u8; 16]>>(current, v6, new)?,
            ),
        })
    }

    /// Copies the flows that have changed on either side since the last pass; the first pass copies all flows.
    pub fn pass(&mut self, scope: Scope) -> Pass {
        let Self { config, v4, v6 } = self;
        let forward =
            copy(&mut v4.0, &mut v4.1, config, scope).and(copy(&mut v6.0, &mut v6.1, config, scope));
        let back = copy(&mut v4.1, &mut v4.0, config, scope).and(copy(&mut v6.1, &mut v6.0, config, scope));
        Pass { forward, back }
    }
}

/// Translates the settings in `current` to the previous layout, and writes them to the map in `previous`.
pub fn write_previous_config(previous: &Path, current: &Path) -> Result<(), MigrateError> {
    let (path, map) = open(previous, names::CONFIG)?;
    let value = v2::config(&config(current)?);
    sys::update(map.fd().as_fd(), &[0u32], &[value])
        .map_err(|stopped| MigrateError { path, source: stopped.source })
}

fn open(dir: &Path, name: &str) -> Result<(PathBuf, MapData), MigrateError> {
    let path = dir.join(name);
    match MapData::from_pin(&path) {
        Ok(map) => Ok((path, map)),
        Err(error) => Err(MigrateError { path, source: io::Error::other(error) }),
    }
}

/// Reads the settings in `dir`.
fn config<C: Plain>(dir: &Path) -> Result<C, MigrateError> {
    let (path, map) = open(dir, names::CONFIG)?;
    let failed = |source| MigrateError { path: path.clone(), source };
    let shape = || failed(io::ErrorKind::InvalidData.into());
    let info = map.info().map_err(|error| failed(io::Error::other(error)))?;
    if info.value_size() as usize != size_of::<C>() {
        return Err(shape());
    }
    let (rows, _) = sys::lookup::<u32, C>(map.fd().as_fd(), None, 1).map_err(failed)?;
    rows.first().map(|(_, config)| *config).ok_or_else(shape)
}

/// Opens the flows and the index of one family in one layout, whose entries are `E`.
fn table<A: Address, L: Layout<A>, E>(
    dir: &Path,
    [flows, index]: [&str; 2],
    sizes: Sizes,
) -> Result<Table<A, L>, MigrateError> {
    let flows = mapping(dir, flows, size_of::<E>(), sizes.entries)?;
    let index = mapping(dir, index, size_of::<Bucket>(), sizes.buckets)?;
    Ok(Table::new(flows, index, sizes))
}

fn mapping(dir: &Path, name: &str, size: usize, wanted: u32) -> Result<Mapping, MigrateError> {
    let (path, map) = open(dir, name)?;
    let failed = |source| MigrateError { path: path.clone(), source };
    let info = map.info().map_err(|error| failed(io::Error::other(error)))?;
    let fits = info.map_type().is_ok_and(|kind| kind == MapType::Array)
        && info.value_size() as usize == size
        && info.max_entries() >= wanted;
    if !fits {
        return Err(failed(io::ErrorKind::InvalidData.into()));
    }
    Mapping::new(map.fd().as_fd(), size, info.max_entries() as usize).map_err(failed)
}
