//! Array maps that are written without system calls: the agent maps the part that it needs into its memory, for as long as
//! needed.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use super::super::sys::Stopped;
use super::super::windows::{Array, Windows};
use proxy_core::store::{MaglevRow, MapError, Table, Write};

/// The array maps that are written through memory.
pub(super) struct Arrays {
    pub slots: Array,
    pub maglev: Array,
    pub maglev_index: Array,
    pub prefilter: Array,
}

impl Arrays {
    /// Does the writes of one run; an error tells how many of them were done.
    pub fn write(&self, run: &[Write]) -> Result<(), Stopped> {
        let mut memory = Memory {
            slots: self.slots.windows(),
            maglev: self.maglev.windows(),
            maglev_index: self.maglev_index.windows(),
            prefilter: self.prefilter.windows(),
        };
        for (done, write) in run.iter().enumerate() {
            memory.one(write).map_err(|source| Stopped { done, source })?;
        }
        // The entries that refer to these slots and bits are written later: no reader may see such an entry before the slots
        // and bits.
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Reads those slots of a range that exist.
    pub fn slots(&self, range: Range<u32>) -> Result<Vec<u32>, MapError> {
        read(&self.slots, Table::Slots, range, |array, range| Ok(array.map(range.clone())?.range32(range)))
    }

    /// Reads those words of the prefilter in a range that exist.
    pub fn prefilter(&self, range: Range<u32>) -> Result<Vec<u64>, MapError> {
        read(&self.prefilter, Table::Prefilter, range, |array, range| {
            Ok(array.map(range.clone())?.range64(range))
        })
    }

    /// Reads the Maglev tables with these indexes.
    pub fn maglev(&self, range: Range<u32>) -> Result<BTreeMap<u32, MaglevRow>, MapError> {
        read(&self.maglev_index, Table::Maglev, range, |array, range| {
            let heads = array.map(range.clone())?;
            let tables = |at: usize| heads.word64(at).map_or(0, |word| word.load(Ordering::Acquire));
            let used: Vec<_> = range.map(|at| (at, tables(at))).filter(|(_, tables)| *tables != 0).collect();
            if used.is_empty() {
                return Ok(BTreeMap::new());
            }
            let words = self.maglev.map_all()?;
            let word = |at: u32| Some(words.word64(at as usize)?.load(Ordering::Relaxed));
            Ok(used.into_iter().map(|(at, tables)| (at as u32, MaglevRow::read(tables, word))).collect())
        })
    }
}

/// The mapped parts of the arrays, during one run.
struct Memory<'a> {
    slots: Windows<'a>,
    maglev: Windows<'a>,
    maglev_index: Windows<'a>,
    prefilter: Windows<'a>,
}

impl Memory<'_> {
    fn one(&mut self, write: &Write) -> io::Result<()> {
        let outside = || io::Error::from_raw_os_error(libc::E2BIG);
        match write {
            Write::Slots(base, ids) => {
                let range = elements(*base, ids.len());
                let slots = self.slots.at(range.clone())?;
                for (slot, id) in range.zip(ids) {
                    slots.word32(slot, 0).ok_or_else(outside)?.store(*id, Ordering::Relaxed);
                }
            }
            Write::MaglevTable(base, words) => {
                let range = elements(*base, words.len());
                let maglev = self.maglev.at(range.clone())?;
                for (at, word) in range.zip(words) {
                    maglev.word64(at).ok_or_else(outside)?.store(*word, Ordering::Relaxed);
                }
            }
            Write::MaglevIndex(index, row) => {
                let range = elements(*index, 1);
                let index = range.start;
                let word = self.maglev_index.at(range)?.word64(index).ok_or_else(outside)?;
                // `Release`: the words of the table were written before.
                word.store(row.word(), Ordering::Release);
            }
            Write::PrefilterSet(word, mask) | Write::PrefilterClear(word, mask) => {
                let range = elements(*word, 1);
                let index = range.start;
                let word = self.prefilter.at(range)?.word64(index).ok_or_else(outside)?;
                if matches!(write, Write::PrefilterSet(..)) {
                    word.fetch_or(*mask, Ordering::Relaxed);
                } else {
                    word.fetch_and(!*mask, Ordering::Relaxed);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn elements(base: u32, len: usize) -> Range<usize> {
    base as usize..(base as usize).saturating_add(len)
}

/// Calls `read` for those elements of a range that exist; returns the default value if there are none.
fn read<T: Default>(
    array: &Array,
    table: Table,
    range: Range<u32>,
    read: impl FnOnce(&Array, Range<usize>) -> io::Result<T>,
) -> Result<T, MapError> {
    let range = range.start as usize..array.len().min(range.end as usize);
    if range.is_empty() {
        return Ok(T::default());
    }
    read(array, range).map_err(|source| MapError::Read { table, source })
}
