//! Traffic that goes on until it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::wire::{Failure, Load, Seen, Tally};
use super::work::{self, Conversation};

/// Between two messages: the machine is shared, and a client has only so many ports.
const PAUSE: Duration = Duration::from_millis(5);
/// Failures that are told in full.
const TOLD: usize = 5;

/// Running loads, a thread each.
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
    let mut tally = Tally::default();
    let mut kept = None;
    while !is_over.load(Ordering::Relaxed) {
        note(&mut tally, exchange(load, &mut kept));
        std::thread::sleep(PAUSE);
    }
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

fn note(tally: &mut Tally, result: Result<Seen, Failure>) {
    match result {
        Ok(seen) => *tally.servers.entry(seen.server).or_default() += 1,
        Err(failure) => {
            tally.failed += 1;
            if tally.failures.len() < TOLD {
                tally.failures.push(failure);
            }
        }
    }
}
