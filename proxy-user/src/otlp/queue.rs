//! Bounded queues of telemetry to be exported; adding to a queue never blocks.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::counts::{Counts, Loss, Signal};

/// Maximum number of waiting records or spans: OpenTelemetry's default.
pub const WAITING: usize = 2048;

/// Sending end of the queue for one kind of telemetry.
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
    /// Creates a queue; returns its sending end and its receiving end.
    pub(super) fn new(signal: Signal, counts: Arc<Counts>) -> (Self, mpsc::Receiver<T>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self { sender, signal, counts }, receiver)
    }

    /// Adds an item. If the queue is full or has no receiver, the item is lost and counted. Never blocks.
    pub fn push(&self, item: T) {
        if self.sender.try_send(item).is_err() {
            self.lose(Loss::QueueFull, 1);
        }
    }

    /// Counts items that were lost before they could be added.
    pub fn lose(&self, loss: Loss, count: u64) {
        self.counts.add_lost(self.signal, loss, count);
    }
}
