//! Compares what the programs do with what the API server says, apart from all that is remembered.
//!
//! A watch may miss an event, and a mirror of a map may be wrong: both would stay so, and every health check would be green. So
//! every `--api-audit-period` each agent lists all Services and EndpointSlices once more ([`objects`]), and reads the maps
//! as the programs see them ([`frontends`]). What is under way differs for a moment. So a difference counts when it is
//! still there after [`GRACE`] while the object has not changed. Then it is repaired, logged and counted: it is a fault of
//! Ballast's or of the API server, and an alert.

mod api;
mod frontends;
mod kernel;
mod objects;
mod sources;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::field::Empty;
use tracing::{Instrument as _, info_span};

pub use sources::{Ask, AuditError, Frontends, GRACE, Lists};

use crate::maps::FrontendKey;
use crate::model::Key;
use crate::spans;
use crate::sync::Status;

/// Names that a log line holds, at most.
const NAMED: usize = 10;

/// What was found since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Audits that found nothing.
    pub clean: u64,
    /// Audits that found something, and had it repaired.
    pub repaired: u64,
    /// Audits that could not be made.
    pub failed: u64,
    /// Differences that lasted, by what differed: `Service`, `EndpointSlice`, `frontend`.
    pub differences: BTreeMap<&'static str, u64>,
}

/// The counts, shared with the metrics.
#[derive(Debug, Default)]
pub struct Audits(Mutex<Counts>);

impl Audits {
    /// What was found so far.
    pub fn counts(&self) -> Counts {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, result: &Result<Differences, AuditError>) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(differences) if differences.is_empty() => counts.clean += 1,
            Ok(differences) => {
                counts.repaired += 1;
                for key in &differences.objects {
                    let kind = if matches!(key, Key::Service(_)) { "Service" } else { "EndpointSlice" };
                    *counts.differences.entry(kind).or_default() += 1;
                }
                *counts.differences.entry("frontend").or_default() += differences.frontends.len() as u64;
            }
            Err(_) => counts.failed += 1,
        }
    }
}

/// What differed, and was repaired.
#[derive(Debug, Default, PartialEq, Eq)]
struct Differences {
    /// Services and EndpointSlices that the agent did not know as the API server does.
    objects: Vec<Key>,
    /// Frontends that the maps had otherwise than the agent wanted.
    frontends: Vec<FrontendKey>,
}

impl Differences {
    const fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.frontends.is_empty()
    }
}

/// Audits every `period` until the driver ends; the first time at a moment of the first period that the node's name decides, so
/// that nodes take turns.
pub async fn run(
    lists: impl Lists + Sync,
    maps: impl Frontends + Sync,
    driver: Ask,
    node_name: &str,
    period: Duration,
    mut status: watch::Receiver<Status>,
    audits: &Audits,
) {
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    drop(status);
    sleep(turn(node_name, period)).await;
    loop {
        let span = info_span!(target: spans::TARGET, "audit", ballast.differences = Empty, error = Empty);
        let result = audit(&lists, &maps, &driver).instrument(span.clone()).await;
        match &result {
            Ok(Differences { objects, frontends }) => {
                span.record("ballast.differences", (objects.len() + frontends.len()) as u64);
            }
            Err(error) => {
                span.record("error", error.to_string());
            }
        }
        drop(span);
        audits.note(&result);
        match result {
            Ok(differences) => tell(&differences),
            Err(AuditError::Ending) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot compare what is programmed with the API server");
            }
        }
        sleep(period).await;
    }
}

async fn audit(
    lists: &(impl Lists + Sync),
    maps: &(impl Frontends + Sync),
    driver: &Ask,
) -> Result<Differences, AuditError> {
    let objects = objects::audit(lists, driver).await?;
    Ok(Differences { objects, frontends: frontends::audit(maps, driver).await? })
}

fn tell(differences: &Differences) {
    if differences.is_empty() {
        tracing::debug!("no difference between what is programmed and the API server");
        return;
    }
    let Differences { objects, frontends } = differences;
    let named: Vec<_> = objects.iter().take(NAMED).map(ToString::to_string).collect();
    let keys: Vec<_> = frontends.iter().take(NAMED).map(|key| format!("{}:{}", key.addr, key.port)).collect();
    tracing::error!(
        objects = objects.len(),
        frontends = frontends.len(),
        which = named.into_iter().chain(keys).collect::<Vec<_>>().join(", "),
        "what was programmed differed from the API server for more than a minute; repaired. Please report this"
    );
}

/// When in a period it is the turn of this node.
fn turn(node_name: &str, period: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    node_name.hash(&mut hasher);
    let part = u32::try_from(hasher.finish() & 0xffff).unwrap_or_default();
    period * part / 0x1_0000
}

#[cfg(test)]
mod tests;
