//! Array maps that are written without system calls: the agent maps the part that it needs into its memory, for as long as
//! needed.

use std::array;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use super::super::sys::Stopped;
use super::super::windows::{Array, Windows};
use proxy_common::maglev::INDEX_WORDS;
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
        let range = range.start..range.end.min(self.maglev_index.len() as u32 / INDEX_WORDS);
        let words = range.start.saturating_mul(INDEX_WORDS)..range.end.saturating_mul(INDEX_WORDS);
        read(&self.maglev_index, Table::Maglev, words, |array, words| {
            let heads = array.map(words)?;
            let word = |at: u32| heads.word64(at as usize).map_or(0, |word| word.load(Ordering::Acquire));
            let tables = |at: u32| array::from_fn(|number| word(at * INDEX_WORDS + number as u32));
            let used: Vec<_> =
                range.map(|at| (at, tables(at))).filter(|(_, tables)| *tables != [0; _]).collect();
            if used.is_empty() {
                return Ok(BTreeMap::new());
            }
            let (windows, failure) = (RefCell::new(self.maglev.windows()), Cell::new(None));
            let word = |at: u32| {
                // Only a write may let the array grow.
                let at = Some(at as usize).filter(|at| *at < self.maglev.len())?;
                match windows.borrow_mut().at(at..at + 1) {
                    Ok(words) => Some(words.word64(at)?.load(Ordering::Relaxed)),
                    Err(error) => {
                        failure.set(Some(error));
                        None
                    }
                }
            };
            let rows = used.into_iter().map(|(at, tables)| (at, MaglevRow::read(tables, word))).collect();
            failure.take().map_or(Ok(rows), Err)
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
                let range = elements(index.saturating_mul(INDEX_WORDS), INDEX_WORDS as usize);
                let index = self.maglev_index.at(range.clone())?;
                // The words of older tables first: a reader then misses none of those that stay. `Release`: the words of the
                // table were written before.
                for (at, word) in range.zip(row.words()).rev() {
                    index.word64(at).ok_or_else(outside)?.store(word, Ordering::Release);
                }
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

#[cfg(test)]
mod tests {
    use proxy_core::plan::BackendAddress;
    use proxy_core::plan::maglev::{Member, packed, signature};
    use proxy_core::store::MaglevTable;

    use super::*;
    use crate::maps::windows::tests::{array, mapped};

    #[test]
    fn maglev_table_is_read_through_a_window() {
        const LEN: usize = 1 << 20;
        let [slots, prefilter] = ["arrays-slots", "arrays-prefilter"].map(|name| array(name, 8).1);
        let (maglev, maglev_index) = (array("arrays-maglev", LEN).1, array("arrays-index", 1024).1);
        let arrays = Arrays { slots, maglev, maglev_index, prefilter };
        let member = |id: u8| Member {
            at: BackendAddress { address: [10, 0, 0, id].into(), port: 80 },
            weight: 1,
            id: id.into(),
        };
        let members: Vec<_> = (1..9).map(member).collect();
        let (base, words) = (LEN as u32 / 2, packed(&members));
        let table = MaglevTable { base, words: words.len() as u32, signature: signature(&members) };
        let broken = MaglevTable { base: LEN as u32, ..MaglevTable::default() };
        let mut run = vec![
            Write::MaglevTable(base, words),
            Write::MaglevIndex(7, table.into()),
            Write::MaglevIndex(9, broken.into()),
        ];
        // A run that jumps leaves no window.
        run.extend((0..10).map(|part| Write::MaglevTable(1 + 100_000 * part, vec![0])));
        assert!(arrays.write(&run).is_ok());
        assert_eq!(mapped("arrays-maglev"), 0);
        assert_eq!(arrays.maglev(0..1024).unwrap(), BTreeMap::from([(7, table.into()), (9, broken.into())]));
        assert_eq!(arrays.maglev.len(), LEN, "an index outside lets nothing grow");
        assert!((1..=128 * 1024).contains(&mapped("arrays-maglev")), "{}", mapped("arrays-maglev"));
    }
}
