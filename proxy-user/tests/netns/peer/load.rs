//! Traffic that continues until it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::wire::{Attempt, Failure, Load, Seen, Tally};
use super::work::{self, Conversation};

/// Number of failures that are reported in full.
const MAX_REPORTED: usize = 5;

/// Minimum number of exchanges of a load. On a busy or an emulated machine, the action under test may end before a load
/// has made enough of them to be meaningful.
const LEAST: u64 = 20;

/// Running loads, one thread for each.
pub struct Traffic {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Tally>>,
}

impl Traffic {
    pub fn start(loads: Vec<Load>) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let run = |load| {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || run(load, &is_over))
        };
        let threads = loads.into_iter().map(run).collect();
        Self { is_over, threads }
    }

    pub fn stop(self) -> Vec<Tally> {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| died())).collect()
    }
}

fn died() -> Tally {
    Tally { failed: 1, ..Tally::default() }
}

fn run(load: Load, is_over: &AtomicBool) -> Tally {
    let (mut tally, mut kept) = (Tally::default(), None);
    let start = Instant::now();
    let mut exchanges = 0;
    while exchanges < LEAST || !is_over.load(Ordering::Relaxed) {
        exchanges += 1;
        let began = now();
        let result = exchange(load, &mut kept);
        // The result of the socket's next message shows whether one message was lost, or the path is closed.
        let began = match kept.as_mut().filter(|_| result.is_err()) {
            Some(kept) => format!("{began} from {}; again: {:?}", kept.local(), kept.talk(None, false)),
            None => began,
        };
        note(&mut tally, start, began, result);
        std::thread::sleep(Duration::from_millis(load.pause));
    }
    tally
}

/// Makes the attempt `count` times, one after the other.
pub fn many(attempt: Attempt, count: usize) -> Tally {
    let (mut tally, start) = (Tally::default(), Instant::now());
    (0..count).for_each(|_| note(&mut tally, start, now(), work::once(attempt)));
    tally
}

fn exchange(load: Load, kept: &mut Option<Conversation>) -> Result<Seen, Failure> {
    if !load.is_one_socket {
        return work::once(load.attempt);
    }
    let conversation = match kept {
        Some(conversation) => conversation,
        None => kept.insert(Conversation::open(load.attempt)?),
    };
    conversation.talk(None, false)
}

/// Returns the current time in the format of the agent's logs.
fn now() -> String {
    format!("{:.6}", Timestamp::now())
}

fn note(tally: &mut Tally, start: Instant, began: String, result: Result<Seen, Failure>) {
    match result {
        Ok(seen) => {
            tally.syn_retransmits += u64::from(seen.syn_retransmits);
            tally.most_retransmits = tally.most_retransmits.max(seen.syn_retransmits);
            *tally.servers.entry(seen.server.clone()).or_default() += 1;
            if seen.syn_retransmits > 0 && tally.late.len() < MAX_REPORTED {
                tally.late.push((start.elapsed().as_millis(), seen));
            }
        }
        Err(failure) => {
            tally.failed += 1;
            if tally.failures.len() < MAX_REPORTED {
                tally.failures.push((began, failure));
            }
        }
    }
}
