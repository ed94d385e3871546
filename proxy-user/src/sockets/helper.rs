//! `ballast end-udp-sockets`: the sweeps in a separate process, so that the agent needs no `CAP_SYS_ADMIN`.
//!
//! The process reads only the pinned maps; it needs neither an agent nor the API server.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::rebalance::{Mover, keep_moving};
use super::{Iterators, Reach, Sweeper, Swept, keep_sweeping, lock_of};
use crate::host::lock;
use crate::maps::view::{View, ViewError};
use crate::programs::{self, CurrentMaps};

/// Pause between two reads of the endpoints. A read takes at most a few milliseconds of one CPU, if all 262,144 are in use.
const PERIOD: Duration = Duration::from_millis(500);
/// Sweeps without a known reason: an endpoint may come and go between two reads, and a socket may have met it.
const SWEEP_PERIOD: Duration = Duration::from_secs(30);
/// Pause between two searches for Services that endpoints joined: a search reads all frontends.
const REBALANCE_PERIOD: Duration = Duration::from_secs(5);
/// Pause between two searches for maps that do not exist yet.
const PATIENCE: Duration = Duration::from_secs(1);

/// The reason why the process ends.
#[derive(Debug, thiserror::Error)]
pub enum StandaloneError {
    /// The pins are not trustworthy, or the kernel refuses a program.
    #[error(transparent)]
    Programs(#[from] programs::Error),
    /// The maps cannot be read.
    #[error(transparent)]
    Maps(#[from] ViewError),
    /// The maps were replaced.
    #[error("the maps were replaced; restart this command to use the new maps")]
    Replaced,
}

/// Closes connected sockets, in every network namespace, whose endpoint was removed: UDP, and TCP if the removal policy is
/// `reset`. Returns when the maps are replaced.
pub async fn run_standalone(bpffs: PathBuf) -> Result<(), StandaloneError> {
    let maps = wait_for_maps(&bpffs).await?;
    let current = maps.clone();
    let iterators = Iterators::new(move |which| current.socket_iterator(which));
    let view = View::open(&bpffs)?;
    let mut sweeper = Sweeper::new(view.clone(), iterators, Reach::All);
    // Read the endpoints before the first sweep, so that every later removal is noticed.
    let endpoints = view.serving_endpoints()?;
    let known = (endpoints.udp(), endpoints.reset());
    let (left, departures) = watch::channel(0);
    // The agent leaves connected UDP sockets of pods untranslated unless a process has this lock, which can end them.
    let folder = lock_of(&bpffs);
    let held = Mutex::new(None);
    let report = |swept: &Swept| {
        let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
        if swept.failure.is_some() {
            *held = None;
        } else if held.is_none() {
            match lock::share(&folder) {
                Ok(lock) => *held = Some(lock),
                Err(error) => tracing::error!(%error, folder = %folder.display(), "cannot lock the folder"),
            }
        }
    };
    let current = maps.clone();
    let iterators = Iterators::new(move |which| current.socket_iterator(which));
    // The agent moves the flows of the packet path.
    let mover = Mover::new(view.clone(), iterators, Reach::All, false);
    tracing::info!(bpffs = %bpffs.display(), "closing connected sockets whose endpoint is removed");
    tokio::select! {
        () = keep_sweeping(move || sweeper.sweep(), departures, |left| *left, report) => Ok(()),
        () = keep_moving(mover, REBALANCE_PERIOD, || Some(true), |_| ()) => Ok(()),
        ended = follow(&maps, &view, known, &left) => ended,
    }
}

async fn wait_for_maps(bpffs: &Path) -> Result<CurrentMaps, StandaloneError> {
    let mut is_logged = false;
    loop {
        if let Some(maps) = CurrentMaps::find(bpffs)? {
            return Ok(maps);
        }
        if !is_logged {
            tracing::info!(bpffs = %bpffs.display(), "waiting for an agent of this version to attach programs");
            is_logged = true;
        }
        sleep(PATIENCE).await;
    }
}

/// Endpoints: family (4 or 6), id, and id of the Service port.
type Endpoints = BTreeSet<(u8, u32, u32)>;

/// Reads the endpoints periodically while the maps are current, and increments `left` if UDP endpoints were removed or
/// endpoints were marked for a reset, and every [`SWEEP_PERIOD`].
async fn follow(
    maps: &CurrentMaps,
    view: &View,
    (mut serving, mut reset): (Endpoints, Endpoints),
    left: &watch::Sender<u64>,
) -> Result<(), StandaloneError> {
    let mut swept = Instant::now();
    loop {
        sleep(PERIOD).await;
        if !maps.still() {
            return Err(StandaloneError::Replaced);
        }
        let endpoints = view.serving_endpoints()?;
        let now = (endpoints.udp(), endpoints.reset());
        if !serving.is_subset(&now.0) || !now.1.is_subset(&reset) || swept.elapsed() >= SWEEP_PERIOD {
            left.send_modify(|left| *left += 1);
            swept = Instant::now();
        }
        (serving, reset) = now;
    }
}
