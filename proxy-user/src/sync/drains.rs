//! Drain periods of Maglev tables that were replaced.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::maps::{MaglevRow, MaglevTable};

/// The drain period of a previous table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drain {
    since: Instant,
    pub(super) index: u32,
    base: u32,
}

impl Drain {
    /// Whether the row of that index still has this previous table.
    pub(super) fn is_of(&self, row: &MaglevRow) -> bool {
        row.previous.base == self.base
    }
}

/// Drain periods, in the order in which they began.
#[derive(Clone, Debug)]
pub(super) struct Drains {
    begun: VecDeque<Drain>,
    hold: Duration,
    /// So many of the first ones end before their time.
    ended: usize,
}

impl Drains {
    pub(super) fn new(hold: Duration) -> Self {
        Self { begun: VecDeque::new(), hold, ended: 0 }
    }

    /// The table is the previous one of that index from now on.
    pub(super) fn begin(&mut self, index: u32, table: MaglevTable, now: Instant) {
        if table.base != 0 {
            self.begun.push_back(Drain { since: now, index, base: table.base });
        }
    }

    /// When the next one is over.
    pub(super) fn next_over(&self) -> Option<Instant> {
        let hold = if self.ended == 0 { self.hold } else { Duration::ZERO };
        self.begun.front().map(|drain| drain.since + hold)
    }

    /// Ends all of them with the next sync.
    pub(super) fn end_all(&mut self) {
        self.ended = self.begun.len();
    }

    /// Those that are over.
    pub(super) fn over(&self, now: Instant) -> impl Iterator<Item = &Drain> {
        let is_over =
            move |(number, drain): &(usize, &Drain)| *number < self.ended || drain.since + self.hold <= now;
        self.begun.iter().enumerate().take_while(is_over).map(|(_, drain)| drain)
    }

    /// Forgets those of which the rows say nothing any more.
    pub(super) fn forget_done(&mut self, rows: &BTreeMap<u32, MaglevRow>) {
        let is_done = |drain: &mut Drain| !rows.get(&drain.index).is_some_and(|row| drain.is_of(row));
        while self.begun.pop_front_if(is_done).is_some() {
            self.ended = self.ended.saturating_sub(1);
        }
    }
}
