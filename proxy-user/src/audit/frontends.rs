//! Compares the content of the maps with a new plan of every Service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tokio::time::sleep;

use super::sources::{AuditError, Frontends, GRACE};
use crate::driver::{Ask, Question};
use proxy_core::store::FrontendKey;
use proxy_core::sync::Expected;

/// Services that the driver plans for one question: its other work waits for this.
const PIECE: usize = 32;

type Found = BTreeMap<FrontendKey, BTreeSet<SocketAddr>>;

/// Finds frontends whose content in the maps stays wrong, and has the maps repaired.
pub(super) async fn audit(
    maps: &(impl Frontends + Sync),
    driver: &Ask,
) -> Result<Vec<FrontendKey>, AuditError> {
    let before = differing(maps, driver).await?;
    if before.is_empty() {
        return Ok(Vec::new());
    }
    sleep(GRACE).await;
    let after = differing(maps, driver).await?;
    let lasting: Vec<_> = after.into_iter().filter(|(key, it)| before.get(key) == Some(it)).collect();
    if !lasting.is_empty() {
        driver.ask(Question::Repair).await.ok_or(AuditError::Ending)?;
    }
    Ok(lasting.into_iter().map(|(key, _)| key).collect())
}

/// The desired and the found endpoints of one frontend; `None`: there is no such frontend.
type Difference = (Option<BTreeSet<SocketAddr>>, Option<BTreeSet<SocketAddr>>);

async fn differing(
    maps: &(impl Frontends + Sync),
    driver: &Ask,
) -> Result<BTreeMap<FrontendKey, Difference>, AuditError> {
    let found = maps.read().await?;
    let mut expected = Expected::new();
    let mut after = None;
    loop {
        let from = after.clone();
        let (more, last) =
            driver.ask(|reply| Question::Expected(from, PIECE, reply)).await.ok_or(AuditError::Ending)?;
        expected.extend(more);
        if last.is_none() {
            return Ok(compare(expected, found));
        }
        after = last;
    }
}

fn compare(expected: Expected, mut found: Found) -> BTreeMap<FrontendKey, Difference> {
    let mut differing = BTreeMap::new();
    for (key, wanted) in expected {
        let found = found.remove(&key);
        if let Some(wanted) = wanted
            && found.as_ref() != Some(&wanted)
        {
            differing.insert(key, (Some(wanted), found));
        }
    }
    differing.extend(found.into_iter().map(|(key, found)| (key, (None, Some(found)))));
    differing
}
