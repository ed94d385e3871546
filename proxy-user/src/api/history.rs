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

use std::collections::VecDeque;

use super::kinds::Watched;
use super::transport::Source;

/// Number of objects whose newest changes are kept: if all of them are deleted while the watch is broken, as with a namespace,
/// every agent lists again at the same time.
const KEPT: usize = 16;

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
    /// The newest changes that created or updated objects that were not deleted later, each of another object, the oldest first.
    applied: VecDeque<Change>,
    /// The newest deletion.
    deleted: Option<Change>,
}

impl History {
    /// Records that an object was created or updated.
    pub fn applied<K: Watched>(&mut self, object: &K) {
        let version = version_of(object);
        let newest = self.applied.back();
        if newest.is_some_and(|newest| newest.version > version) {
            return;
        }
        let change = change_of(object, version);
        self.applied.retain(|known| !known.is_of(&change));
        if self.applied.len() == KEPT {
            self.applied.pop_front();
        }
        self.applied.push_back(change);
    }

    /// Records that an object was deleted.
    pub fn deleted<K: Watched>(&mut self, object: &K) {
        let deleted = change_of(object, version_of(object));
        self.applied.retain(|known| !known.is_of(&deleted));
        self.deleted = Some(deleted);
    }

    /// Requests the objects of the newest changes; returns whether the server's history has these changes.
    ///
    /// An object that is absent may have been deleted since, which shows nothing: the one before is requested. If none is there,
    /// the history is taken to be another one.
    pub async fn is_that_of<K: Watched>(&self, source: &Source<K>) -> kube::Result<bool> {
        let mut shown = self.applied.is_empty();
        for change in self.applied.iter().rev() {
            match change.look_up(source).await? {
                Found::Older => return Ok(false),
                Found::Nothing => {}
                Found::SameOrNewer => {
                    shown = true;
                    break;
                }
            }
        }
        let newest = self.applied.back().map_or(0, |change| change.version);
        let Some(deleted) = self.deleted.as_ref().filter(|deleted| shown && deleted.version >= newest) else {
            return Ok(shown);
        };
        // An object that has only left the selection is still there, in a version that is not older.
        Ok(deleted.look_up(source).await? != Found::Older)
    }
}

/// What the server has of the object of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The server has not reached the change: another history.
    Older,
    /// The server has another object, or none.
    Nothing,
    /// The object, in the version of the change or a newer one.
    SameOrNewer,
}

impl Change {
    fn is_of(&self, other: &Self) -> bool {
        (&self.namespace, &self.name) == (&other.namespace, &other.name)
    }

    async fn look_up<K: Watched>(&self, source: &Source<K>) -> kube::Result<Found> {
        let list = source.find(self.namespace.as_deref(), &self.name).await?;
        let newest = number(list.metadata.resource_version.as_deref()).unwrap_or_default();
        let found = list.items.first().map(|object| (object.meta().uid.as_ref(), version_of(object)));
        Ok(self.compare(newest, found))
    }

    /// `newest`: the version of the server's answer, 0 if it is unknown; `found`: the object with this name.
    fn compare(&self, newest: u64, found: Option<(Option<&String>, u64)>) -> Found {
        match found {
            _ if (1..self.version).contains(&newest) => Found::Older,
            Some((_, version)) if version < self.version => Found::Older,
            Some((uid, _)) if uid == self.uid.as_ref() => Found::SameOrNewer,
            // The object was deleted, and perhaps another one was created, after the change.
            _ => Found::Nothing,
        }
    }
}

fn change_of<K: Watched>(object: &K, version: u64) -> Change {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(newest: u64, found: Option<(&str, u64)>) -> Found {
        let text = |uid: &str| uid.to_owned();
        let change = Change { namespace: None, name: text("a"), uid: Some(text("1")), version: 50 };
        let found = found.map(|(uid, version)| (text(uid), version));
        change.compare(newest, found.as_ref().map(|(uid, version)| (Some(uid), *version)))
    }

    #[test]
    fn older_object_or_server_shows_another_history() {
        assert_eq!(compare(49, None), Found::Older, "the server has not reached the change");
        assert_eq!(compare(90, Some(("1", 49))), Found::Older);
        assert_eq!(compare(90, Some(("2", 20))), Found::Older);
        assert_eq!(compare(90, Some(("1", 50))), Found::SameOrNewer);
        assert_eq!(compare(0, Some(("1", 70))), Found::SameOrNewer);
        assert_eq!(compare(90, None), Found::Nothing, "deleted since");
        assert_eq!(compare(90, Some(("2", 80))), Found::Nothing, "deleted and created since");
    }
}
