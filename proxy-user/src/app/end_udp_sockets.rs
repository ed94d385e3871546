//! `ballast end-udp-sockets`: what of the agent takes the most privileges, as a process of its own.

use std::path::Path;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::sockets;

/// Runs until it is told to end (SIGTERM, SIGINT), or the maps are replaced, to be started again.
pub fn end_udp_sockets(bpffs: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let result = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        tokio::select! {
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
            ended = sockets::beside_the_agent(bpffs.to_owned()) => Ok(ended?),
        }
    });
    // A sweep that goes on must not hold up the end.
    runtime.shutdown_background();
    result
}
