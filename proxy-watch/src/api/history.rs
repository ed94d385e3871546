//! Whether the API server's history is still the one from which a watch was started.
//!
//! resourceVersions are numbers that grow (KEP-5504), until etcd is restored from a snapshot: then etcd assigns the
//! same numbers again, to other objects. The API server accepts a watch from a version that it has not reached yet, or
//! that it has reached through other changes, and no event of such a watch shows that. So after a watch has broken, the
//! agent requests the objects that changed last: a history without these changes is a different one.
//!
//! The rule that a version only moves forward does not replace this. Say that the agent has reached version 1000, etcd is
//! restored at version 900, and while the watch is broken, the server makes 150 other changes. The watch resumes at 1000, every
//! later event and bookmark has a higher version, and the changes from 901 to 1000 never arrive.

use http::StatusCode;

use super::kinds::Watched;
use super::transport::Source;

/// Number of changes that are kept: if the watch reports that all of their objects were deleted, every agent lists again at the next
/// break.
const KEPT: usize = 128;

/// A change of an object, as the watch reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    namespace: Option<String>,
    name: String,
    version: u64,
}

/// The newest changes that the agent knows of one kind.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The newest changes that created or updated objects that were not deleted later, each of another object, the newest first.
    applied: Vec<Change>,
    /// The newest deletion.
    deleted: Option<Change>,
}

impl History {
    /// Records that an object was created or updated. The objects of a list come in any order.
    pub fn applied<K: Watched>(&mut self, object: &K) {
        let version = version_of(object);
        if self.applied.get(KEPT - 1).is_some_and(|oldest| version < oldest.version) {
            return;
        }
        let change = change_of(object, version);
        self.applied.retain(|known| !known.is_of(&change));
        let at = self.applied.partition_point(|known| known.version > version);
        self.applied.insert(at, change);
        self.applied.truncate(KEPT);
    }

    /// Records that an object was deleted.
    pub fn deleted<K: Watched>(&mut self, object: &K) {
        let deleted = change_of(object, version_of(object));
        self.applied.retain(|known| !known.is_of(&deleted));
        self.deleted = Some(deleted);
    }

    /// Requests the object of the newest change, and that of a later deletion, and compares the server's history with these changes.
    /// An object that has changed since proves nothing as it is now, so it is requested as it was. Only an object whose deletion the
    /// watch has reported is replaced by the one before: one that is just absent may be what a restore took away.
    pub async fn compare<K: Watched>(&self, source: &Source<K>) -> kube::Result<Comparison> {
        let Some(newest) = self.applied.first() else {
            return Ok(Comparison::Unknown("no object of the newest changes is left"));
        };
        let found = match newest.look_up(source).await? {
            Found::Older => Comparison::Other,
            Found::Same => Comparison::Same,
            Found::Changed => newest.compare_past(source).await?,
        };
        if found != Comparison::Same {
            return Ok(found);
        }
        let Some(deleted) = self.deleted.as_ref().filter(|deleted| deleted.version >= newest.version) else {
            return Ok(Comparison::Same);
        };
        // An object that has only left the selection is still there, in a version that is not older.
        let is_other = deleted.look_up(source).await? == Found::Older;
        Ok(if is_other { Comparison::Other } else { Comparison::Same })
    }
}

/// Whether the server's history is the known one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// It has the newest known changes.
    Same,
    /// It does not have them.
    Other,
    /// Nothing shows it, for this reason.
    Unknown(&'static str),
}

/// What the server has of the object of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The server has not reached the change: another history.
    Older,
    /// The object in the version of the change.
    Same,
    /// A newer version of the object, another object, or none.
    Changed,
}

impl Change {
    fn is_of(&self, other: &Self) -> bool {
        (&self.namespace, &self.name) == (&other.namespace, &other.name)
    }

    async fn look_up<K: Watched>(&self, source: &Source<K>) -> kube::Result<Found> {
        let list = source.find(self.namespace.as_deref(), &self.name, None).await?;
        let newest = number(list.metadata.resource_version.as_deref()).unwrap_or_default();
        Ok(self.compare(newest, list.items.first().map(version_of)))
    }

    /// `newest`: the version of the server's answer, 0 if it is unknown; `found`: the version of the object with this name.
    fn compare(&self, newest: u64, found: Option<u64>) -> Found {
        match found {
            _ if (1..self.version).contains(&newest) => Found::Older,
            Some(version) if version < self.version => Found::Older,
            Some(version) if version == self.version => Found::Same,
            _ => Found::Changed,
        }
    }

    /// Compares by whether the object was in this version when the server was at this version.
    async fn compare_past<K: Watched>(&self, source: &Source<K>) -> kube::Result<Comparison> {
        match source.find(self.namespace.as_deref(), &self.name, Some(self.version)).await {
            Ok(list) if list.items.first().is_some_and(|object| version_of(object) == self.version) => {
                Ok(Comparison::Same)
            }
            Ok(_) => Ok(Comparison::Other),
            // Compacted, in a restored history as well as in the known one.
            Err(kube::Error::Api(status)) if StatusCode::GONE == status.code => {
                Ok(Comparison::Unknown("the version of the newest change is no longer known"))
            }
            Err(error) => Err(error),
        }
    }
}

fn change_of<K: Watched>(object: &K, version: u64) -> Change {
    let meta = object.meta();
    Change { namespace: meta.namespace.clone(), name: meta.name.clone().unwrap_or_default(), version }
}

fn version_of<K: Watched>(object: &K) -> u64 {
    number(object.meta().resource_version.as_deref()).unwrap_or_default()
}

/// Returns a version as a number; `None` if it is none.
pub fn number(version: Option<&str>) -> Option<u64> {
    version?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::objects::Service;

    fn compare(newest: u64, found: Option<u64>) -> Found {
        Change { namespace: None, name: "a".to_owned(), version: 50 }.compare(newest, found)
    }

    #[test]
    fn older_object_or_server_shows_another_history() {
        assert_eq!(compare(49, None), Found::Older, "the server has not reached the change");
        assert_eq!(compare(90, Some(49)), Found::Older);
        assert_eq!(compare(90, Some(50)), Found::Same);
        assert_eq!(compare(90, Some(70)), Found::Changed);
        assert_eq!(compare(90, None), Found::Changed, "deleted since");
    }

    fn service(name: &str, version: u64) -> Service {
        let metadata = json!({"name": name, "namespace": "default", "resourceVersion": version.to_string()});
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    fn kept(history: &History) -> Vec<(&str, u64)> {
        history.applied.iter().map(|change| (&*change.name, change.version)).collect()
    }

    #[test]
    fn deleted_object_leaves_the_change_before() {
        let mut history = History::default();
        for (name, version) in [("old", 10), ("ghost", 30), ("job", 31), ("ghost", 32)] {
            history.applied(&service(name, version));
        }
        assert_eq!(kept(&history), [("ghost", 32), ("job", 31), ("old", 10)], "one change of each object");
        history.deleted(&service("ghost", 33));
        assert_eq!(kept(&history), [("job", 31), ("old", 10)]);
    }

    #[test]
    fn newest_changes_of_a_list_are_kept_in_any_order() {
        let mut history = History::default();
        for version in 0..320 {
            // 7 and 320 have no common divisor: each version once.
            let version = version * 7 % 320 + 1;
            history.applied(&service(&format!("s{version}"), version));
        }
        let versions: Vec<u64> = history.applied.iter().map(|change| change.version).collect();
        assert_eq!(versions, (193..=320).rev().collect::<Vec<_>>());
    }
}
