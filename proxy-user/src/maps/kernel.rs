//! The pinned maps of this kernel.

mod arrays;
mod counted;
mod join;
mod node;
mod open;
mod read;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use aya::maps::{Map, MapData, MapType, PerCpuArray, PerCpuValues};
use aya::util::nr_cpus;
use proxy_common::backend::BackendEntry;
use proxy_common::map_names;
use proxy_common::name::PortName;
use proxy_common::prefilter::PREFILTER_WORDS;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::stats::ServiceStats;

use self::arrays::Arrays;
use self::counted::Counted;
use self::node::NodeMaps;
use self::open::{map_memory, open, open_array, shape};
use self::read::{endpoints, hash};
use super::family::MapFamily;
use super::segments::Segments;
use super::sys::io_error;
use super::sys::{self, Stopped};
use super::windows::Array;
use proxy_core::store::{BatchError, Capacity, Contents, Cursor, FrontendKey, MapError, Store, Table, Write};

/// The maps that the programs use, opened by their pins. Arrays grow as they are written.
pub struct KernelStore {
    services: MapData,
    services6: MapData,
    arrays: Arrays,
    backends: Segments,
    backends6: Segments,
    names: MapData,
    service_stats: Segments,
    /// `None`: the pins are those of a test without programs.
    turns: Option<Segments>,
    counted: Counted,
    health: Array,
    backend_counts: [Segments; 2],
    node: NodeMaps,
    capacity: Capacity,
}

impl KernelStore {
    /// Opens the maps pinned in `dir` by their names, and checks that their types and sizes are those that this agent
    /// writes.
    pub fn open(dir: &Path) -> Result<Self, MapError> {
        let (services, frontends) =
            open::<ServiceKey<[u8; 4]>, ServiceEntry>(dir, Table::Services, MapType::Hash)?;
        let (services6, frontends6) =
            open::<ServiceKey<[u8; 16]>, ServiceEntry>(dir, Table::Services6, MapType::Hash)?;
        let (names, ports) = open::<u32, PortName>(dir, Table::Names, MapType::Hash)?;
        let node = NodeMaps::open(dir)?;
        let limits = node.limits()?;
        let arrays = Arrays {
            slots: map_memory::<u32>(dir, Table::Slots, map_names::SLOTS)?,
            maglev: map_memory::<u64>(dir, Table::Maglev, map_names::MAGLEV)?,
            maglev_index: map_memory::<u64>(dir, Table::Maglev, map_names::MAGLEV_INDEX)?,
            prefilter: map_memory::<u64>(dir, Table::Prefilter, map_names::PREFILTER)?,
        };
        if arrays.prefilter.len() != PREFILTER_WORDS as usize {
            return Err(shape(Table::Prefilter, "a length of", &arrays.prefilter.len(), &PREFILTER_WORDS));
        }
        let health = map_memory::<u64>(dir, Table::Backends, map_names::HEALTH)?;
        let stats = |name, kind| open_array::<u64>(dir, Table::Backends, name, kind);
        let backends =
            open_array::<BackendEntry<[u8; 4]>>(dir, Table::Backends, map_names::BACKENDS, MapType::Array)?;
        let backends6 = open_array::<BackendEntry<[u8; 16]>>(
            dir,
            Table::Backends6,
            map_names::BACKENDS6,
            MapType::Array,
        )?;
        let service_stats =
            open_array::<ServiceStats>(dir, Table::Names, map_names::SERVICE_STATS, MapType::PerCpuArray)?;
        let most = |most: usize, limit: u32| {
            let most = u32::try_from(most).unwrap_or(u32::MAX);
            if limit == 0 { most } else { most.min(limit) }
        };
        Ok(Self {
            capacity: Capacity {
                frontends: frontends.min(frontends6),
                slots: most(arrays.slots.most(), limits.slots),
                maglev: most(arrays.maglev.most(), limits.maglev_words),
                backends: most(backends.most().min(backends6.most()).min(health.most()), limits.backends),
                services: ports,
                ranges: node.range_count(),
            },
            arrays,
            health,
            services,
            services6,
            backends,
            backends6,
            names,
            service_stats,
            turns: turns(dir)?,
            counted: Counted::open(dir)?,
            backend_counts: [
                stats(map_names::BACKEND_STATS, MapType::Array)?,
                stats(map_names::CONNECTIONS, MapType::Array)?,
            ],
            node,
        })
    }

    /// Does the writes of one run, all of one kind and table; an error tells how many of them were done.
    fn run(&mut self, run: &[Write]) -> Result<(), Stopped> {
        match run {
            [] => Ok(()),
            [Write::Name(..), ..] => {
                let (keys, values): (Vec<_>, Vec<_>) = run.iter().filter_map(name_of).unzip();
                // A program counts for an id as soon as an entry has it.
                let ids = keys.iter().max().map_or(0, |id| *id as usize + 1);
                for counts in [Some(&self.service_stats), self.turns.as_ref()].into_iter().flatten() {
                    match counts.ensure(ids) {
                        // The write below says which of the ids is too high.
                        Err(error) if error.raw_os_error() == Some(libc::E2BIG) => {}
                        grown => drop(grown.map_err(|source| Stopped { done: 0, source })?),
                    }
                }
                sys::update(self.names.fd().as_fd(), &keys, &values)
            }
            [Write::NoName(_), ..] => {
                let keys: Vec<_> = run
                    .iter()
                    .filter_map(|w| if let Write::NoName(id) = w { Some(*id) } else { None })
                    .collect();
                // First: without its name, the id is free for another Service, also if the agent ends now.
                self.forget_services(&keys)?;
                sys::delete(self.names.fd().as_fd(), &keys)
            }
            [Write::Backend(..) | Write::NoBackend(..), ..] => self.backends(run),
            [Write::ResetHealth(..), ..] => join::join(&self.health, run),
            [Write::Service(..), ..] => {
                put_services::<[u8; 4]>(&self.services, run)?;
                put_services::<[u8; 16]>(&self.services6, run)
            }
            [Write::NoService(_), ..] => {
                remove_services::<[u8; 4]>(&self.services, run)?;
                remove_services::<[u8; 16]>(&self.services6, run)
            }
            [
                Write::Slots(..)
                | Write::MaglevTable(..)
                | Write::MaglevIndex(..)
                | Write::PrefilterSet(..)
                | Write::PrefilterClear(..),
                ..,
            ] => self.arrays.write(run),
            [
                Write::SourceRange(..)
                | Write::NoSourceRange(..)
                | Write::Node(_)
                | Write::NodeAddr(..)
                | Write::NoNodeAddr(_)
                | Write::Device(..)
                | Write::NoDevice(_)
                | Write::Tunnel(..)
                | Write::Config(_),
                ..,
            ] => self.node.write(run),
        }
    }

    /// Resets the counters of removed Service ports: the next owner of an id starts at 0.
    fn forget_services(&mut self, ids: &[u32]) -> Result<(), Stopped> {
        let stopped = |done| move |source| Stopped { done, source };
        let cpus = nr_cpus().map_err(|(_, source)| source).map_err(stopped(0))?;
        let per = self.service_stats.shape().entries;
        for (number, segment) in self.service_stats.all().iter().enumerate() {
            let here = |id: &&u32| (**id / per) as usize == number;
            let mut here = ids.iter().filter(here).peekable();
            if here.peek().is_none() {
                continue;
            }
            let mut stats = per_cpu(segment.as_fd()).map_err(stopped(0))?;
            for id in here {
                let nothing = vec![ServiceStats::default(); cpus];
                let nothing = PerCpuValues::try_from(nothing).map_err(stopped(0))?;
                stats.set(id % per, nothing, 0).map_err(|error| stopped(0)(io_error(error)))?;
            }
        }
        self.counted.forget_services(ids).map_err(stopped(0))
    }

    fn backends(&self, run: &[Write]) -> Result<(), Stopped> {
        let stopped = |source| Stopped { done: 0, source };
        let new =
            |write: &Write| if let Write::Backend(id, _) = write { Some(*id as usize + 1) } else { None };
        if let Some(ids) = run.iter().filter_map(new).max() {
            // The programs count for an id as soon as a slot has it.
            let tables = [&self.backends, &self.backends6].into_iter().chain(&self.backend_counts);
            for grown in tables.map(|map| map.ensure(ids).map(drop)).chain([self.health.ensure(ids)]) {
                match grown {
                    // The write below says which of the ids is too high.
                    Err(error) if error.raw_os_error() == Some(libc::E2BIG) => {}
                    grown => grown.map_err(stopped)?,
                }
            }
        }
        // As for Services: the next owner of a free id starts at 0, also if the agent ends now.
        let free = |write: &Write| if let Write::NoBackend(id, _) = write { Some(*id) } else { None };
        let free: Vec<u32> = run.iter().filter_map(free).collect();
        self.counted.forget_backends(&free).map_err(stopped)?;
        for counts in &self.backend_counts {
            let forgotten = counts.update(&free, &vec![0_u64; free.len()]);
            forgotten.map_err(|Stopped { source, .. }| stopped(source))?;
        }
        if run.first().map(Write::table) == Some(Table::Backends6) {
            put_backends::<[u8; 16]>(&self.backends6, run)
        } else {
            put_backends::<[u8; 4]>(&self.backends, run)
        }
    }
}

/// Opens `turns`.
fn turns(dir: &Path) -> Result<Option<Segments>, MapError> {
    let is_there = dir.join(map_names::TURNS).symlink_metadata().is_ok();
    is_there.then(|| open_array::<u64>(dir, Table::Names, map_names::TURNS, MapType::Array)).transpose()
}

fn per_cpu(segment: BorrowedFd<'_>) -> io::Result<PerCpuArray<MapData, ServiceStats>> {
    let map = MapData::from_fd(segment.try_clone_to_owned()?).map_err(io_error)?;
    Map::PerCpuArray(map).try_into().map_err(io_error)
}

/// Whether two writes belong to one run.
fn same_run(a: &Write, b: &Write) -> bool {
    let memory = |w: &Write| matches!(w.table(), Table::Slots | Table::Maglev | Table::Prefilter);
    let backend = |w: &Write| matches!(w, Write::Backend(..) | Write::NoBackend(..));
    (memory(a) && memory(b))
        || (a.table() == b.table()
            && (std::mem::discriminant(a) == std::mem::discriminant(b) || (backend(a) && backend(b))))
}

impl Store for KernelStore {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError> {
        let mut services = self.walk(Table::Services, None, u32::MAX)?.0.services;
        services.extend(self.walk(Table::Services6, None, u32::MAX)?.0.services);
        let names = self.walk(Table::Names, None, u32::MAX)?.0.names;
        // A sync writes a port's name before its backends and removes it after them: without names there are no backends to read.
        let backends_below = if names.is_empty() && services.is_empty() { 0 } else { backends_below };
        Ok(Contents {
            services,
            names,
            slots: self.arrays.slots(0..u32::MAX)?,
            maglev: self.arrays.maglev(0..u32::MAX)?,
            backends: self.read_range(Table::Backends, 0..backends_below)?.backends,
            backends6: self.read_range(Table::Backends6, 0..backends_below)?.backends6,
            prefilter: self.arrays.prefilter(0..u32::MAX)?,
            source_ranges: &self.node.source_ranges(Table::SrcRanges, None, u32::MAX)?.0
                | &self.node.source_ranges(Table::SrcRanges6, None, u32::MAX)?.0,
            node: self.node.all()?,
        })
    }

    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError> {
        let mut found = Contents::default();
        match table {
            Table::Slots => found.slots = self.arrays.slots(range)?,
            Table::Maglev => found.maglev = self.arrays.maglev(range)?,
            Table::Prefilter => found.prefilter = self.arrays.prefilter(range)?,
            Table::Backends => found.backends = endpoints::<[u8; 4]>(&self.backends, table, range)?,
            Table::Backends6 => found.backends6 = endpoints::<[u8; 16]>(&self.backends6, table, range)?,
            _ => {}
        }
        Ok(found)
    }

    fn walk(
        &mut self,
        table: Table,
        from: Option<Cursor>,
        count: u32,
    ) -> Result<(Contents, Option<Cursor>), MapError> {
        let mut found = Contents::default();
        let (bucket, range) = match from {
            None => (None, None),
            Some(Cursor::At(bucket)) => (Some(bucket), None),
            Some(Cursor::After(set, range)) => (None, Some((set, range))),
        };
        let next = match table {
            Table::Services => {
                hash::<ServiceKey<[u8; 4]>, _, _>(&self.services, table, bucket, count, &mut found.services)?
            }
            Table::Services6 => hash::<ServiceKey<[u8; 16]>, _, _>(
                &self.services6,
                table,
                bucket,
                count,
                &mut found.services,
            )?,
            Table::Names => hash::<u32, _, _>(&self.names, table, bucket, count, &mut found.names)?,
            Table::SrcRanges | Table::SrcRanges6 => {
                let (ranges, last) = self.node.source_ranges(table, range, count)?;
                found.source_ranges = ranges;
                return Ok((found, last.map(|(set, range)| Cursor::After(set, range))));
            }
            _ if table.is_array() => None,
            _ => {
                found.node = self.node.read(table)?;
                None
            }
        };
        Ok((found, next.map(Cursor::At)))
    }

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        let mut before = 0;
        for run in writes.chunk_by(same_run) {
            if let Err(Stopped { done, source }) = self.run(run) {
                let done = before + done;
                return Err(match writes.get(done) {
                    Some(write) => BatchError { done, error: MapError::of(write, source) },
                    // The kernel never reports a failure after the last write; if it did, the first write of this run is
                    // reported.
                    None => BatchError { done: before, error: MapError::of(&run[0], source) },
                });
            }
            before += run.len();
        }
        Ok(())
    }
}

fn name_of(write: &Write) -> Option<(u32, PortName)> {
    if let Write::Name(id, name) = write { Some((*id, **name)) } else { None }
}

fn service_key<A: MapFamily>(key: &FrontendKey) -> Option<ServiceKey<A>> {
    A::of_ip(key.addr).map(|addr| key.with(addr))
}

fn put_services<A: MapFamily>(map: &MapData, run: &[Write]) -> Result<(), Stopped> {
    let row = |write: &Write| match write {
        Write::Service(key, entry) => Some((service_key::<A>(key)?, *entry)),
        _ => None,
    };
    let (keys, values): (Vec<_>, Vec<_>) = run.iter().filter_map(row).unzip();
    sys::update(map.fd().as_fd(), &keys, &values)
}

fn remove_services<A: MapFamily>(map: &MapData, run: &[Write]) -> Result<(), Stopped> {
    let key = |write: &Write| if let Write::NoService(key) = write { service_key::<A>(key) } else { None };
    let keys: Vec<_> = run.iter().filter_map(key).collect();
    sys::delete(map.fd().as_fd(), &keys)
}

fn put_backends<A: MapFamily>(map: &Segments, run: &[Write]) -> Result<(), Stopped> {
    let row = |write: &Write| match write {
        Write::Backend(id, row) => Some((*id, row.with(A::of_ip(row.addr)?))),
        Write::NoBackend(id, _) => Some((*id, BackendEntry::FREE)),
        _ => None,
    };
    let (keys, values): (Vec<_>, Vec<_>) = run.iter().filter_map(row).unzip();
    map.update(&keys, &values)
}
