//! Compares the content of the maps with the objects of the API server, without the agent's watches and mirrors.
//!
//! A watch may miss an event, and a mirror of a map may be wrong. Both errors would last, and every health check would
//! succeed. So every `--api-audit-period` each agent lists all Services and EndpointSlices again ([`objects`]), and reads
//! the maps as the programs see them ([`frontends`]). A change in progress is a difference for a moment, so a difference
//! counts only if it still exists after [`GRACE`] and the object has not changed since. It is then repaired, logged and
//! counted: it is a fault of Ballast or of the API server, and raises an alert.

mod frontends;
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

pub use sources::{AuditError, Frontends, GRACE, Lists};

use crate::driver::{Ask, Status};
use proxy_core::model::Key;
use proxy_core::spans;
use proxy_core::store::FrontendKey;

/// The most names in a log line.
const NAMED: usize = 10;

/// Results of the audits since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Audits without a difference.
    pub clean: u64,
    /// Audits with differences, which were repaired.
    pub repaired: u64,
    /// Audits that failed.
    pub failed: u64,
    /// Lasting differences, by kind: `Service`, `EndpointSlice`, `frontend`.
    pub differences: BTreeMap<&'static str, u64>,
}

/// The counts, which the metrics read.
#[derive(Debug, Default)]
pub struct Audits(Mutex<Counts>);

impl Audits {
    /// Returns the counts so far.
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

/// The differences that an audit found and had repaired.
#[derive(Debug, Default, PartialEq, Eq)]
struct Differences {
    /// Services and EndpointSlices whose content in the agent differed from the API server's.
    objects: Vec<Key>,
    /// Frontends whose content in the maps differed from the agent's desired state.
    frontends: Vec<FrontendKey>,
}

impl Differences {
    const fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.frontends.is_empty()
    }
}

/// Runs an audit every `period` until the driver ends. The node's name determines the time of the first one within the
/// first period, so that the audits of the nodes are spread.
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
            Ok(differences) => log(&differences),
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

fn log(differences: &Differences) {
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

/// Returns the time of this node's audit within a period, from a hash of its name.
fn turn(node_name: &str, period: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    node_name.hash(&mut hasher);
    let part = u32::try_from(hasher.finish() & 0xffff).unwrap_or_default();
    period * part / 0x1_0000
}

#[cfg(test)]
mod tests;
