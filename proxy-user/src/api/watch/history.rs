//! Detects that the API server's history is no longer the one that a watch was started from.
//!
//! resourceVersions are numbers that grow (KEP-5504), until etcd is restored from a snapshot: then etcd assigns the
//! same numbers again, to other objects. The API server accepts a watch from a version that it has not reached yet, or
//! that it has reached through other changes. Such a watch sends no event until the server reaches that version, and
//! none for objects that the restore removed.
//!
//! After a failure, the agent therefore asks the server for the object that changed last: a history without that change
//! is a different one.

use std::time::Duration;

use kube::api::{ListParams, ObjectList, PartialObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::{Client, ResourceExt as _};
use tokio::time::timeout;
use tracing::warn;

use crate::api::kinds::Watched;

/// Timeout of the request; the watch itself reports what is wrong with the server.
const PATIENCE: Duration = Duration::from_secs(5);

/// A change of an object, as the watch reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    namespace: Option<String>,
    name: String,
    uid: Option<String>,
    version: u64,
}

/// The newest changes that a watch has reported.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// The newest change that created or updated an object, unless that object was deleted later.
    applied: Option<Change>,
    /// The newest deletion.
    deleted: Option<Change>,
    /// Whether the watch failed since the last comparison: its server may be a different one now.
    is_doubtful: bool,
}

/// The server's current state of an object, and the newest resourceVersion of its list.
struct Found {
    object: Option<(Option<String>, u64)>,
    newest: u64,
}

impl History {
    /// Records an event or error of the watch.
    pub(super) fn observe<K: Watched>(&mut self, item: &watcher::Result<Event<K>>) {
        match item {
            // The list that follows is the server's own history.
            Ok(Event::Init) => *self = Self::default(),
            Ok(Event::InitApply(object) | Event::Apply(object)) => {
                let version = version_of(object);
                if self.applied.as_ref().is_none_or(|before| before.version <= version) {
                    self.applied = Some(change(object));
                }
            }
            Ok(Event::Delete(object)) => {
                let deleted = change(object);
                self.applied.take_if(|applied| applied.uid == deleted.uid && applied.name == deleted.name);
                self.deleted = Some(deleted);
            }
            Ok(Event::InitDone) => {}
            Err(_) => self.is_doubtful = true,
        }
    }

    /// Returns whether, after a failure, the server's history differs from the one that the watch has seen.
    pub(super) async fn went_back<K: Watched>(&mut self, client: &Client) -> bool {
        if !self.is_doubtful {
            return false;
        }
        let applied = self.applied.as_ref();
        let removal = self
            .deleted
            .as_ref()
            .filter(|deleted| applied.is_none_or(|applied| deleted.version >= applied.version));
        let mut is_another = None;
        for (change, is_there) in
            applied.map(|one| (one, true)).into_iter().chain(removal.map(|one| (one, false)))
        {
            // The server still fails; the next call asks again.
            let Some(found) = find::<K>(client, change).await else { return false };
            if change.contradicts(&found, is_there) {
                is_another = Some((found.newest, change.version));
                break;
            }
        }
        self.is_doubtful = false;
        let Some((now, seen)) = is_another else { return false };
        let resource = K::RESOURCE;
        warn!(
            resource,
            now,
            seen,
            "the resourceVersions of the API server went back, as after a restore of etcd; listing again"
        );
        *self = Self::default();
        true
    }
}

impl Change {
    /// Whether this change cannot belong to the history that returned `found`. `is_there`: the change left the object
    /// in place. An absent object may also have been deleted since; a new list does no harm then.
    fn contradicts(&self, found: &Found, is_there: bool) -> bool {
        let is_it = |uid: &Option<String>| *uid == self.uid;
        let is_older = (1..self.version).contains(&found.newest);
        let other = match &found.object {
            None => is_there,
            Some((uid, version)) if is_there => !is_it(uid) || *version < self.version,
            Some((uid, _)) => is_it(uid),
        };
        is_older || other
    }
}

fn change<K: Watched>(object: &K) -> Change {
    Change {
        namespace: object.namespace(),
        name: object.name_any(),
        uid: object.uid(),
        version: version_of(object),
    }
}

/// Requests the object of `change` by its name. A request without a resourceVersion is not answered from a cache, and
/// one with a namespace and a name reads one key of etcd. Returns `None` if there is no answer.
async fn find<K: Watched>(client: &Client, change: &Change) -> Option<Found> {
    let path = K::url_path(&(), change.namespace.as_deref());
    let asked = ListParams::default().fields(&format!("metadata.name={}", change.name)).limit(1);
    let request = kube::core::Request::new(path).list_metadata(&asked).ok()?;
    let answer = timeout(PATIENCE, client.request::<ObjectList<PartialObjectMeta<K>>>(request)).await;
    let list = answer.ok()?.ok()?;
    let object = list
        .items
        .first()
        .map(|object| (object.metadata.uid.clone(), number(object.metadata.resource_version.as_deref())));
    Some(Found { object, newest: number(list.metadata.resource_version.as_deref()) })
}

fn version_of<K: Watched>(object: &K) -> u64 {
    number(object.resource_version().as_deref())
}

/// Returns a version as a number; 0 if it cannot be compared.
fn number(version: Option<&str>) -> u64 {
    version.and_then(|text| text.parse().ok()).unwrap_or_default()
}
