//! Counters of exported and lost records and spans, for `/metrics`.

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
    /// Both signals, in the order of [`Counts`].
    pub const ALL: [Self; 2] = [Self::Logs, Self::Traces];

    /// OpenTelemetry's name of the signal.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Logs => "logs",
            Self::Traces => "traces",
        }
    }
}

/// Why a record or span was not exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Loss {
    /// The queue was full.
    QueueFull,
    /// The collector did not answer or asked to retry later, and the last retry failed as well.
    Unreachable,
    /// The collector refused the records or spans.
    Refused,
    /// The programs reported more events than the exporter accepts.
    TooMany,
}

impl Loss {
    /// All reasons, in the order of [`Counts`].
    pub const ALL: [Self; 4] = [Self::QueueFull, Self::Unreachable, Self::Refused, Self::TooMany];

    /// Value of the metric's label.
    pub fn label(self) -> &'static str {
        self.into()
    }
}

/// Counters since the agent's start.
#[derive(Debug, Default)]
pub struct Counts {
    exported: [AtomicU64; Signal::ALL.len()],
    lost: [[AtomicU64; Loss::ALL.len()]; Signal::ALL.len()],
}

impl Counts {
    /// Counts records or spans that a collector accepted.
    pub fn add_exported(&self, signal: Signal, count: u64) {
        self.exported[signal as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts lost records or spans.
    pub fn add_lost(&self, signal: Signal, loss: Loss, count: u64) {
        self.lost[signal as usize][loss as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Number of exported records or spans.
    pub fn exported(&self, signal: Signal) -> u64 {
        self.exported[signal as usize].load(Ordering::Relaxed)
    }

    /// Number of records or spans lost for this reason.
    pub fn lost(&self, signal: Signal, loss: Loss) -> u64 {
        self.lost[signal as usize][loss as usize].load(Ordering::Relaxed)
    }
}
