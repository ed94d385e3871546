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
    /// The newest change that created or updated an object that was not deleted later.
    applied: Option<Change>,
    /// The newest deletion.
    deleted: Option<Change>,
}

impl History {
    /// Records that an object was created or updated.
    pub fn applied<K: Watched>(&mut self, object: &K) {
        let version = version_of(object);
        if self.applied.as_ref().is_none_or(|newest| newest.version <= version) {
            self.applied = Some(change_of(object, version));
        }
    }

    /// Records that an object was deleted.
    pub fn deleted<K: Watched>(&mut self, object: &K) {
        let deleted = change_of(object, version_of(object));
        self.applied.take_if(|applied| applied.is_of(&deleted));
        self.deleted = Some(deleted);
    }

    /// Requests the objects of the newest changes, and compares the server's history with these changes. An object that has changed
    /// since proves nothing as it is now, so it is requested as it was.
    pub async fn compare<K: Watched>(&self, source: &Source<K>) -> kube::Result<Comparison> {
        if let Some(applied) = &self.applied {
            let found = match applied.look_up(source).await? {
                Found::Older => Comparison::Other,
                Found::Same => Comparison::Same,
                Found::Changed => applied.compare_past(source).await?,
            };
            if found != Comparison::Same {
                return Ok(found);
            }
        }
        let newest = self.applied.as_ref().map_or(0, |change| change.version);
        let Some(deleted) = self.deleted.as_ref().filter(|deleted| deleted.version >= newest) else {
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
    use super::*;

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
}
