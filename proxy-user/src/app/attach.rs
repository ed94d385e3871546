//! Programs come to their hooks, and stay there.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::cli::RunConfig;
use crate::host::manager::{DeviceManager, PERIOD};
use crate::host::selection::Selection;
use crate::programs::Programs;
use crate::sync::Status;

/// Attaches the programs: at once where an earlier agent's maps are full, else when they are for the first time, or hold
/// the static Services, by which the API server itself may be reached.
/// A program that is attached before it knows anything would turn nobody away, but would help nobody either.
pub async fn attach(programs: Arc<Programs>, config: Arc<RunConfig>, mut status: watch::Receiver<Status>) {
    let is_filled = |status: &Status| status.synced || status.statics_synced;
    if !programs.in_force() && status.wait_for(is_filled).await.is_err() {
        return;
    }
    loop {
        let attaching = Arc::clone(&programs);
        match spawn_blocking(move || attaching.attach_sockets()).await {
            Ok(Ok(outcomes)) => {
                for (hook, outcome) in outcomes {
                    tracing::debug!(hook, ?outcome, "socket program attached");
                }
                tracing::info!("socket programs attached");
                break;
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "cannot attach the socket programs; trying again in 5 s");
            }
            Err(_) => return,
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    let selection = match config.devices.join(",").parse::<Selection>() {
        Ok(selection) => selection,
        Err(error) => {
            tracing::error!(%error, "the packet programs are attached to no device");
            return;
        }
    };
    let (manager, _states) = DeviceManager::new(selection, Arc::clone(&programs));
    let manager = manager.with_period(PERIOD.min(config.sync_period));
    tokio::join!(manager.run(), keep(programs, config.sync_period));
}

/// Puts back what another hand takes away, every `period`.
async fn keep(programs: Arc<Programs>, period: Duration) {
    let mut trouble: Option<String> = None;
    loop {
        tokio::time::sleep(period).await;
        let programs = Arc::clone(&programs);
        let Ok(result) = spawn_blocking(move || programs.repair()).await else { return };
        let error = match result {
            Ok(repairs) => {
                for repair in repairs {
                    tracing::warn!(what = %repair, "another hand took it away; it is put back");
                }
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = error.as_ref().filter(|error| trouble.as_ref() != Some(error)) {
            tracing::error!(error, "what another hand took away cannot be put back; trying again");
        }
        trouble = error;
    }
}
