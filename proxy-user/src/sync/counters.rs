//! What was done to the maps since the start.

use std::collections::BTreeMap;

use crate::maps::{Table, Write};

/// What kind of operation it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// An entry was written.
    Write,
    /// An entry was removed, freed or cleared.
    Remove,
}

impl Operation {
    /// The word in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Remove => "remove",
        }
    }
}

/// How often an operation went well and how often not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Done.
    pub done: u64,
    /// Refused by the kernel.
    pub failed: u64,
}

/// Operations by table and kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    counts: BTreeMap<(Table, Operation), Count>,
}

impl Counters {
    /// One that went well. A run of slots is one.
    pub fn done(&mut self, write: &Write) {
        self.of(write).done += 1;
    }

    /// One that did not.
    pub fn failed(&mut self, write: &Write) {
        self.of(write).failed += 1;
    }

    /// Every operation that was ever tried.
    pub fn iter(&self) -> impl Iterator<Item = (Table, Operation, Count)> {
        self.counts.iter().map(|((table, operation), count)| (*table, *operation, *count))
    }

    /// All that went well.
    pub fn total(&self) -> u64 {
        self.counts.values().map(|count| count.done).sum()
    }

    fn of(&mut self, write: &Write) -> &mut Count {
        let operation = if write.removes() { Operation::Remove } else { Operation::Write };
        self.counts.entry((write.table(), operation)).or_default()
    }
}
