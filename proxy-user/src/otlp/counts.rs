//! What became of the records and spans, for `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of telemetry that is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Log records: lines of the agent's log, and events of the programs.
    Logs,
    /// Spans.
    Traces,
}

impl Signal {
    /// Both, in the order of [`Counts`].
    pub const ALL: [Self; 2] = [Self::Logs, Self::Traces];

    /// As OpenTelemetry calls it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Logs => "logs",
            Self::Traces => "traces",
        }
    }
}

/// Why something was not exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// So much was waiting already.
    QueueFull,
    /// The collector did not answer, or asked to come back later, for too long.
    Unreachable,
    /// The collector refused it.
    Refused,
    /// More events came from the programs than are taken.
    TooMany,
}

impl Loss {
    /// All of them, in the order of [`Counts`].
    pub const ALL: [Self; 4] = [Self::QueueFull, Self::Unreachable, Self::Refused, Self::TooMany];

    /// A label of the metric.
    pub const fn label(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::TooMany => "too_many",
        }
    }
}

/// Since the agent's start.
#[derive(Debug, Default)]
pub struct Counts {
    exported: [AtomicU64; Signal::ALL.len()],
    lost: [[AtomicU64; Loss::ALL.len()]; Signal::ALL.len()],
}

impl Counts {
    /// A collector has taken so many.
    pub fn add_exported(&self, signal: Signal, count: u64) {
        self.exported[signal as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// So many are lost.
    pub fn add_lost(&self, signal: Signal, loss: Loss, count: u64) {
        self.lost[signal as usize][loss as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// How many were exported.
    pub fn exported(&self, signal: Signal) -> u64 {
        self.exported[signal as usize].load(Ordering::Relaxed)
    }

    /// How many were lost.
    pub fn lost(&self, signal: Signal, loss: Loss) -> u64 {
        self.lost[signal as usize][loss as usize].load(Ordering::Relaxed)
    }
}
