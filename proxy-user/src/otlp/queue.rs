//! What waits to be exported: bounded, and never waited for.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::counts::{Counts, Loss, Signal};

/// Records or spans that may wait: OpenTelemetry's default.
pub const WAITING: usize = 2048;

/// Where one kind of telemetry is put.
#[derive(Debug)]
pub struct Queue<T> {
    sender: mpsc::Sender<T>,
    signal: Signal,
    counts: Arc<Counts>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), signal: self.signal, counts: Arc::clone(&self.counts) }
    }
}

impl<T> Queue<T> {
    /// A queue, and its other end.
    pub(super) fn new(signal: Signal, counts: Arc<Counts>) -> (Self, mpsc::Receiver<T>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self { sender, signal, counts }, receiver)
    }

    /// Adds one; it is lost, and counted, when the queue is full. Never blocks.
    pub fn push(&self, item: T) {
        if self.sender.try_send(item).is_err() {
            self.lose(Loss::QueueFull, 1);
        }
    }

    /// Counts what could not even be made.
    pub fn lose(&self, loss: Loss, count: u64) {
        self.counts.add_lost(self.signal, loss, count);
    }
}
