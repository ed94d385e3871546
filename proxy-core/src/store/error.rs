//! Errors of operations on maps.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::Table;

/// A failed operation on a map.
#[derive(Debug, Error)]
pub enum MapError {
    /// The pinned map cannot be opened.
    #[error("cannot open map {table} at {}", path.display())]
    Open {
        /// The table of the map.
        table: Table,
        /// Where its pin should be.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The pinned map has another type or size than this agent works with.
    #[error("the map pinned as {table} has {what} {found} instead of {expected}")]
    Shape {
        /// The table of the map.
        table: Table,
        /// What differs: `key size`, `value size`, `type`.
        what: &'static str,
        /// The value of the pinned map.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The table has no room for another entry.
    #[error("map {table} is full: no room for {key}; {}", advice(setting))]
    Full {
        /// The full table.
        table: Table,
        /// The entry that was not added.
        key: String,
        /// The flag that sets the size of the table; empty if its size is fixed.
        setting: &'static str,
    },
    /// An entry was not written.
    #[error("map {table}: cannot write {key}")]
    Write {
        /// The table of the entry.
        table: Table,
        /// The entry, described for users.
        key: String,
        /// The cause.
        source: io::Error,
    },
    /// An entry was not removed.
    #[error("map {table}: cannot remove {key}")]
    Remove {
        /// The table of the entry.
        table: Table,
        /// The entry, described for users.
        key: String,
        /// The cause.
        source: io::Error,
    },
    /// The table cannot be read.
    #[error("cannot read map {table}")]
    Read {
        /// The table that cannot be read.
        table: Table,
        /// The cause.
        source: io::Error,
    },
}

impl MapError {
    /// Returns the error for the kernel's answer to `write`.
    pub fn of(write: &super::Write, source: io::Error) -> Self {
        let (table, key) = (write.table(), write.subject());
        match source.raw_os_error() {
            Some(libc::E2BIG) => Self::Full { table, key, setting: table.setting() },
            _ if write.removes() => Self::Remove { table, key, source },
            _ => Self::Write { table, key, source },
        }
    }

    /// Returns the table concerned.
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

fn advice(setting: &str) -> String {
    if setting.is_empty() { "its size is fixed".to_owned() } else { format!("raise {setting}") }
}

/// A list of writes that failed in the middle.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct BatchError {
    /// Number of writes that were done; the next one failed.
    pub done: usize,
    /// Why it failed.
    #[source]
    pub error: MapError,
}
