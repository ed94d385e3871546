//! Names of Service ports, and unmanaged addresses.

use crate::maps::view::{Snapshot, UnmanagedRow, View};

use super::error::ShowError;

/// Reads the part of the maps that the names of Services need.
pub(super) fn names(view: &View) -> Result<Snapshot, ShowError> {
    Ok(Snapshot { names: view.names()?, frontends: view.services()?, ..Snapshot::default() })
}

/// Returns `namespace/name:port`, or `id N` if the id has no name.
pub(super) fn title(id: u32, snapshot: &Snapshot) -> String {
    snapshot.names.get(&id).map_or_else(|| format!("id {id}"), ToString::to_string)
}

/// Describes the unmanaged cluster addresses; the maps do not contain the names of their Services.
pub(super) fn left_alone(snapshot: &Snapshot) -> Option<String> {
    let each = |row: &UnmanagedRow| format!("{} ({})", row.address, row.why());
    let all: Vec<_> = snapshot.unmanaged.iter().map(each).collect();
    (!all.is_empty()).then(|| all.join(", "))
}
