//! Writes to the maps, and updates the mirror, the counters and the comparison in progress after each write.

use std::collections::BTreeMap;
use std::time::Instant;

use proxy_common::PROTO_UDP;
use proxy_common::backend::{BACKEND_GONE, BACKEND_RESET};

use super::applied::{Applied, QuarantinePeriods};
use super::audit::Audit;
use super::job::{Job, Owner, Steps};
use super::removal::Removals;
use super::shares::Reserve;
use crate::store::{BatchError, Store, Table, Write};

/// Maximum number of writes in one call of the store.
const MOST_AT_ONCE: usize = 1 << 14;

/// The maps and their mirror.
#[derive(Debug)]
pub(super) struct Writer<S> {
    pub(super) store: S,
    pub(super) applied: Applied,
    pub(super) counters: Counters,
    /// Endpoints whose connections are to be reset.
    pub(super) removals: Removals,
    /// The comparison in progress.
    pub(super) audit: Option<Audit>,
    /// What is left of the tables for namespaces that use little, in the current sync.
    pub(super) reserve: Reserve,
    /// The number of the current sync.
    pub(super) number: u64,
}

impl<S: Store> Writer<S> {
    /// Creates a writer whose mirror is empty.
    pub(super) fn new(store: S, quarantine: QuarantinePeriods) -> Self {
        let applied = Applied::new(store.capacity(), quarantine);
        Self {
            store,
            applied,
            removals: Removals::default(),
            counters: Counters::default(),
            audit: None,
            reserve: Reserve::default(),
            number: 0,
        }
    }

    /// Does writes that belong to no Service port. A failure does not stop the others; the returned job has the first
    /// error.
    pub(super) fn write_without_port(&mut self, steps: &Steps, now: Instant) -> Job {
        let mut jobs = [Job::new(Owner::NoPort)];
        self.execute(steps, &mut jobs, true, now);
        let [job] = jobs;
        job
    }

    /// Does the writes of a phase. A failure stops its job: later writes of this job in `steps` are skipped, unless
    /// `each_alone`.
    pub(super) fn execute(&mut self, steps: &Steps, jobs: &mut [Job], each_alone: bool, now: Instant) {
        let Steps { owners, writes } = steps;
        let (mut from, mut most) = (0, MOST_AT_ONCE);
        while from < writes.len() {
            let blocked = |at: usize| !each_alone && jobs[owners[at]].stopped;
            if blocked(from) {
                from += 1;
                continue;
            }
            let last = writes.len().min(from + most);
            let end = (from + 1..last).find(|at| blocked(*at)).unwrap_or(last);
            let run = &writes[from..end];
            let (done, error) = match self.store.write(run) {
                Ok(()) => (run.len(), None),
                Err(BatchError { done, error }) => (done.min(run.len() - 1), Some(error)),
            };
            for write in &run[..done] {
                self.counters.done(write);
                self.applied.advance(write, now, self.number);
                if let Some(audit) = &mut self.audit {
                    audit.note(write);
                }
            }
            from += done;
            // In a full table most writes fail: each costs as much as the run that it ends.
            most = if error.is_some() { 1 } else { MOST_AT_ONCE.min(most * 2) };
            if let Some(error) = error {
                self.counters.failed(&writes[from]);
                jobs[owners[from]].stop(error);
                from += 1;
            }
        }
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// An entry was written.
    Write,
    /// An entry was removed, freed or cleared.
    Remove,
}

impl Operation {
    /// Returns the label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Remove => "remove",
        }
    }
}

/// The numbers of successful and failed operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Successful operations.
    pub done: u64,
    /// Operations that the kernel refused.
    pub failed: u64,
}

/// Counts of operations, by table and kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    counts: BTreeMap<(Table, Operation), Count>,
    udp_left: u64,
    resets: u64,
}

impl Counters {
    /// Counts a successful write. A run of slots is one write.
    pub fn done(&mut self, write: &Write) {
        self.of(write).done += 1;
        let left = |state, proto| state == BACKEND_GONE && proto == PROTO_UDP;
        self.udp_left += u64::from(matches!(write, Write::Backend(_, row) if left(row.state, row.proto)));
        self.resets += u64::from(matches!(write, Write::Backend(_, row) if row.state == BACKEND_RESET));
    }

    /// Returns how many endpoints were marked to have their connections reset.
    pub fn resets(&self) -> u64 {
        self.resets
    }

    /// Returns how many UDP endpoints were removed from their Service.
    pub fn udp_left(&self) -> u64 {
        self.udp_left
    }

    /// Counts a failed write.
    pub fn failed(&mut self, write: &Write) {
        self.of(write).failed += 1;
    }

    /// Returns the counts of every operation that was ever tried.
    pub fn iter(&self) -> impl Iterator<Item = (Table, Operation, Count)> {
        self.counts.iter().map(|((table, operation), count)| (*table, *operation, *count))
    }

    /// Returns the number of all successful operations.
    pub fn total(&self) -> u64 {
        self.counts.values().map(|count| count.done).sum()
    }

    fn of(&mut self, write: &Write) -> &mut Count {
        let operation = if write.removes() { Operation::Remove } else { Operation::Write };
        self.counts.entry((write.table(), operation)).or_default()
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::PROTO_TCP;
    use proxy_common::backend::BACKEND_ACTIVE;

    use super::*;
    use crate::store::{Backend, Faults, FaultyStore, MemoryStore};
    use crate::sync::tests::ROOMY;

    #[test]
    fn many_writes_that_fail_are_each_handed_over_a_few_times() {
        const WRITES: u32 = 100_000;
        let faults = Faults { from: Some(1000), full: true, ..Faults::default() };
        let store = FaultyStore::new(MemoryStore::new(ROOMY), faults);
        let mut writer = Writer::new(store, QuarantinePeriods::default());
        let mut steps = Steps::default();
        (0..WRITES).for_each(|id| steps.push(0, Write::NoName(id)));
        writer.write_without_port(&steps, Instant::now());
        let handed = writer.store.handed();
        assert!(handed < 2 * WRITES as usize, "{handed}");
    }

    #[test]
    fn only_udp_endpoints_that_left_count_as_such() {
        let mut counters = Counters::default();
        let mut row = |proto, state| {
            let addr = std::net::IpAddr::from([10, 0, 0, 1]);
            counters.done(&Write::Backend(1, Backend { addr, port: 53, proto, state, service: 1, flags: 0 }));
            counters.udp_left()
        };
        let seen = [(PROTO_UDP, BACKEND_ACTIVE), (PROTO_TCP, BACKEND_GONE), (PROTO_UDP, BACKEND_GONE)]
            .map(|(proto, state)| row(proto, state));
        assert_eq!(seen, [0, 0, 1]);
    }
}
