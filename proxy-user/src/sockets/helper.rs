//! `ballast end-udp-sockets`: the sweeps as a process of their own, so that the agent needs no `CAP_SYS_ADMIN`.
//!
//! It goes by the pinned maps alone: it asks no agent, and no API server.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::{Iterators, Reach, Sweeper, keep_sweeping};
use crate::maps::view::{View, ViewError};
use crate::programs::{self, CurrentMaps};

/// Between two looks at the endpoints: at most a few milliseconds of one CPU where all 262,144 are in use.
const PERIOD: Duration = Duration::from_millis(500);
/// The same at maps that are not there yet.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why it ends.
#[derive(Debug, thiserror::Error)]
pub enum BesideError {
    /// The pins are not to be used, or the kernel refuses.
    #[error(transparent)]
    Programs(#[from] programs::Error),
    /// The maps cannot be read.
    #[error(transparent)]
    Maps(#[from] ViewError),
    /// Other maps are current.
    #[error("the maps were replaced; restart this command to use the new maps")]
    Replaced,
}

/// Ends connected sockets, in every network namespace, whose endpoint left: UDP, and TCP where the removal policy says so. Returns when the maps are replaced.
pub async fn beside_the_agent(bpffs: PathBuf) -> Result<(), BesideError> {
    let maps = wait_for_maps(&bpffs).await?;
    let iterators = Iterators::of(maps.socket_iterator(), maps.left_iterator());
    let view = View::open(&bpffs)?;
    let mut sweeper = Sweeper::new(view.clone(), iterators, Reach::All);
    // Before the first sweep: who leaves from now on is noticed.
    let endpoints = view.serving_endpoints()?;
    let known = (endpoints.udp(), endpoints.reset());
    let (left, departures) = watch::channel(0);
    tracing::info!(bpffs = %bpffs.display(), "closing connected sockets whose endpoint is removed");
    tokio::select! {
        () = keep_sweeping(move || sweeper.sweep(), departures, |left| *left, |_| {}) => Ok(()),
        ended = follow(&maps, &view, known, &left) => ended,
    }
}

async fn wait_for_maps(bpffs: &Path) -> Result<CurrentMaps, BesideError> {
    let mut is_told = false;
    loop {
        if let Some(maps) = CurrentMaps::find(bpffs)? {
            return Ok(maps);
        }
        if !is_told {
            tracing::info!(bpffs = %bpffs.display(), "waiting for an agent of this version to attach programs");
            is_told = true;
        }
        sleep(PATIENCE).await;
    }
}

/// Family, id, and id of the Service port.
type Endpoints = BTreeSet<(u8, u32, u32)>;

/// Counts, as long as the maps are current, the looks that found UDP endpoints gone, or connections to be reset.
async fn follow(
    maps: &CurrentMaps,
    view: &View,
    (mut serving, mut reset): (Endpoints, Endpoints),
    left: &watch::Sender<u64>,
) -> Result<(), BesideError> {
    loop {
        sleep(PERIOD).await;
        if !maps.still() {
            return Err(BesideError::Replaced);
        }
        let endpoints = view.serving_endpoints()?;
        let now = (endpoints.udp(), endpoints.reset());
        if !serving.is_subset(&now.0) || !now.1.is_subset(&reset) {
            left.send_modify(|left| *left += 1);
        }
        (serving, reset) = now;
    }
}
