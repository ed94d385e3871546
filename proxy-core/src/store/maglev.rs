//! Maglev tables in the maps, as far as the agent reads them.

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaglevRow {
    /// The table for new connections.
    pub current: MaglevTable,
    /// The previous table, until its drain period is over: TCP segments without a flow have a second chance with it.
    pub previous: MaglevTable,
}

impl From<MaglevTable> for MaglevRow {
    fn from(current: MaglevTable) -> Self {
        Self { current, ..Self::default() }
    }
}

impl MaglevRow {
    /// Returns the element of `maglev_index`.
    pub fn word(&self) -> u64 {
        maglev::tables(self.current.base, self.previous.base)
    }

    /// Reads the tables of the element `tables`; `word` returns a word of `maglev`.
    pub fn read(tables: u64, word: impl Fn(u32) -> Option<u64>) -> Self {
        let read = |base| MaglevTable::read(base, &word);
        Self { current: read(maglev::current(tables)), previous: read(maglev::previous(tables)) }
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
