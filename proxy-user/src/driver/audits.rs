//! Comparisons of the maps with the mirror.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::Driver;
use crate::driver::status::publish;
use proxy_core::model::net::IpFamily;
use proxy_core::store::{MapError, Store};
use proxy_core::sync::Step;

/// Entries that one piece of a comparison reads: this takes well below a millisecond, and an event waits for one piece at
/// most.
pub(super) const PIECE: u32 = 1024;
/// Pause between two pieces, so that a comparison never occupies a CPU.
const BETWEEN_PIECES: Duration = Duration::from_millis(1);

impl<S: Store> Driver<S> {
    /// Runs the next piece of the comparison, or the first piece of a new one. Repairs differences at once.
    pub(super) fn audit(&mut self, now: Instant) {
        if self.next_piece.take().is_none() {
            self.next_audit = now + self.settings.sync_period;
        }
        let result = match self.reconciler.audit_step(PIECE) {
            Ok(Step::More) => {
                self.next_piece = Some(Instant::now() + BETWEEN_PIECES);
                return;
            }
            Ok(Step::Clean) => Ok(0),
            Ok(Step::Differs) => self.reconciler.audit(now.into_std()),
            Err(error) => Err(error),
        };
        self.note_audit(now, &result);
    }

    /// Compares all entries at once, and repairs those that differ.
    pub(super) fn repair(&mut self, now: Instant) {
        self.next_piece = None;
        let result = self.reconciler.audit(now.into_std());
        self.note_audit(now, &result);
    }

    fn note_audit(&mut self, now: Instant, result: &Result<usize, MapError>) {
        if let Err(error) = result {
            tracing::warn!(%error, "cannot compare the maps with what was written to them");
        }
        self.is_unreadable = result.is_err();
        let drift = result.as_ref().copied().unwrap_or(0);
        if drift > 0 {
            tracing::warn!(entries = drift, "the maps were changed externally; repairing them");
        }
        let failing = self.failing_families();
        publish(&self.status, |status| {
            status.note_failing(&failing, SystemTime::now());
            status.audits += 1;
            status.audit_failures += u64::from(result.is_err());
            status.drift += drift as u64;
        });
        if drift > 0 {
            self.sync(now, true);
        }
    }

    /// Returns the families that are not programmed ([`Reconciler::failing_families`](proxy_core::sync::Reconciler)); both while the maps cannot be read.
    pub(super) fn failing_families(&self) -> BTreeSet<IpFamily> {
        if self.is_unreadable {
            return BTreeSet::from([IpFamily::V4, IpFamily::V6]);
        }
        self.reconciler.failing_families()
    }
}
