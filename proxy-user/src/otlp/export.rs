//! Sends the contents of the queues in batches.
//!
//! A batch is sent when it is full, or some time after its first record. If the collector does not accept the batch, the
//! exporter retries for half a minute and then drops the batch. Meanwhile new records wait in the queue, and are lost if the
//! queue is full. So the exporter holds at most one queue and one batch of each kind in memory, and no caller waits for it.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use hyper::body::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};

use super::client::{Client, ClientError, Failure, Target};
use super::counts::{Counts, Loss, Signal};
use super::queue::Queue;
use super::record::{self, LogRecord};
use super::resource::Resource;
use super::span::{self, Span};

/// Maximum number of records or spans in a request. This and the two constants below are OpenTelemetry's defaults.
const BATCH: usize = 512;
/// How long an incomplete batch waits for further log records.
const LOGS_PERIOD: Duration = Duration::from_secs(1);
/// How long an incomplete batch waits for further spans.
const TRACES_PERIOD: Duration = Duration::from_secs(5);
/// Pause before the first retry of a batch; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of retries of a batch.
const RETRIES: usize = 4;
/// The longest pause, whether it is computed or requested by the collector.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Delays of batches and retries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) logs: Duration,
    pub(super) traces: Duration,
    pub(super) first_pause: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { logs: LOGS_PERIOD, traces: TRACES_PERIOD, first_pause: FIRST_PAUSE }
    }
}

/// The queues, and their receiving ends.
#[derive(Debug)]
pub struct Exporter {
    /// Log records.
    pub logs: Queue<LogRecord>,
    /// Spans.
    pub spans: Queue<Span>,
    /// Counters of exported and lost records and spans.
    pub counts: Arc<Counts>,
    records_to_send: mpsc::Receiver<LogRecord>,
    spans_to_send: mpsc::Receiver<Span>,
    pub(super) pace: Pace,
}

impl Default for Exporter {
    fn default() -> Self {
        let counts = Arc::<Counts>::default();
        let (logs, records_to_send) = Queue::new(Signal::Logs, Arc::clone(&counts));
        let (spans, spans_to_send) = Queue::new(Signal::Traces, Arc::clone(&counts));
        Self { logs, spans, counts, records_to_send, spans_to_send, pace: Pace::default() }
    }
}

impl Exporter {
    /// Number of waiting log records and of waiting spans.
    pub fn waiting(&self) -> (usize, usize) {
        (self.records_to_send.len(), self.spans_to_send.len())
    }

    /// Starts to send. Fails only if a setting is wrong, not if the collector is unreachable.
    pub async fn start(self, target: Target, resource: Resource) -> Result<Running, ClientError> {
        let client = Arc::new(Client::new(target).await?);
        let resource = Arc::new(resource);
        let (ending, is_ending) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let logs = Worker {
            receiver: self.records_to_send,
            signal: Signal::Logs,
            document: record::document,
            period: self.pace.logs,
            first_pause: self.pace.first_pause,
            counts: Arc::clone(&self.counts),
            client: Arc::clone(&client),
            resource: Arc::clone(&resource),
            ending: is_ending.clone(),
            is_away: false,
        };
        let traces = Worker {
            receiver: self.spans_to_send,
            signal: Signal::Traces,
            document: span::document,
            period: self.pace.traces,
            first_pause: self.pace.first_pause,
            counts: self.counts,
            client,
            resource,
            ending: is_ending,
            is_away: false,
        };
        tasks.spawn(logs.run());
        tasks.spawn(traces.run());
        Ok(Running { ending, tasks })
    }
}

/// The running tasks that send.
#[derive(Debug)]
pub struct Running {
    ending: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Running {
    /// Sends the waiting records and spans in one attempt, and returns after `patience` at the latest.
    pub async fn finish(mut self, patience: Duration) {
        self.ending.send_replace(true);
        // Records and spans that are not sent in time are lost.
        let _ = timeout(patience, async { while self.tasks.join_next().await.is_some() {} }).await;
    }
}

/// Task that sends one kind of telemetry.
struct Worker<T> {
    receiver: mpsc::Receiver<T>,
    signal: Signal,
    document: fn(&Resource, &[T]) -> serde_json::Result<String>,
    period: Duration,
    first_pause: Duration,
    counts: Arc<Counts>,
    client: Arc<Client>,
    resource: Arc<Resource>,
    ending: watch::Receiver<bool>,
    /// The last request failed, and a warning about it is in the log.
    is_away: bool,
}

impl<T> Worker<T> {
    async fn run(mut self) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            self.collect(&mut batch).await;
            if batch.is_empty() {
                return;
            }
            self.send(&batch).await;
            batch.clear();
        }
    }

    /// Takes a batch out of the queue; the batch is empty if the agent ends and nothing waits.
    async fn collect(&mut self, batch: &mut Vec<T>) {
        let Self { receiver, ending, .. } = self;
        let mut is_ending = ending.clone();
        tokio::select! {
            biased;
            _ = receiver.recv_many(batch, BATCH) => {}
            _ = is_ending.wait_for(|ending| *ending) => return,
        }
        let due = tokio::time::Instant::now() + self.period;
        while batch.len() < BATCH && !batch.is_empty() {
            let room = BATCH - batch.len();
            tokio::select! {
                biased;
                added = receiver.recv_many(batch, room) => if added == 0 { return },
                () = sleep_until(due) => return,
                _ = is_ending.wait_for(|ending| *ending) => return,
            }
        }
    }

    async fn send(&mut self, batch: &[T]) {
        let count = batch.len() as u64;
        let document = match (self.document)(&self.resource, batch) {
            Ok(document) => Bytes::from(document),
            Err(error) => {
                self.lose(Loss::Refused, count, &error.to_string());
                return;
            }
        };
        let pauses =
            ExponentialBuilder::default().with_min_delay(self.first_pause).with_max_delay(LONGEST_PAUSE);
        let mut pauses = pauses.with_max_times(RETRIES).with_jitter().build();
        loop {
            match self.client.post(self.signal, document.clone()).await {
                Ok(None) => return self.sent(count),
                Ok(Some(rejected)) => {
                    let lost = rejected.count.min(count);
                    self.sent(count - lost);
                    return self.lose(Loss::Refused, lost, &rejected.reason);
                }
                Err(Failure::Refused(reason)) => return self.lose(Loss::Refused, count, &reason),
                Err(Failure::Later(reason, after)) => {
                    let Some(pause) = pauses.next().filter(|_| !*self.ending.borrow()) else {
                        return self.lose(Loss::Unreachable, count, &reason);
                    };
                    self.warn(&reason);
                    let pause = after.map_or(pause, |after| after.min(LONGEST_PAUSE).max(pause));
                    tokio::select! {
                        () = sleep(pause) => {}
                        _ = self.ending.wait_for(|ending| *ending) => {}
                    }
                }
            }
        }
    }

    fn sent(&mut self, count: u64) {
        self.counts.add_exported(self.signal, count);
        if std::mem::take(&mut self.is_away) {
            tracing::info!(
                signal = self.signal.label(),
                "the OpenTelemetry collector accepts telemetry again"
            );
        }
    }

    fn lose(&mut self, loss: Loss, count: u64, reason: &str) {
        self.counts.add_lost(self.signal, loss, count);
        self.warn(reason);
    }

    /// Warns that the collector does not accept telemetry, once until a request succeeds again.
    fn warn(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!(
                signal = self.signal.label(),
                endpoint = %self.client.endpoint(),
                reason,
                "the OpenTelemetry collector does not accept telemetry; telemetry that cannot wait is dropped and counted"
            );
        }
    }
}
