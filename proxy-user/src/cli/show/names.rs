//! What Service ports are called, and what is left alone.

use crate::maps::view::{Snapshot, UnmanagedRow, View};

use super::error::ShowError;

/// As much of the maps as names of Services take.
pub(super) fn names(view: &View) -> Result<Snapshot, ShowError> {
    Ok(Snapshot { names: view.names()?, frontends: view.services()?, ..Snapshot::default() })
}

/// `namespace/name:port`, or the bare id.
pub(super) fn title(id: u32, snapshot: &Snapshot) -> String {
    snapshot.names.get(&id).map_or_else(|| format!("id {id}"), ToString::to_string)
}

/// The cluster addresses that are left alone, in words: they stand nowhere with the name of their Service.
pub(super) fn left_alone(snapshot: &Snapshot) -> Option<String> {
    let each = |row: &UnmanagedRow| format!("{} ({})", row.address, row.why());
    let all: Vec<_> = snapshot.unmanaged.iter().map(each).collect();
    (!all.is_empty()).then(|| all.join(", "))
}
