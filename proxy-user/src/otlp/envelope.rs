//! The documents that carry telemetry: `LogsData` and `TracesData`. They are also the bodies of export requests, and differ
//! only in names.

use serde::Serialize;
use serde::ser::{SerializeMap as _, Serializer};

use super::resource::{Resource, SCOPE};

/// Names of a document's three nested lists, outermost first.
pub(super) type Names = [&'static str; 3];

/// An element of a list: the resource or scope, and the list of its telemetry, each with its name.
struct OwnerAndList<'a, W, T>((&'static str, W), (&'static str, &'a [T]));

impl<W: Serialize, T: Serialize> Serialize for OwnerAndList<'_, W, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self((name, what), (list, elements)) = self;
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry(name, what)?;
        map.serialize_entry(list, elements)?;
        map.end()
    }
}

/// Returns records or spans as one JSON document without line breaks.
pub(super) fn document<T: Serialize>(
    resource: &Resource,
    [resources, scopes, list]: Names,
    elements: &[T],
) -> serde_json::Result<String> {
    let scope = OwnerAndList(("scope", SCOPE), (list, elements));
    let resource = OwnerAndList(("resource", resource), (scopes, &[scope]));
    serde_json::to_string(&std::collections::BTreeMap::from([(resources, [resource])]))
}
