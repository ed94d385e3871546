//! Whether the API server's history is still the one that a watch comes from.
//!
//! Versions of objects are numbers that grow (KEP-5504), until etcd is restored from a snapshot: then they come again, for
//! other objects. The API server accepts a watch from a version that it has not reached yet, or has reached by other changes. Such a
//! watch sends no event until that version comes, and none for objects that the restore removed.
//!
//! So after a failure the server is asked for the object that changed last: a history without that change is another one.

use std::time::Duration;

use kube::api::{ListParams, ObjectList, PartialObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::{Client, ResourceExt as _};
use tokio::time::timeout;
use tracing::warn;

use crate::api::kinds::Watched;

/// How long the question may take: the watch itself says what is wrong with the server.
const PATIENCE: Duration = Duration::from_secs(5);

/// A change of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    namespace: Option<String>,
    name: String,
    uid: Option<String>,
    version: u64,
}

/// What a watch has seen of the history.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// The newest change that left its object there.
    applied: Option<Change>,
    /// The newest removal.
    deleted: Option<Change>,
    /// The watch failed since it was last compared: the server may have been another one.
    is_doubtful: bool,
}

/// What the server has of an object, and its newest version.
struct Found {
    object: Option<(Option<String>, u64)>,
    newest: u64,
}

impl History {
    /// Something came out of the watch.
    pub(super) fn saw<K: Watched>(&mut self, item: &watcher::Result<Event<K>>) {
        match item {
            // What comes now is the server's own history.
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

    /// After a failure: whether the server's history is another one than the watch has seen.
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
            // The failure goes on: the question will be asked again.
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
    /// Whether a history with this change cannot be the one where `found` was found. An object that is not there may have been
    /// removed since; then nothing is lost by a new list.
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

/// Without a version the question is not answered out of a cache; within a namespace and by name it is about one key of etcd.
/// `None`: no answer.
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

/// 0: none that can be compared.
fn number(version: Option<&str>) -> u64 {
    version.and_then(|text| text.parse().ok()).unwrap_or_default()
}
