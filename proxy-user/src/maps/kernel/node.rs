//! The maps about the node, and the source ranges: small maps, written entry by entry.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{IterableMap as _, Map, MapData, MapType};
use ipnet::IpNet;
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::config::{Limits, NodeConfig};
use proxy_common::node::{Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::source_range::{SET_BITS, SourceRangeKey};

use super::super::settings;
use super::super::sys::{self, Stopped};
use super::open::open;
use super::read::hash;
use crate::maps::family::MapFamily;
use crate::maps::sys::io_error;
use proxy_core::store::{ConfigRow, NodeContents, NodeFamily, NodeRow, TunnelRow, range_parts};
use proxy_core::store::{MapError, Table, Write};

type Ranges<A> = LpmTrie<MapData, SourceRangeKey<A>, u32>;

/// The maps, opened by their pins.
pub(super) struct NodeMaps {
    node: MapData,
    node6: MapData,
    addresses: MapData,
    addresses6: MapData,
    tunnels: MapData,
    devices: MapData,
    config: MapData,
    ranges: Ranges<[u8; 4]>,
    ranges6: Ranges<[u8; 16]>,
    range_count: u32,
}

impl NodeMaps {
    pub(super) fn open(dir: &Path) -> Result<Self, MapError> {
        let ((ranges, count), (ranges6, count6)) =
            (trie(dir, Table::SrcRanges)?, trie(dir, Table::SrcRanges6)?);
        Ok(Self {
            node: open::<u32, NodeEntry<[u8; 4]>>(dir, Table::Node, MapType::Array)?.0,
            node6: open::<u32, NodeEntry<[u8; 16]>>(dir, Table::Node6, MapType::Array)?.0,
            addresses: open::<[u8; 4], NodeAddr>(dir, Table::NodeAddrs, MapType::Hash)?.0,
            addresses6: open::<[u8; 16], NodeAddr>(dir, Table::NodeAddrs6, MapType::Hash)?.0,
            tunnels: open::<u32, Tunnel>(dir, Table::Tunnels, MapType::Array)?.0,
            devices: open::<u32, Device>(dir, Table::Devices, MapType::Hash)?.0,
            config: open::<u32, NodeConfig>(dir, Table::Config, MapType::Array)?.0,
            ranges,
            ranges6,
            range_count: count.min(count6),
        })
    }

    /// Returns the number of source ranges that each of the two tables can hold.
    pub(super) fn range_count(&self) -> u32 {
        self.range_count
    }

    /// Returns the ceilings of the maps that grow.
    pub(super) fn limits(&self) -> Result<Limits, MapError> {
        Ok(first::<NodeConfig>(&self.config, Table::Config)?.limits)
    }

    /// Does the writes; an error tells how many of them were done.
    pub(super) fn write(&mut self, writes: &[Write]) -> Result<(), Stopped> {
        for (done, write) in writes.iter().enumerate() {
            self.one(write).map_err(|source| Stopped { done, source })?;
        }
        Ok(())
    }

    fn one(&mut self, write: &Write) -> io::Result<()> {
        match write {
            Write::SourceRange(id, range) => match range_parts(*range) {
                (IpAddr::V4(addr), len) => put(&mut self.ranges, *id, addr.octets(), len),
                (IpAddr::V6(addr), len) => put(&mut self.ranges6, *id, addr.octets(), len),
            },
            Write::NoSourceRange(id, range) => match range_parts(*range) {
                (IpAddr::V4(addr), len) => take(&mut self.ranges, *id, addr.octets(), len),
                (IpAddr::V6(addr), len) => take(&mut self.ranges6, *id, addr.octets(), len),
            },
            Write::Node(row) => match &**row {
                NodeRow::V4(row) => set(&self.node, 0u32, row.entry::<[u8; 4]>()),
                NodeRow::V6(row) => set(&self.node6, 0u32, row.entry::<[u8; 16]>()),
            },
            Write::NodeAddr(IpAddr::V4(addr), bits) => set(&self.addresses, addr.octets(), *bits),
            Write::NodeAddr(IpAddr::V6(addr), bits) => set(&self.addresses6, addr.octets(), *bits),
            Write::NoNodeAddr(IpAddr::V4(addr)) => remove(&self.addresses, addr.octets()),
            Write::NoNodeAddr(IpAddr::V6(addr)) => remove(&self.addresses6, addr.octets()),
            Write::Tunnel(number, row) => {
                set(&self.tunnels, *number, row.map_or_else(Tunnel::default, TunnelRow::entry))
            }
            Write::Device(index, bits) => set(&self.devices, *index, *bits),
            Write::NoDevice(index) => remove(&self.devices, *index),
            // The entry also holds settings that other code writes.
            Write::Config(row) => settings::edit(self.config.fd().as_fd(), |entry| row.apply(entry)),
            _ => Ok(()),
        }
    }

    /// Reads about `count` source ranges of one family after `from`; returns where the next read continues.
    pub(super) fn source_ranges(
        &self,
        table: Table,
        from: Option<(u32, IpNet)>,
        count: u32,
    ) -> Result<RangePart, MapError> {
        let read = match table {
            Table::SrcRanges6 => ranges::<[u8; 16]>(self.ranges6.map(), from, count),
            _ => ranges::<[u8; 4]>(self.ranges.map(), from, count),
        };
        read.map_err(|source| MapError::Read { table, source })
    }

    /// Reads all tables about the node.
    pub(super) fn all(&self) -> Result<NodeContents, MapError> {
        let mut all = NodeContents::default();
        for table in NodeContents::TABLES {
            let NodeContents { rows, addresses, tunnels, devices, config } = self.read(table)?;
            all.rows.extend(rows);
            all.addresses.extend(addresses);
            all.tunnels.extend(tunnels);
            all.devices.extend(devices);
            if table == Table::Config {
                all.config = config;
            }
        }
        Ok(all)
    }

    /// Reads one table about the node.
    pub(super) fn read(&self, table: Table) -> Result<NodeContents, MapError> {
        let mut found = NodeContents::default();
        match table {
            Table::Node => {
                let entry = first::<NodeEntry<[u8; 4]>>(&self.node, table)?;
                found.rows.insert(table, NodeRow::V4(NodeFamily::from_entry(&entry)));
            }
            Table::Node6 => {
                let entry = first::<NodeEntry<[u8; 16]>>(&self.node6, table)?;
                found.rows.insert(table, NodeRow::V6(NodeFamily::from_entry(&entry)));
            }
            Table::NodeAddrs => found.addresses = addresses::<[u8; 4]>(&self.addresses, table)?,
            Table::NodeAddrs6 => found.addresses = addresses::<[u8; 16]>(&self.addresses6, table)?,
            Table::Tunnels => {
                let all: BTreeMap<u32, Tunnel> = entries(&self.tunnels, table, u32::MAX)?;
                let used = all.iter().filter_map(|(number, entry)| Some((*number, TunnelRow::of(entry)?)));
                found.tunnels = used.collect();
            }
            Table::Devices => found.devices = entries(&self.devices, table, u32::MAX)?,
            Table::Config => found.config = ConfigRow::of(&first(&self.config, table)?),
            _ => {}
        }
        Ok(found)
    }
}

/// Opens a trie; returns it with its capacity.
fn trie<A: Address>(dir: &Path, table: Table) -> Result<(Ranges<A>, u32), MapError> {
    let path = dir.join(table.name());
    let open = || {
        let map = MapData::from_pin(&path)?;
        let count = map.info()?.max_entries();
        Ok((Map::LpmTrie(map).try_into()?, count))
    };
    open().map_err(|error| MapError::Open { table, path: path.clone(), source: io_error(error) })
}

fn key<A: Address>(set: u32, addr: A, len: u32) -> Key<SourceRangeKey<A>> {
    Key::new(SET_BITS + len, SourceRangeKey { set, addr })
}

fn put<A: Address>(map: &mut Ranges<A>, set: u32, addr: A, len: u32) -> io::Result<()> {
    match map.insert(&key(set, addr, len), 1, 0).map_err(io_error) {
        // An LPM trie returns `ENOSPC` when it is full.
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
            Err(io::Error::from_raw_os_error(libc::E2BIG))
        }
        other => other,
    }
}

fn take<A: Address>(map: &mut Ranges<A>, set: u32, addr: A, len: u32) -> io::Result<()> {
    match map.remove(&key(set, addr, len)).map_err(io_error) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
        _ => Ok(()),
    }
}

/// A key of a longest-prefix-match trie.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct TrieKey<A> {
    bits: u32,
    data: SourceRangeKey<A>,
}

// SAFETY: both fields are `Plain`, and no padding is between them or at the end: the second one is aligned to four bytes.
unsafe impl<A: Address> Plain for TrieKey<A> {}

impl<A: Address + Into<IpAddr>> TrieKey<A> {
    fn new(set: u32, addr: A, len: u32) -> Self {
        Self { bits: SET_BITS + len, data: SourceRangeKey { set, addr } }
    }

    /// Returns the set and the range; `None` for a key that no program finds.
    fn range(self) -> Option<(u32, IpNet)> {
        let len = self.bits.checked_sub(SET_BITS).and_then(|len| u8::try_from(len).ok())?;
        Some((self.data.set, IpNet::new(self.data.addr.into(), len).ok()?))
    }
}

/// Source ranges, and the last one if more follow.
type RangePart = (BTreeSet<(u32, IpNet)>, Option<(u32, IpNet)>);

/// Reads about `count` source ranges after `from`; from the start again if that range was removed.
fn ranges<A: MapFamily>(map: &MapData, from: Option<(u32, IpNet)>, count: u32) -> io::Result<RangePart> {
    let from = from.and_then(|(set, range)| {
        let (addr, len) = range_parts(range);
        Some(TrieKey::new(set, A::of_ip(addr)?, len))
    });
    let (found, next) =
        sys::lookup_after::<TrieKey<A>, u32, TrieKey<A>>(map.fd().as_fd(), from, count as usize)?;
    let ranges = found.into_iter().filter_map(|(key, _)| key.range()).collect();
    Ok((ranges, next.and_then(TrieKey::range)))
}

fn set<K: Plain, V: Plain>(map: &MapData, key: K, value: V) -> io::Result<()> {
    sys::update(map.fd().as_fd(), &[key], &[value]).map_err(|stopped| stopped.source)
}

fn remove<K: Plain>(map: &MapData, key: K) -> io::Result<()> {
    sys::delete(map.fd().as_fd(), &[key]).map_err(|stopped| stopped.source)
}

fn first<V: Plain>(map: &MapData, table: Table) -> Result<V, MapError> {
    let missing = || MapError::Read { table, source: io::ErrorKind::NotFound.into() };
    let entries: BTreeMap<u32, V> = entries(map, table, 1)?;
    entries.into_values().next().ok_or_else(missing)
}

fn entries<K: Plain + Ord, V: Plain>(
    map: &MapData,
    table: Table,
    count: u32,
) -> Result<BTreeMap<K, V>, MapError> {
    let mut found = BTreeMap::new();
    hash(map, table, None, count, &mut found)?;
    Ok(found)
}

fn addresses<A: MapFamily>(map: &MapData, table: Table) -> Result<BTreeMap<IpAddr, NodeAddr>, MapError> {
    let found = entries::<A, NodeAddr>(map, table, u32::MAX)?;
    Ok(found.into_iter().map(|(address, bits)| (address.into(), bits)).collect())
}
