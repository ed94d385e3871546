//! Recent faults of the programs, and standing ones of the agent.
//!
//! The counters only grow until the machine restarts: a table that was full last month would be reported for ever. So
//! the agent records the counters every minute, and reports what was added in the last ten.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use proxy_common::reason::Reason;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::maps::view::{View, ViewError};

/// The interval of the records.
pub const PERIOD: Duration = Duration::from_mins(1);
/// How many records are kept; older faults are not reported.
const NOTES: usize = 11;

/// The cause of the standing faults of socket programs that are not on their hooks: until they are, the agent is not ready.
pub const SOCKET_PROGRAMS: &str = "socket programs";

/// The cause of an agent that is not ready, because nothing serves the node until its programs are attached: no fault.
pub const FIRST_ATTACH: &str = "first attachment";

/// How long a task may make no progress at least: one step may take seconds, such as XDP on an uplink, which resets its queues.
pub const SLOWEST: Duration = Duration::from_mins(1);

type Counts = BTreeMap<Reason, u64>;

/// The last records of the counters, and the standing faults.
#[derive(Debug, Default)]
pub struct Recent {
    notes: Mutex<VecDeque<Counts>>,
    /// Faults that last until their cause says otherwise: sentences by cause.
    standing: Mutex<BTreeMap<&'static str, Vec<String>>>,
    /// When tasks have to make their next progress, by what they do.
    due: Mutex<BTreeMap<&'static str, watch::Receiver<Option<Instant>>>>,
}

impl Recent {
    /// Records the current counters. Reads a map, which blocks.
    pub fn note(&self, bpffs: &Path) -> Result<(), ViewError> {
        self.add(View::open(bpffs)?.reasons()?);
        Ok(())
    }

    fn add(&self, counts: Counts) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        // Maps that were created again start at zero, so records with higher counts are dropped.
        let is_older =
            |before: &Counts| before.iter().all(|(reason, count)| counts.get(reason) >= Some(count));
        notes.retain(is_older);
        notes.push_back(counts);
        if notes.len() > NOTES {
            notes.pop_front();
        }
    }

    /// Sets the faults of a cause; none: they are over.
    pub fn set_standing(&self, cause: &'static str, faults: impl IntoIterator<Item = String>) {
        let mut standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
        standing.insert(cause, faults.into_iter().collect());
    }

    /// Returns the standing faults of a cause.
    pub fn standing_of(&self, cause: &str) -> Vec<String> {
        let standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
        standing.get(cause).cloned().unwrap_or_default()
    }

    /// Follows a task, named by what it does, that publishes when its next progress is due; `None`: it has not begun.
    pub fn expect_progress(&self, task: &'static str, due: watch::Receiver<Option<Instant>>) {
        self.due.lock().unwrap_or_else(PoisonError::into_inner).insert(task, due);
    }

    /// Returns how long the progress of each task has been overdue.
    fn overdue(&self) -> Vec<(&'static str, Duration)> {
        let due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let late =
            |due: &watch::Receiver<Option<Instant>>| due.borrow().map_or(Duration::ZERO, |at| at.elapsed());
        due.iter().map(|(task, due)| (*task, late(due))).collect()
    }

    /// Returns how long the progress of a task has been overdue, of the one that is late for the longest time.
    pub fn longest_overdue(&self) -> Duration {
        self.overdue().into_iter().map(|(_, late)| late).max().unwrap_or_default()
    }

    /// Returns the standing faults, and what was added to the counters of faults, as sentences.
    pub fn faults(&self) -> Vec<String> {
        let stalled = self.overdue().into_iter().filter(|(_, late)| *late > SLOWEST);
        let mut faults: Vec<_> = stalled
            .map(|(task, _)| {
                format!("{task} makes no progress, and new pods get no programs; /livez fails if that lasts")
            })
            .collect();
        let standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
        let standing = standing.iter().filter(|(cause, _)| **cause != FIRST_ATTACH);
        faults.extend(standing.flat_map(|(_, faults)| faults).cloned());
        faults.extend(self.counted());
        faults
    }

    fn counted(&self) -> Vec<String> {
        let notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(first), Some(last)) = (notes.front(), notes.back()) else { return Vec::new() };
        let added = |reason: &Reason| {
            last.get(reason).copied().unwrap_or_default() - first.get(reason).copied().unwrap_or_default()
        };
        let faults = Reason::ALL.iter().filter(|reason| reason.is_fault() && added(reason) > 0);
        let minutes = notes.len() - 1;
        let sentence = |reason: &Reason| {
            let (label, count) = (reason.label(), added(reason));
            format!("{count} x {label} in {minutes} min:{} {}", reason.explanation(), reason.advice())
        };
        faults.map(sentence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(full: u64, no_endpoint: u64) -> Counts {
        BTreeMap::from([(Reason::FlowTableFull, full), (Reason::NoEndpoint, no_endpoint)])
    }

    #[test]
    fn fault_is_reported_for_ten_minutes() {
        let recent = Recent::default();
        recent.add(counts(7, 1));
        assert_eq!(recent.faults(), Vec::<String>::new(), "the time of that is not known");
        recent.add(counts(9, 50));
        let sentences = recent.faults();
        assert!(
            sentences.len() == 1 && sentences[0].starts_with("2 x flow_table_full in 1 min:"),
            "{sentences:?}"
        );
        for _ in 0..9 {
            recent.add(counts(9, 50));
            assert_eq!(recent.faults().len(), 1);
        }
        recent.add(counts(9, 50));
        assert_eq!(recent.faults(), Vec::<String>::new());
    }

    #[test]
    fn a_standing_fault_is_reported_until_its_cause_clears_it() {
        let recent = Recent::default();
        recent.set_standing("manifests", ["a".to_owned(), "b".to_owned()]);
        recent.set_standing("credentials", Some("c".to_owned()));
        assert_eq!(recent.faults(), ["c", "a", "b"]);
        recent.set_standing("manifests", None);
        assert_eq!(recent.faults(), ["c"]);
    }

    #[tokio::test(start_paused = true)]
    async fn task_without_progress_is_a_fault_after_a_minute() {
        let recent = Recent::default();
        let (due, receiver) = watch::channel(None);
        recent.expect_progress("reading devices", receiver);
        tokio::time::advance(2 * SLOWEST).await;
        assert_eq!((recent.longest_overdue(), recent.faults()), (Duration::ZERO, vec![]), "it has not begun");
        due.send_replace(Some(Instant::now() + SLOWEST));
        tokio::time::advance(2 * SLOWEST).await;
        assert_eq!((recent.longest_overdue(), recent.faults()), (SLOWEST, vec![]));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(recent.faults()[0].starts_with("reading devices makes no progress"), "{:?}", recent.faults());
        due.send_replace(Some(Instant::now()));
        assert_eq!((recent.longest_overdue(), recent.faults()), (Duration::ZERO, vec![]));
    }

    #[test]
    fn maps_that_were_made_anew_begin_at_zero() {
        let recent = Recent::default();
        recent.add(counts(7, 0));
        recent.add(counts(0, 0));
        recent.add(counts(1, 0));
        assert!(recent.faults()[0].starts_with("1 x flow_table_full"), "{:?}", recent.faults());
    }
}
