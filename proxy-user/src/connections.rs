//! Corrects the counts of open connections, which the algorithms `lc`, `wlc`, `sed`, `nq` and `latency` use.
//!
//! The programs count correctly only while they see how connections end. A flow that expires ends without a packet. Sockets of
//! the kernel itself are closed without a hook, and a hook may have been removed for a while. So the agent removes expired flows
//! from the counts, and compares the other flows and the counted sockets with the counts of the programs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::driver::Status;
use crate::maps::view::{Counted, View, ViewError};
use crate::programs::Programs;
use crate::sockets::{Iterators, SweepError};

/// The interval of recounts. Each recount visits all flows and sockets, which takes milliseconds.
const PERIOD: Duration = Duration::from_secs(10);
/// The interval after the start, and until differences have been confirmed.
const FIRST_PERIOD: Duration = Duration::from_secs(1);
/// How many recounts have to find the same difference, or one that grows: a connection that begins or ends during a recount also
/// causes one.
const CONFIRMATIONS: u32 = 3;

/// Why a recount failed.
#[derive(Debug, thiserror::Error)]
enum CountError {
    #[error("cannot read the counts: {0}")]
    Maps(#[from] ViewError),
    #[error("cannot list the counted sockets: {0}")]
    Sockets(#[from] SweepError),
}

/// The smallest difference that may grow: smaller ones are connections that begin and end during the recounts.
const GROWS: i64 = 16;

/// A difference of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Difference {
    /// What was missing at the first recount.
    first: i64,
    /// What was missing at the last one.
    last: i64,
    /// How many recounts in a row have found it.
    samples: u32,
}

impl Difference {
    /// Returns the difference after another recount.
    fn after(before: Option<&Self>, missing: i64) -> Self {
        let goes_on = |before: &&Self| {
            // Each connection of MPTCP leaks: `connect` runs for its first subflow, and the release for another socket.
            let grows = before.first.signum() == missing.signum()
                && before.first.abs() >= GROWS
                && missing.abs() >= before.last.abs();
            missing == before.last && before.first == missing || grows
        };
        let before = before.filter(goes_on);
        Self {
            first: before.map_or(missing, |before| before.first),
            last: missing,
            samples: before.map_or(0, |before| before.samples) + 1,
        }
    }
}

/// By backend id.
type Differences = BTreeMap<u32, Difference>;

/// Adds the result of a recount to `differences`, and returns the confirmed differences, which are to be added to the counts.
fn confirm(
    differences: &mut Differences,
    counted: &Counted,
    sockets: &BTreeMap<u32, u64>,
) -> BTreeMap<u32, i64> {
    let mut found = counted.flows.clone();
    for (id, count) in sockets {
        *found.entry(*id).or_default() += count.cast_signed();
    }
    for (id, count) in &counted.noted {
        *found.entry(*id).or_default() -= count;
    }
    found.retain(|_, missing| *missing != 0);
    let before = std::mem::take(differences);
    let mut corrections = BTreeMap::new();
    for (id, missing) in found {
        let difference = Difference::after(before.get(&id), missing);
        if difference.samples >= CONFIRMATIONS {
            corrections.insert(id, difference.first);
        } else {
            differences.insert(id, difference);
        }
    }
    corrections
}

/// Compares the counts with flows and sockets, and corrects them.
struct Recount {
    view: View,
    iterators: Iterators,
    differences: Differences,
    /// Whether the last recount found any counted connection.
    is_in_use: bool,
    samples: u32,
}

impl Recount {
    fn recount(&mut self) -> Result<(), CountError> {
        let counted = self.view.recount()?;
        self.is_in_use = !counted.noted.is_empty();
        self.samples = self.samples.saturating_add(1);
        if counted.expired > 0 {
            tracing::debug!(flows = counted.expired, "no longer counting expired flows as open connections");
        }
        // Without all of them the difference is unknown.
        let all = self.iterators.everywhere()?;
        let mut sockets = BTreeMap::new();
        for socket in all.iter().filter(|socket| socket.storage.counted != 0) {
            *sockets.entry(socket.storage.backend_id).or_default() += 1;
        }
        let corrections = confirm(&mut self.differences, &counted, &sockets);
        if !corrections.is_empty() {
            self.view.correct(&corrections)?;
            tracing::info!(
                endpoints = corrections.len(),
                connections = corrections.values().sum::<i64>(),
                "corrected the count of open connections"
            );
        }
        Ok(())
    }

    /// A difference that was found again is confirmed soon. Others come and go: flows, counts and sockets are not read at
    /// the same instant.
    fn period(&self) -> Duration {
        let is_lasting = self.differences.values().any(|difference| difference.samples > 1);
        if self.samples < CONFIRMATIONS || is_lasting { FIRST_PERIOD } else { PERIOD }
    }
}

/// Runs until the driver ends. Does not recount while no Service selects endpoints by open connections and none are counted.
pub async fn run(programs: Arc<Programs>, bpffs: PathBuf, mut status: watch::Receiver<Status>) {
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    let view = match View::open(&bpffs) {
        Ok(view) => view,
        Err(error) => {
            tracing::error!(%error, "cannot correct the counts of open connections");
            return;
        }
    };
    let differences = Differences::new();
    let iterators = Iterators::new(move |which| programs.socket_iterator(which));
    let mut recount = Recount { view, iterators, differences, is_in_use: false, samples: 0 };
    // Connections that were counted under an earlier agent may still be open.
    recount.is_in_use = recount.view.has_open_connections().unwrap_or(true);
    let mut has_failed = false;
    loop {
        if !recount.is_in_use && status.wait_for(|status| status.by_load > 0).await.is_err() {
            return;
        }
        let work = move || {
            let result = recount.recount();
            (recount, result)
        };
        let Ok((back, result)) = spawn_blocking(work).await else { return };
        recount = back;
        match &result {
            Err(failure) if !has_failed => {
                tracing::warn!(error = %failure, "cannot correct the counts of open connections; retrying");
            }
            _ => {}
        }
        has_failed = result.is_err();
        let period = recount.period();
        let ended = async { while status.changed().await.is_ok() {} };
        if timeout(period, ended).await.is_ok() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(noted: &[(u32, i64)], flows: &[(u32, i64)]) -> Counted {
        Counted { noted: noted.iter().copied().collect(), flows: flows.iter().copied().collect(), expired: 0 }
    }

    #[test]
    fn difference_is_corrected_after_three_equal_samples() {
        let mut differences = Differences::new();
        let sockets = BTreeMap::from([(1, 2), (4, 1)]);
        // The count of 1 is right, that of 2 is one too high, that of 3 is below zero, and 4 is not counted at all.
        let seen = counted(&[(1, 5), (2, 8), (3, -1)], &[(1, 3), (2, 7)]);
        for _ in 1..CONFIRMATIONS {
            assert_eq!(confirm(&mut differences, &seen, &sockets), BTreeMap::new());
        }
        let expected = BTreeMap::from([(2, -1), (3, 1), (4, 1)]);
        assert_eq!(confirm(&mut differences, &seen, &sockets), expected);
        let right = counted(&[(1, 5), (2, 7), (4, 1)], &[(1, 3), (2, 7)]);
        assert_eq!(confirm(&mut differences, &right, &sockets), BTreeMap::new());
        assert!(differences.is_empty());
    }

    #[test]
    fn difference_that_grows_is_corrected_by_the_first_one() {
        let mut differences = Differences::new();
        let mut recount =
            |noted: i64| confirm(&mut differences, &counted(&[(1, noted)], &[(1, 100)]), &BTreeMap::new());
        assert_eq!([160, 175].map(&mut recount), [BTreeMap::new(), BTreeMap::new()]);
        assert_eq!(recount(190), BTreeMap::from([(1, -60)]));
        // Small ones are noise.
        assert!([101, 102, 103, 104].into_iter().all(|noted| recount(noted).is_empty()));
    }

    #[test]
    fn difference_that_varies_between_samples_is_not_corrected() {
        let mut differences = Differences::new();
        for round in 0..20 {
            let seen = counted(&[(1, 100 + round % 2)], &[(1, 100)]);
            assert_eq!(confirm(&mut differences, &seen, &BTreeMap::new()), BTreeMap::new());
        }
    }
}
