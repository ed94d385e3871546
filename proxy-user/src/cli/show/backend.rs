//! `ballast backend list`.

use std::fmt::{self, Write as _};
use std::net::SocketAddr;

use serde::Serialize;

use super::error::ShowError;
use super::filter::Scope;
use super::list::{Column, List, Row};
use super::names::title;
use crate::cli::args::list::ListOutput;
use crate::maps::view::{BackendRow, BackendState, Snapshot};

/// An endpoint.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendJson {
    id: u32,
    address: SocketAddr,
    protocol: String,
    /// `namespace/name:port`.
    service: String,
    service_id: u32,
    /// `active`; `gone`: the endpoint was removed, and connections drain; `reset`: it was removed, and connections are reset.
    state: &'static str,
    /// The endpoint runs on this node.
    local: bool,
    terminating: bool,
    /// For how many more seconds new connections skip the endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    ejected_seconds: Option<u32>,
    /// Number of flows that a removed endpoint still has.
    #[serde(skip_serializing_if = "Option::is_none")]
    flows_left: Option<u64>,
    /// The endpoint's share.
    weight: u32,
    /// Number of connections since the id was assigned.
    connections: u64,
    /// Number of open connections, if the algorithm of the Service counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    open: Option<u64>,
}

/// Returns one row for each endpoint of the Service ports in `scope`.
pub fn list(snapshot: &Snapshot, scope: &Scope) -> Result<List<BackendJson>, ShowError> {
    scope.check(snapshot)?;
    let rows = snapshot.backends.iter().filter(|(_, row)| scope.takes(row.service, snapshot));
    Ok(of_rows(rows.map(|(id, row)| (*id, row)), snapshot, true))
}

/// Returns the endpoints of one Service port.
pub(super) fn of(service: u32, snapshot: &Snapshot) -> impl Iterator<Item = (u32, &BackendRow)> {
    snapshot.backends.iter().filter(move |(_, row)| row.service == service).map(|(id, row)| (*id, row))
}

/// Returns the endpoints of one Service port as a table.
pub(super) fn table(service: u32, snapshot: &Snapshot) -> Result<String, ShowError> {
    of_rows(of(service, snapshot), snapshot, false).render(ListOutput::Text, true)
}

fn of_rows<'a>(
    rows: impl Iterator<Item = (u32, &'a BackendRow)>,
    snapshot: &Snapshot,
    with_service: bool,
) -> List<BackendJson> {
    let service = Column::new("SERVICE");
    let columns = [
        Column::new("ID").number(),
        Column::new("ENDPOINT"),
        Column::new("STATE"),
        Column::new("LOCAL"),
        Column::new("WEIGHT").number(),
        Column::new("CONNECTIONS").number(),
        Column::new("OPEN").number().sorted_by("open"),
        if with_service { service } else { service.wide() },
    ];
    let mut list = List::new("backends", columns, "No endpoints are programmed.");
    for (id, row) in rows {
        let mut state = row.state.label().to_owned();
        if row.terminating {
            state.push_str(", terminating");
        }
        if let Some(flows) = flows_left(id, row, snapshot).filter(|flows| *flows > 0) {
            let _ = write!(state, ", {flows} flow{} left", if flows == 1 { "" } else { "s" });
        }
        if let Some(seconds) = snapshot.ejected.get(&id) {
            let _ = write!(state, ", ejected for {seconds}s");
        }
        let endpoint = format!("{}/{}", row.socket, row.protocol);
        let cells = vec![
            id.to_string(),
            endpoint.clone(),
            state,
            if row.local { "yes" } else { "no" }.to_owned(),
            row.weight.to_string(),
            snapshot.backend_stats.get(&id).copied().unwrap_or_default().to_string(),
            open(id, row, snapshot).map_or_else(|| "-".to_owned(), |count| count.to_string()),
            title(row.service, snapshot),
        ];
        let key = format!("{id} {endpoint} {}", row.service);
        list.push(Row { group: "backends", name: endpoint, key, cells, value: element(id, row, snapshot) });
    }
    list
}

pub(super) fn element(id: u32, row: &BackendRow, snapshot: &Snapshot) -> BackendJson {
    BackendJson {
        id,
        address: row.socket,
        protocol: row.protocol.to_string(),
        service: title(row.service, snapshot),
        service_id: row.service,
        state: row.state.label(),
        local: row.local,
        terminating: row.terminating,
        ejected_seconds: snapshot.ejected.get(&id).copied(),
        flows_left: flows_left(id, row, snapshot),
        weight: row.weight,
        connections: snapshot.backend_stats.get(&id).copied().unwrap_or_default(),
        open: open(id, row, snapshot),
    }
}

/// Returns the number of flows that a removed endpoint still has; `None` if the endpoint was not removed.
fn flows_left(id: u32, row: &BackendRow, snapshot: &Snapshot) -> Option<u64> {
    (row.state != BackendState::Active).then(|| snapshot.left.get(&id).copied().unwrap_or_default())
}

/// Removed endpoints of a Service port, and the flows that they still have.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Draining {
    endpoints: u64,
    flows: u64,
}

impl fmt::Display for Draining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoints, flows } = self;
        write!(f, "{endpoints} ({flows} flow{})", if *flows == 1 { "" } else { "s" })
    }
}

/// Counts the removed endpoints of a Service port whose ids are still in use; `None` if there are none.
pub(super) fn draining(service: u32, snapshot: &Snapshot) -> Option<Draining> {
    let left = of(service, snapshot);
    let flows = left.filter_map(|(id, row)| flows_left(id, row, snapshot));
    let (endpoints, flows) = flows.fold((0, 0), |(endpoints, sum), flows| (endpoints + 1, sum + flows));
    (endpoints > 0).then_some(Draining { endpoints, flows })
}

/// Returns the open connections of an endpoint; `None` if they are not counted.
fn open(id: u32, row: &BackendRow, snapshot: &Snapshot) -> Option<u64> {
    let count = snapshot.open_connections.get(&id).copied().unwrap_or_default();
    (count > 0 || snapshot.by_load.contains(&row.service)).then_some(count)
}
