//! Compares what the agent knows of the cluster with a fresh list.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;

use futures::TryStreamExt;
use futures::stream::TryChunksError;
use tokio::time::sleep;

use super::sources::{Ask, AuditError, GRACE, Lists};
use crate::model::{Key, Object};
use crate::sync::Question;

/// Objects that the driver compares in one go: its other work waits meanwhile.
const PIECE: usize = 256;
/// Suspects that are asked for one by one; of more, all are listed again.
const SINGLE: usize = 64;

/// Finds objects of which driver and API server say different things for long, and has them corrected.
pub(super) async fn audit(lists: &(impl Lists + Sync), driver: &Ask) -> Result<Vec<Key>, AuditError> {
    let suspects = suspects(lists, driver).await?;
    if suspects.is_empty() {
        return Ok(Vec::new());
    }
    sleep(GRACE).await;
    let mut lasting = again(lists, &suspects).await?;
    // What has changed meanwhile is under way.
    lasting.retain(|key, object| suspects.get(key) == Some(object));
    driver.ask(|reply| Question::Correct(lasting.into_iter().collect(), reply)).await
}

/// All objects of which they say different things, as the API server has them.
async fn suspects(
    lists: &(impl Lists + Sync),
    driver: &Ask,
) -> Result<BTreeMap<Key, Option<Object>>, AuditError> {
    let mut listed = BTreeSet::new();
    let mut suspects = BTreeMap::new();
    // A list is not held as a whole: the next objects are asked for when the driver has compared these.
    let mut pieces = pin!(lists.all().try_chunks(PIECE));
    while let Some(piece) = pieces.try_next().await.map_err(|TryChunksError(_, error)| error)? {
        listed.extend(piece.iter().map(Object::key));
        let differing = driver.ask(|reply| Question::Differing(piece, reply)).await?;
        suspects.extend(differing.into_iter().map(|object| (object.key(), Some(object))));
    }
    let unlisted = driver.ask(|reply| Question::Unlisted(listed, reply)).await?;
    suspects.extend(unlisted.into_iter().map(|key| (key, None)));
    Ok(suspects)
}

/// The same objects as the API server has them now.
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
