//! Keeps the count of open connections right, by which Services are spread with `lc`, `wlc`, `sed` and `nq`.
//!
//! The programs count exactly as long as they see a connection end. A flow that expires ends unseen: no packet comes. Sockets
//! of the kernel itself are closed without a hook, and a hook may have been taken away for a while. So the agent looks at
//! what there is: it takes flows out of the count that have expired, and compares the rest, with the sockets that count, with
//! what the programs count.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::maps::view::{Counted, View, ViewError};
use crate::programs::{CountedIterator, Programs};
use crate::sync::Status;

/// Between two looks: each goes through all flows and sockets, which takes milliseconds.
const PERIOD: Duration = Duration::from_secs(10);
/// The same after the start, until differences have been confirmed.
const FIRST_PERIOD: Duration = Duration::from_secs(1);
/// Looks that have to find the same difference: what begins or ends during a look is a difference by chance.
const CONFIRMATIONS: u32 = 3;

/// Why the count may be wrong.
#[derive(Debug, thiserror::Error)]
enum CountError {
    #[error("cannot read the counts: {0}")]
    Maps(#[from] ViewError),
    #[error("cannot list the counted sockets: {0}")]
    Sockets(#[source] io::Error),
}

/// By how much the count of a backend differs, and how many looks in a row have found that.
type Differences = BTreeMap<u32, (i64, u32)>;

/// Takes in what a look has found, and gives what is to be added to the counts.
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
        let looks = before.get(&id).filter(|(same, _)| *same == missing).map_or(0, |(_, looks)| *looks) + 1;
        if looks >= CONFIRMATIONS {
            corrections.insert(id, missing);
        } else {
            differences.insert(id, (missing, looks));
        }
    }
    corrections
}

/// Looks at what there is, and corrects the count.
struct Recount {
    view: View,
    programs: Arc<Programs>,
    /// Loaded when it is needed first; an error is told once.
    sockets: Option<Result<CountedIterator, ()>>,
    differences: Differences,
    /// The last look found something that counts.
    is_in_use: bool,
    looks: u32,
}

impl Recount {
    fn look(&mut self) -> Result<(), CountError> {
        let counted = self.view.recount()?;
        self.is_in_use = !counted.noted.is_empty();
        self.looks = self.looks.saturating_add(1);
        if counted.expired > 0 {
            tracing::debug!(flows = counted.expired, "no longer counting expired flows as open connections");
        }
        let programs = &self.programs;
        let sockets = self.sockets.get_or_insert_with(|| {
            programs.counted_iterator().map_err(|error| {
                tracing::warn!(%error, "cannot compare open connections of sockets with their counts");
            })
        });
        // Without it the difference is unknown.
        let Ok(sockets) = sockets else { return Ok(()) };
        let sockets = sockets.count().map_err(CountError::Sockets)?;
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

    fn period(&self) -> Duration {
        if self.looks < CONFIRMATIONS || !self.differences.is_empty() { FIRST_PERIOD } else { PERIOD }
    }
}

/// Runs until the driver ends. Nothing is looked at while no Service is spread by open connections and none are counted.
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
    let mut recount = Recount { view, programs, sockets: None, differences, is_in_use: false, looks: 0 };
    // What an earlier agent left may still be open.
    recount.is_in_use = recount.view.has_open_connections().unwrap_or(true);
    let mut has_failed = false;
    loop {
        if !recount.is_in_use && status.wait_for(|status| status.by_load > 0).await.is_err() {
            return;
        }
        let look = move || {
            let result = recount.look();
            (recount, result)
        };
        let Ok((back, result)) = spawn_blocking(look).await else { return };
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
    fn what_three_looks_agree_on_is_corrected() {
        let mut differences = Differences::new();
        let sockets = BTreeMap::from([(1, 2), (4, 1)]);
        // 1 is right, 2 has one too many, 3 is below zero, 4 is not counted at all.
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
    fn what_comes_and_goes_is_left_alone() {
        let mut differences = Differences::new();
        for round in 0..20 {
            let seen = counted(&[(1, 100 + round % 2)], &[(1, 100)]);
            assert_eq!(confirm(&mut differences, &seen, &BTreeMap::new()), BTreeMap::new());
        }
    }
}
