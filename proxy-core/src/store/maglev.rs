//! Maglev tables in the maps, as far as the agent reads them.

use std::array;

use proxy_common::maglev;

/// A table in `maglev`, as described by its header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaglevTable {
    /// Its first word; 0 if there is no table.
    pub base: u32,
    /// Its number of words; 0 if the table is not as it was written, and cannot be used.
    pub words: u32,
    /// Differs from that of tables of other endpoints ([`plan::maglev::signature`](crate::plan::maglev::signature)).
    pub signature: u64,
}

/// An element of `maglev_index`: the tables of a Service port and policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaglevRow {
    /// The table for new connections.
    pub current: MaglevTable,
    /// The tables before it, the newest first, at most [`PREVIOUS`]: TCP segments without a flow have another chance with them.
    pub previous: Vec<MaglevTable>,
}

impl From<MaglevTable> for MaglevRow {
    fn from(current: MaglevTable) -> Self {
        Self { current, ..Self::default() }
    }
}

/// The most previous tables of a row.
pub const PREVIOUS: usize = maglev::TABLES as usize - 1;

impl MaglevRow {
    /// Returns all tables, the current one first.
    pub fn tables(&self) -> impl Iterator<Item = &MaglevTable> {
        std::iter::once(&self.current).chain(&self.previous)
    }

    /// Whether the row refers to no table.
    pub fn is_empty(&self) -> bool {
        self.tables().all(|table| table.base == 0)
    }

    /// Returns the words of the element of `maglev_index`.
    pub fn words(&self) -> [u64; maglev::INDEX_WORDS as usize] {
        let base = |number: usize| self.tables().nth(number).map_or(0, |table| table.base);
        array::from_fn(|word| maglev::index_of([base(2 * word), base(2 * word + 1)]))
    }

    /// Reads the tables of the element with these words; `word` returns a word of `maglev`.
    pub fn read(index: [u64; maglev::INDEX_WORDS as usize], word: impl Fn(u32) -> Option<u64>) -> Self {
        let bases = index.iter().flat_map(|word| [0, 1].map(|number| maglev::base_in(*word, number)));
        let mut tables = bases.map(|base| MaglevTable::read(base, &word));
        let current = tables.next().unwrap_or_default();
        Self { current, previous: tables.filter(|table| table.base != 0).collect() }
    }

    /// Returns the row after its table was replaced by `current`: the replaced one is the newest of the previous tables. A
    /// table without words counts as none.
    #[must_use]
    pub fn replaced(&self, current: MaglevTable) -> Self {
        let is_kept = |table: &&MaglevTable| table.words != 0 && table.base != current.base;
        Self { current, previous: self.tables().filter(is_kept).take(PREVIOUS).copied().collect() }
    }
}

impl MaglevTable {
    /// Reads the table at `base`; `word` returns a word of `maglev`.
    fn read(base: u32, word: impl Fn(u32) -> Option<u64>) -> Self {
        if base == 0 {
            return Self::default();
        }
        let broken = Self { base, words: 0, signature: 0 };
        let at = |offset: u32| base.checked_add(offset).and_then(&word);
        let (Some(first), Some(signature), Some(sum)) = (at(0), at(1), at(2)) else { return broken };
        let (size, backends) = maglev::size_and_backends(first);
        if size == 0 || backends == 0 || backends > maglev::MAX_BACKENDS || size != maglev::size(backends) {
            return broken;
        }
        let words = maglev::words(size, backends);
        if at(words - 1).is_none() || maglev::checksum((maglev::HEADER..words).map_while(at)) != sum {
            return broken;
        }
        Self { base, words, signature }
    }
}
