//! `ballast end-udp-sockets`: the part of the agent that needs the most privileges, as a separate process.

use std::path::Path;

use anyhow::Context;

use super::Ends;
use super::init::raise_file_limit;
use crate::sockets;

/// Runs until it gets SIGTERM or SIGINT, or until the maps are replaced and it has to be started again.
pub fn end_udp_sockets(bpffs: &Path) -> anyhow::Result<()> {
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let result = runtime.block_on(async {
        let mut ends = Ends::listen()?;
        tokio::select! {
            () = ends.asked() => Ok(()),
            ended = sockets::run_standalone(bpffs.to_owned()) => Ok(ended?),
        }
    });
    // A sweep in progress must not delay the exit.
    runtime.shutdown_background();
    result
}
