//! The tables in the memory of this process, without a kernel.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};
use std::{io, iter};

use proxy_common::prefilter::PREFILTER_WORDS;

use super::{
    Backend, BatchError, Capacity, Contents, Cursor, FrontendKey, MaglevRow, MapError, NodeContents, Store,
    Table, Write,
};

/// Number of buckets. As in the kernel, a hash is walked by buckets: an entry stays in its bucket while others come and go.
const BUCKETS: u32 = 64;

/// Called after each step with the state that a reader of the maps would see.
pub type Watcher = Box<dyn FnMut(&Contents, &Write) + Send>;

/// Tables in memory, with the capacities and the errors of the kernel's.
pub struct MemoryStore {
    capacity: Capacity,
    contents: Contents,
    /// The Maglev tables that were written, by their first words.
    tables: BTreeMap<u32, Vec<u64>>,
    /// Endpoints that joined their Service, by id, with the endpoints that were there before.
    joined: BTreeMap<u32, Vec<u32>>,
    watcher: Option<Watcher>,
    steps: u64,
}

impl MemoryStore {
    /// Creates empty tables.
    pub fn new(capacity: Capacity) -> Self {
        let contents = Contents {
            slots: vec![0; capacity.slots as usize],
            prefilter: vec![0; PREFILTER_WORDS as usize],
            node: NodeContents::unknown(),
            ..Contents::default()
        };
        Self::with_contents(capacity, contents)
    }

    /// Creates tables with these contents.
    pub fn with_contents(capacity: Capacity, contents: Contents) -> Self {
        Self { capacity, contents, tables: BTreeMap::new(), joined: BTreeMap::new(), watcher: None, steps: 0 }
    }

    /// Sets a watcher, which gets every intermediate state. A run of slots is one step for each slot.
    pub fn watch(&mut self, watcher: Watcher) {
        self.watcher = Some(watcher);
    }

    /// The contents of the tables.
    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Mutable access to the contents, for changes like those by another tool.
    pub fn contents_mut(&mut self) -> &mut Contents {
        &mut self.contents
    }

    /// Endpoints that joined their Service, with those that served before, by id.
    pub fn joined(&self) -> &BTreeMap<u32, Vec<u32>> {
        &self.joined
    }

    /// Number of steps done so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    fn seen(&mut self, step: &Write) {
        self.steps += 1;
        if let Some(watcher) = &mut self.watcher {
            watcher(&self.contents, step);
        }
    }

    fn frontends(&self, table: Table) -> usize {
        self.contents.services.keys().filter(|key| Table::services(key.addr) == table).count()
    }

    fn room_for(&self, key: &FrontendKey) -> bool {
        self.contents.services.contains_key(key)
            || self.frontends(Table::services(key.addr)) < self.capacity.frontends as usize
    }

    fn one(&mut self, write: &Write) -> Result<(), i32> {
        match write {
            Write::Name(id, name) => {
                let names = &mut self.contents.names;
                if !names.contains_key(id) && names.len() >= self.capacity.services as usize {
                    return Err(libc::E2BIG);
                }
                names.insert(*id, **name);
            }
            Write::NoName(id) => {
                self.contents.names.remove(id);
            }
            Write::Backend(id, row) => {
                if *id >= self.capacity.backends {
                    return Err(libc::E2BIG);
                }
                self.backends(write.table()).insert(*id, *row);
            }
            Write::ResetHealth(id, _, others) => {
                self.joined.insert(*id, others.to_vec());
                // Health is not part of the contents.
                return Ok(());
            }
            Write::NoBackend(id, table) => {
                self.backends(*table).remove(id);
            }
            Write::Slots(base, ids) => {
                let base = *base as usize;
                if self.contents.slots.get(base..base + ids.len()).is_none() {
                    return Err(libc::E2BIG);
                }
                for (position, id) in ids.iter().enumerate() {
                    if let Some(slot) = self.contents.slots.get_mut(base + position) {
                        *slot = *id;
                    }
                    self.seen(write);
                }
                return Ok(());
            }
            Write::MaglevTable(base, words) => {
                if *base as usize + words.len() > self.capacity.maglev as usize {
                    return Err(libc::E2BIG);
                }
                let end = base + words.len() as u32;
                self.tables.retain(|at, old| *at >= end || at + old.len() as u32 <= *base);
                self.tables.insert(*base, words.clone());
            }
            Write::MaglevIndex(index, row) if row.is_empty() => drop(self.contents.maglev.remove(index)),
            Write::MaglevIndex(index, row) => {
                let word = |at: u32| {
                    let (base, words) = self.tables.range(..=at).next_back()?;
                    words.get((at - base) as usize).copied()
                };
                let mut now = MaglevRow::read(row.words(), word);
                let old = self.contents.maglev.get(index).cloned().unwrap_or_default();
                // The words of a table that was there from the start are not known: keep its old row.
                for table in iter::once(&mut now.current).chain(&mut now.previous) {
                    let known = old.tables().find(|old| old.base == table.base);
                    *table = *known.filter(|_| !self.tables.contains_key(&table.base)).unwrap_or(table);
                }
                self.contents.maglev.insert(*index, now);
            }
            Write::Service(key, entry) => {
                if !self.room_for(key) {
                    return Err(libc::E2BIG);
                }
                self.contents.services.insert(*key, *entry);
            }
            Write::NoService(key) => {
                self.contents.services.remove(key);
            }
            Write::PrefilterSet(word, mask) => *self.word(*word)? |= mask,
            Write::PrefilterClear(word, mask) => *self.word(*word)? &= !mask,
            Write::SourceRange(id, range) => {
                let ranges = &mut self.contents.source_ranges;
                let of_table = |(_, other): &&(u32, _)| Table::source_ranges(*other) == write.table();
                let is_full = || ranges.iter().filter(of_table).count() >= self.capacity.ranges as usize;
                if !ranges.contains(&(*id, *range)) && is_full() {
                    return Err(libc::E2BIG);
                }
                ranges.insert((*id, *range));
            }
            Write::NoSourceRange(id, range) => drop(self.contents.source_ranges.remove(&(*id, *range))),
            Write::Node(row) => drop(self.contents.node.rows.insert(row.table(), (**row).clone())),
            Write::NodeAddr(address, bits) => drop(self.contents.node.addresses.insert(*address, *bits)),
            Write::NoNodeAddr(address) => drop(self.contents.node.addresses.remove(address)),
            Write::Device(index, bits) => drop(self.contents.node.devices.insert(*index, *bits)),
            Write::NoDevice(index) => drop(self.contents.node.devices.remove(index)),
            Write::Tunnel(number, Some(row)) => drop(self.contents.node.tunnels.insert(*number, *row)),
            Write::Tunnel(number, None) => drop(self.contents.node.tunnels.remove(number)),
            Write::Config(row) => self.contents.node.config = **row,
        }
        self.seen(write);
        Ok(())
    }

    fn backends(&mut self, table: Table) -> &mut BTreeMap<u32, Backend> {
        if table == Table::Backends6 { &mut self.contents.backends6 } else { &mut self.contents.backends }
    }

    fn word(&mut self, word: u32) -> Result<&mut u64, i32> {
        self.contents.prefilter.get_mut(word as usize).ok_or(libc::E2BIG)
    }
}

impl Store for MemoryStore {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError> {
        let mut contents = self.contents.clone();
        contents.backends.retain(|id, _| *id < backends_below);
        contents.backends6.retain(|id, _| *id < backends_below);
        Ok(contents)
    }

    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError> {
        fn part<T: Copy>(of: &[T], range: &Range<u32>) -> Vec<T> {
            let end = of.len().min(range.end as usize);
            of.get(range.start as usize..end).unwrap_or_default().to_vec()
        }
        let rows =
            |of: &BTreeMap<u32, Backend>| of.range(range.clone()).map(|(id, row)| (*id, *row)).collect();
        let mut found = Contents::default();
        match table {
            Table::Slots => found.slots = part(&self.contents.slots, &range),
            Table::Maglev => {
                found.maglev =
                    self.contents.maglev.range(range).map(|(index, row)| (*index, row.clone())).collect();
            }
            Table::Prefilter => found.prefilter = part(&self.contents.prefilter, &range),
            Table::Backends => found.backends = rows(&self.contents.backends),
            Table::Backends6 => found.backends6 = rows(&self.contents.backends6),
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
        if !matches!(table, Table::Services | Table::Services6 | Table::Names) {
            let Contents { source_ranges, node, .. } = &self.contents;
            let inside = |(_, range): &&(u32, _)| Table::source_ranges(*range) == table;
            let first = match from {
                Some(Cursor::After(id, range)) => Bound::Excluded((id, range)),
                _ => Bound::Unbounded,
            };
            let mut left = source_ranges.range((first, Bound::Unbounded)).filter(inside).copied();
            found.source_ranges = left.by_ref().take(count as usize).collect();
            found.node = node.of(table);
            let last = found.source_ranges.last().filter(|_| left.next().is_some());
            let next = last.map(|(id, range)| Cursor::After(*id, *range));
            return Ok((found, next));
        }
        let first = if let Some(Cursor::At(bucket)) = from { bucket } else { 0 };
        for bucket in first..BUCKETS {
            if table == Table::Names {
                found.names.extend(self.contents.names.iter().filter(|(id, _)| **id % BUCKETS == bucket));
            } else {
                let inside =
                    |key: &FrontendKey| Table::services(key.addr) == table && key.tag() % BUCKETS == bucket;
                found.services.extend(self.contents.services.iter().filter(|(key, _)| inside(key)));
            }
            if found.names.len() + found.services.len() >= count as usize && bucket + 1 < BUCKETS {
                return Ok((found, Some(Cursor::At(bucket + 1))));
            }
        }
        Ok((found, None))
    }

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        for (done, write) in writes.iter().enumerate() {
            self.one(write).map_err(|errno| BatchError {
                done,
                error: MapError::of(write, io::Error::from_raw_os_error(errno)),
            })?;
        }
        Ok(())
    }
}
