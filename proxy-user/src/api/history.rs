//! Whether the API server's history is still the one from which a watch was started.
//!
//! resourceVersions are numbers that grow (KEP-5504), until etcd is restored from a snapshot: then etcd assigns the
//! same numbers again, to other objects. The API server accepts a watch from a version that it has not reached yet, or
//! that it has reached through other changes, and no event of such a watch shows that. So after a watch has broken, the
//! agent requests the object that changed last: a history without that change is a different one.

use super::kinds::Watched;
use super::transport::Source;

/// A change of an object, as the watch reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    namespace: Option<String>,
    name: String,
    uid: Option<String>,
    version: u64,
}

/// The newest changes that the agent knows of one kind.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The newest change that created or updated an object, unless that object was deleted later.
    applied: Option<Change>,
    /// The newest deletion.
    deleted: Option<Change>,
}

impl History {
    /// Records that an object was created or updated.
    pub fn applied<K: Watched>(&mut self, object: &K) {
        let version = version_of(object);
        if self.applied.as_ref().is_none_or(|before| before.version <= version) {
            self.applied = Some(change(object, version));
        }
    }

    /// Records that an object was deleted.
    pub fn deleted<K: Watched>(&mut self, object: &K) {
        let deleted = change(object, version_of(object));
        self.applied.take_if(|applied| applied.uid == deleted.uid && applied.name == deleted.name);
        self.deleted = Some(deleted);
    }

    /// Requests the objects of the newest changes; returns whether the server's history has these changes.
    pub async fn is_that_of<K: Watched>(&self, source: &Source<K>) -> kube::Result<bool> {
        let applied = self.applied.as_ref();
        let removal = self.deleted.as_ref();
        let removal =
            removal.filter(|deleted| applied.is_none_or(|applied| deleted.version >= applied.version));
        for (change, is_there) in
            applied.map(|one| (one, true)).into_iter().chain(removal.map(|one| (one, false)))
        {
            let list = source.find(change.namespace.as_deref(), &change.name).await?;
            let newest = number(list.metadata.resource_version.as_deref()).unwrap_or_default();
            let found = list.items.first().map(|object| (object.meta().uid.as_ref(), version_of(object)));
            if (1..change.version).contains(&newest) || change.contradicts(found, is_there) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Change {
    /// Whether this change cannot belong to a history with the object `found`. `is_there`: the change left the object
    /// in place. An absent object may also have been deleted since; a new list does no harm then.
    fn contradicts(&self, found: Option<(Option<&String>, u64)>, is_there: bool) -> bool {
        let is_it = |uid: Option<&String>| uid == self.uid.as_ref();
        match found {
            None => is_there,
            Some((uid, version)) if is_there => !is_it(uid) || version < self.version,
            // An object that has only left the selection is still there, in a version that is not older.
            Some((uid, version)) => is_it(uid) && version < self.version,
        }
    }
}

fn change<K: Watched>(object: &K, version: u64) -> Change {
    let meta = object.meta();
    Change {
        namespace: meta.namespace.clone(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone(),
        version,
    }
}

fn version_of<K: Watched>(object: &K) -> u64 {
    number(object.meta().resource_version.as_deref()).unwrap_or_default()
}

/// Returns a version as a number; `None` if it is none.
pub fn number(version: Option<&str>) -> Option<u64> {
    version?.parse().ok()
}
