//! Marks the rows of removed endpoints whose delay is over, so that connections to them are reset.
//!
//! Every process that resets connections finds these endpoints by the state [`BACKEND_RESET`]. A row keeps its endpoint
//! until then; its quarantine restarts when it is marked.

use std::time::{Duration, Instant};

use proxy_common::PROTO_TCP;
use proxy_common::backend::{BACKEND_GONE, BACKEND_RESET};

use super::job::{Job, Steps};
use super::writer::Writer;
use crate::store::{Backend, Store, Write};

/// Pause between a failed write and the next try.
const RETRY: Duration = Duration::from_secs(1);

impl<S: Store> Writer<S> {
    /// Records the removal policies of the jobs' ports, and which of their endpoints were removed. If the policy of a port
    /// became `drain`, its marked rows get the state [`BACKEND_GONE`] again.
    pub(super) fn note_removals(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        for (number, job) in jobs.iter().enumerate() {
            let Some(service) = job.id else { continue };
            if let Some(wanted) = &job.wanted {
                self.removals.set(service, wanted.reset_after);
            }
            let resets = self.removals.delays.contains_key(&service);
            for (key, id) in self.applied.endpoints_of(service) {
                let row = self.applied.backends.get(id).filter(|row| row.proto == PROTO_TCP);
                match row.map(|row| row.state) {
                    Some(BACKEND_GONE) if resets => {
                        self.removals.left.entry(id).or_insert((key, now));
                    }
                    // The policy of a port that was removed before this agent was started is not known.
                    Some(BACKEND_RESET) if !resets && job.wanted.is_some() => {
                        steps.writes.extend(row.map(|row| gone(id, row)));
                        steps.owners.push(number);
                    }
                    _ => drop(self.removals.left.remove(&id)),
                }
            }
        }
        self.execute(&steps, jobs, true, now);
    }

    /// Marks the endpoints whose delay is over with [`BACKEND_RESET`].
    pub(super) fn reset_due(&mut self, now: Instant) {
        let due = self.removals.due(now);
        if due.is_empty() {
            return;
        }
        let mut steps = Steps::default();
        for (id, _) in &due {
            if let Some(row) = self.applied.backends.get(*id).filter(|row| row.state == BACKEND_GONE) {
                steps.push(0, Write::Backend(*id, Backend { state: BACKEND_RESET, ..*row }));
            }
        }
        let job = self.write_without_port(&steps, now);
        if let Some(error) = job.cause.as_ref().filter(|_| self.removals.retry.is_none()) {
            tracing::warn!(%error, "cannot reset connections to removed endpoints; retrying every second");
        }
        self.removals.retry = job.cause.map(|_| now + RETRY);
        for (id, key) in due {
            // An endpoint whose write failed stays in the list; one that is in use again, or whose id is free, needs no
            // reset.
            if self.applied.backends.get(id).is_none_or(|row| row.state != BACKEND_GONE) {
                self.removals.left.remove(&id);
                self.applied.endpoints.restart_quarantine(&key, now, self.number);
            }
        }
    }
}

fn gone(id: u32, row: &Backend) -> Write {
    Write::Backend(id, Backend { state: BACKEND_GONE, ..*row })
}
