//! Rows of a snapshot by Service port, so that a list of all Services does not search all rows for each of them.

use std::collections::BTreeMap;
use std::ops::Deref;

use proxy_common::reason::Reason;

use crate::maps::view::{BackendRow, FrontendRow, Snapshot};

/// A snapshot with its frontends and backends by the id of their Service port.
pub(super) struct ByService<'a> {
    snapshot: &'a Snapshot,
    frontends: BTreeMap<u32, Vec<&'a FrontendRow>>,
    backends: BTreeMap<u32, Vec<(u32, &'a BackendRow)>>,
}

impl<'a> ByService<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let mut by_service = Self { snapshot, frontends: BTreeMap::new(), backends: BTreeMap::new() };
        for row in &snapshot.frontends {
            by_service.frontends.entry(row.service).or_default().push(row);
        }
        for (id, row) in &snapshot.backends {
            by_service.backends.entry(row.service).or_default().push((*id, row));
        }
        by_service
    }

    /// Returns the frontends of a Service port.
    pub(super) fn frontends(&self, service: u32) -> &[&'a FrontendRow] {
        self.frontends.get(&service).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the endpoints of a Service port, with their ids.
    pub(super) fn backends(&self, service: u32) -> &[(u32, &'a BackendRow)] {
        self.backends.get(&service).map(Vec::as_slice).unwrap_or_default()
    }
}

impl Deref for ByService<'_> {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        self.snapshot
    }
}

/// Returns the counters of the refusals of a Service port.
pub(super) fn refusals(snapshot: &Snapshot, service: u32) -> impl Iterator<Item = (Reason, u64)> {
    let first = Reason::ALL.iter().min().map(|reason| (service, *reason));
    let rows = first.into_iter().flat_map(|first| snapshot.refusals.range(first..));
    rows.take_while(move |((id, _), _)| *id == service).map(|((_, reason), count)| (*reason, *count))
}
