//! Whether the API server's history is still the one that a watch comes from.
//!
//! Versions of objects are numbers that grow (KEP-5504), until etcd is restored from a snapshot: then they come again, for
//! other objects. The API server accepts a watch from a version that it has not reached yet. Such a watch sends no event until that
//! version comes, and none for objects that the restore removed.

use std::time::Duration;

use kube::api::ListParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt as _};
use tokio::time::timeout;
use tracing::warn;

use crate::api::kinds::Watched;

/// How long the question may take: the watch itself says what is wrong with the server.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a watch has seen of the history.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct History {
    /// The newest version of an object.
    newest: u64,
    /// The watch failed since it was last compared: the server may have been another one.
    is_doubtful: bool,
}

impl History {
    /// Something came out of the watch.
    pub(super) fn saw<K: Watched>(&mut self, item: &watcher::Result<Event<K>>) {
        match item {
            // What comes now is the server's own history.
            Ok(Event::Init) => *self = Self::default(),
            Ok(Event::InitApply(object) | Event::Apply(object) | Event::Delete(object)) => {
                self.newest = self.newest.max(number(object.resource_version().as_deref()));
            }
            Ok(Event::InitDone) => {}
            Err(_) => self.is_doubtful = true,
        }
    }

    /// After a failure: whether the server's newest version is older than what the watch has seen.
    pub(super) async fn went_back<K: Watched>(&mut self, api: &Api<K>) -> bool {
        if !self.is_doubtful || self.newest == 0 {
            return false;
        }
        // Without a version it is not answered out of a cache; of one object, it costs next to nothing.
        let asked = ListParams::default().limit(1);
        let Ok(Ok(list)) = timeout(PATIENCE, api.list_metadata(&asked)).await else { return false };
        let (now, seen) = (number(list.metadata.resource_version.as_deref()), self.newest);
        self.is_doubtful = false;
        let is_back = (1..seen).contains(&now);
        if is_back {
            let resource = K::RESOURCE;
            warn!(resource, now, seen, "versions went back, as after a restore of etcd; listing again");
            *self = Self::default();
        }
        is_back
    }
}

/// 0: none that can be compared.
fn number(version: Option<&str>) -> u64 {
    version.and_then(|text| text.parse().ok()).unwrap_or_default()
}
