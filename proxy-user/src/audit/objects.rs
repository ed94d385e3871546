//! Compares the agent's state of the cluster with a new list.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;

use futures::TryStreamExt;
use futures::stream::TryChunksError;
use tokio::time::sleep;

use super::sources::{AuditError, GRACE, Lists};
use crate::driver::{Ask, Question};
use proxy_core::model::{Key, Object};

/// Objects that the driver compares for one question: its other work waits for this.
const PIECE: usize = 256;
/// The most suspects that are read one by one; for more, the audit lists all objects again.
const SINGLE: usize = 64;

/// Finds objects whose content in the driver and in the API server stays different, and has them corrected.
pub(super) async fn audit(lists: &(impl Lists + Sync), driver: &Ask) -> Result<Vec<Key>, AuditError> {
    let suspects = suspects(lists, driver).await?;
    if suspects.is_empty() {
        return Ok(Vec::new());
    }
    sleep(GRACE).await;
    let mut lasting = again(lists, &suspects).await?;
    // An object that has changed since then is on its way to the driver.
    lasting.retain(|key, object| suspects.get(key) == Some(object));
    let correct = driver.ask(|reply| Question::Correct(lasting.into_iter().collect(), reply));
    correct.await.ok_or(AuditError::Ending)
}

/// Returns all objects that differ between driver and API server, with the API server's content; `None`: not listed.
async fn suspects(
    lists: &(impl Lists + Sync),
    driver: &Ask,
) -> Result<BTreeMap<Key, Option<Object>>, AuditError> {
    let mut listed = BTreeSet::new();
    let mut suspects = BTreeMap::new();
    // To save memory, the next objects are read only after the driver has compared these.
    let mut pieces = pin!(lists.all().try_chunks(PIECE));
    while let Some(piece) = pieces.try_next().await.map_err(|TryChunksError(_, error)| error)? {
        listed.extend(piece.iter().map(Object::key));
        let differing =
            driver.ask(|reply| Question::Differing(piece, reply)).await.ok_or(AuditError::Ending)?;
        suspects.extend(differing.into_iter().map(|object| (object.key(), Some(object))));
    }
    let unlisted = driver.ask(|reply| Question::Unlisted(listed, reply)).await.ok_or(AuditError::Ending)?;
    suspects.extend(unlisted.into_iter().map(|key| (key, None)));
    Ok(suspects)
}

/// Returns the current content of the same objects in the API server.
async fn again(
    lists: &(impl Lists + Sync),
    suspects: &BTreeMap<Key, Option<Object>>,
) -> Result<BTreeMap<Key, Option<Object>>, AuditError> {
    let mut found = BTreeMap::new();
    if suspects.len() <= SINGLE {
        for key in suspects.keys() {
            found.insert(key.clone(), lists.one(key).await?);
        }
        return Ok(found);
    }
    found.extend(suspects.keys().map(|key| (key.clone(), None)));
    let mut objects = pin!(lists.all());
    while let Some(object) = objects.try_next().await? {
        if let Some(known) = found.get_mut(&object.key()) {
            *known = Some(object);
        }
    }
    Ok(found)
}
