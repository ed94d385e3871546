//! Writes, and what they leave: the mirror, the counts, and what a comparison under way has to know.

use std::collections::BTreeMap;
use std::time::Instant;

use proxy_common::PROTO_UDP;
use proxy_common::backend::{BACKEND_GONE, BACKEND_RESET};

use super::applied::{Applied, QuarantinePeriods};
use super::audit::Audit;
use super::job::{Job, Owner, Steps};
use super::removal::Removals;
use crate::maps::{BatchError, Store, Table, Write};

/// The maps, and what they hold as far as we know.
#[derive(Debug)]
pub(super) struct Writer<S> {
    pub(super) store: S,
    pub(super) applied: Applied,
    pub(super) counters: Counters,
    /// Which connections are to be reset.
    pub(super) removals: Removals,
    /// The comparison under way.
    pub(super) audit: Option<Audit>,
    /// The number of the sync.
    pub(super) number: u64,
}

impl<S: Store> Writer<S> {
    /// To tables that are not known yet.
    pub(super) fn new(store: S, holds: QuarantinePeriods) -> Self {
        let applied = Applied::new(store.capacity(), holds);
        Self {
            store,
            applied,
            removals: Removals::default(),
            counters: Counters::default(),
            audit: None,
            number: 0,
        }
    }

    /// Does writes that belong to no port, each whatever becomes of the others.
    pub(super) fn upkeep(&mut self, steps: &Steps, now: Instant) -> Job {
        let mut jobs = [Job::new(Owner::Upkeep)];
        self.execute(steps, &mut jobs, true, now);
        let [job] = jobs;
        job
    }

    /// Does the writes of a phase. A failure stops the job concerned: its later writes in `steps` are left out,
    /// unless `each_alone`.
    pub(super) fn execute(&mut self, steps: &Steps, jobs: &mut [Job], each_alone: bool, now: Instant) {
        let Steps { owners, writes } = steps;
        let mut from = 0;
        while from < writes.len() {
            let blocked = |at: usize| !each_alone && jobs[owners[at]].stopped;
            if blocked(from) {
                from += 1;
                continue;
            }
            let end = (from + 1..writes.len()).find(|at| blocked(*at)).unwrap_or(writes.len());
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
            if let Some(error) = error {
                self.counters.failed(&writes[from]);
                jobs[owners[from]].stop(error);
                from += 1;
            }
        }
    }
}

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
    udp_left: u64,
    resets: u64,
}

impl Counters {
    /// One that went well. A run of slots is one.
    pub fn done(&mut self, write: &Write) {
        self.of(write).done += 1;
        let left = |state, proto| state == BACKEND_GONE && proto == PROTO_UDP;
        self.udp_left += u64::from(matches!(write, Write::Backend(_, row) if left(row.state, row.proto)));
        self.resets += u64::from(matches!(write, Write::Backend(_, row) if row.state == BACKEND_RESET));
    }

    /// Endpoints to which connections are reset.
    pub fn resets(&self) -> u64 {
        self.resets
    }

    /// UDP endpoints that left their Service.
    pub fn udp_left(&self) -> u64 {
        self.udp_left
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

#[cfg(test)]
mod tests {
    use proxy_common::PROTO_TCP;
    use proxy_common::backend::BACKEND_ACTIVE;

    use super::*;
    use crate::maps::Backend;

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
