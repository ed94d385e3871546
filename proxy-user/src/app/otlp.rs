//! Exports telemetry (`--otlp-endpoint`): starts the exporter, and reads events from the ring buffer of the programs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::cli::monitor::{MonitorContext, MonitorLine, Names};
use crate::config::RunConfig;
use crate::config::otlp::Telemetry;
use crate::driver::Status;
use crate::maps::view::{View, ViewError};
use crate::otlp::record::LogRecord;
use crate::otlp::{Exporter, Loss, Queue, Running};

/// How often the ring buffer is read: an event does not wake the reader.
const LOOK: Duration = Duration::from_millis(20);
/// How many events of one read become records, which is 3,200 a second; further events are only counted. The names of
/// devices and processes are looked up for each record.
const TAKEN: usize = 64;
/// The pause before maps that could not be read are tried again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts the exporter. If this fails, the agent logs an error and still serves traffic.
pub async fn start(exporter: Option<Exporter>, config: &RunConfig) -> Option<Running> {
    let (exporter, settings) = exporter.zip(config.otlp.as_ref())?;
    let target = settings.otlp_endpoint.clone();
    tracing::info!(
        endpoint = %target.endpoint,
        signals = ?settings.otlp_signals,
        "exporting telemetry by OTLP/HTTP with JSON"
    );
    match exporter.start(target, settings.resource(&config.node_name)).await {
        Ok(running) => Some(running),
        Err(error) => {
            tracing::error!(%error, "cannot export telemetry");
            None
        }
    }
}

/// Exports events until the agent ends, if events are to be exported. The programs write them only while a listener is
/// registered.
pub async fn events(queue: Queue<LogRecord>, config: Arc<RunConfig>, mut status: watch::Receiver<Status>) {
    let Some(settings) = config.otlp.as_ref().filter(|settings| settings.has(Telemetry::Events)) else {
        return;
    };
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    let (sample, mut is_logged) = (settings.otlp_sample, false);
    loop {
        // Set when this task is dropped, which the thread does not notice by itself.
        let ending = Ending::default();
        let noted = Arc::clone(&ending.0);
        let (queue, bpffs) = (queue.clone(), config.bpffs.clone());
        match spawn_blocking(move || follow(&queue, &bpffs, sample, &noted)).await {
            Ok(Err(error)) if !std::mem::replace(&mut is_logged, true) => {
                tracing::warn!(%error, "cannot export events; retrying");
            }
            Ok(Err(_)) => {}
            Ok(Ok(())) | Err(_) => return,
        }
        tokio::time::sleep(PATIENCE).await;
    }
}

#[derive(Default)]
struct Ending(Arc<AtomicBool>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads events and queues them for export until `ending` is set. Counts events that it cannot read or queue.
fn follow(queue: &Queue<LogRecord>, bpffs: &Path, sample: u32, ending: &AtomicBool) -> Result<(), ViewError> {
    let view = View::open(bpffs)?;
    let mut names = Names::read(&view)?;
    let mut listener = view.listen(sample)?;
    let mut lost = 0;
    while !ending.load(Ordering::Relaxed) {
        // Read each time, because the clock may be set in between.
        let (context, now) = (MonitorContext::now(), SystemTime::now());
        let mut taken = 0;
        while let Some(event) = listener.next_event()? {
            taken += 1;
            if taken <= TAKEN {
                names.learn(&view, event.service)?;
                queue.push(MonitorLine::new(&event, &names.snapshot, &context).record(now));
            }
        }
        let left_out = taken.saturating_sub(TAKEN) as u64 + listener.lost().saturating_sub(lost);
        lost = listener.lost();
        if left_out > 0 {
            queue.lose(Loss::TooMany, left_out);
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}
