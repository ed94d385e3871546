//! What can go wrong with a map.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::Table;

/// An operation on a map that failed.
#[derive(Debug, Error)]
pub enum MapError {
    /// The pinned map cannot be opened.
    #[error("cannot open map {table} at {}", path.display())]
    Open {
        /// Which one.
        table: Table,
        /// Where its pin should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The pinned map is not the one this agent works with.
    #[error("the map pinned as {table} has {what} {found} instead of {expected}")]
    Shape {
        /// Which one.
        table: Table,
        /// What differs: `key size`, `value size`, `type`.
        what: &'static str,
        /// How it is.
        found: String,
        /// How it should be.
        expected: String,
    },
    /// The table has no room for another entry.
    #[error("map {table} is full: no room for {key}; raise {setting}")]
    Full {
        /// Which one.
        table: Table,
        /// What did not go in.
        key: String,
        /// The flag that makes it larger.
        setting: &'static str,
    },
    /// An entry was not written.
    #[error("map {table}: cannot write {key}")]
    Write {
        /// Which one.
        table: Table,
        /// Which entry.
        key: String,
        /// Why.
        source: io::Error,
    },
    /// An entry was not removed.
    #[error("map {table}: cannot remove {key}")]
    Remove {
        /// Which one.
        table: Table,
        /// Which entry.
        key: String,
        /// Why.
        source: io::Error,
    },
    /// The table cannot be read.
    #[error("cannot read map {table}")]
    Read {
        /// Which one.
        table: Table,
        /// Why.
        source: io::Error,
    },
}

impl MapError {
    /// What the kernel's answer to `write` means.
    pub(super) fn of(write: &super::Write, source: io::Error) -> Self {
        let (table, key) = (write.table(), write.subject());
        match source.raw_os_error() {
            Some(libc::E2BIG) => Self::Full { table, key, setting: table.setting() },
            _ if write.removes() => Self::Remove { table, key, source },
            _ => Self::Write { table, key, source },
        }
    }

    /// The table concerned.
    pub const fn table(&self) -> Table {
        match self {
            Self::Open { table, .. }
            | Self::Shape { table, .. }
            | Self::Full { table, .. }
            | Self::Write { table, .. }
            | Self::Remove { table, .. }
            | Self::Read { table, .. } => *table,
        }
    }
}

/// A list of writes that stopped half way.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct BatchError {
    /// How many were done; the next one failed.
    pub done: usize,
    /// Why it failed.
    #[source]
    pub error: MapError,
}
