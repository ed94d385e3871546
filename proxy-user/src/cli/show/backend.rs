//! `ballast backend list`.

use std::fmt::Write as _;
use std::net::SocketAddr;

use serde::Serialize;

use super::service::title;
use super::table::Table;
use super::{ServiceFilter, ShowError, json};
use crate::cli::args::Output;
use crate::maps::view::{BackendRow, Snapshot};

/// `{"backends": [...]}`.
#[derive(Serialize)]
struct ListJson {
    backends: Vec<BackendJson>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BackendJson {
    id: u32,
    address: SocketAddr,
    protocol: String,
    /// `namespace/name:port`.
    service: String,
    service_id: u32,
    /// `active` or `gone`.
    state: &'static str,
    /// It runs on this node.
    local: bool,
    terminating: bool,
    /// For so many more seconds new connections skip it.
    #[serde(skip_serializing_if = "Option::is_none")]
    ejected_seconds: Option<u32>,
    /// How large its share is.
    weight: u32,
    /// Connections begun since the id is in use.
    connections: u64,
    /// Those of them that are open, where the Service is spread by them.
    #[serde(skip_serializing_if = "Option::is_none")]
    open: Option<u64>,
}

/// One line for each endpoint of the Service ports that `filter` means, or of all.
pub fn list(
    snapshot: &Snapshot,
    filter: Option<&ServiceFilter>,
    output: Output,
) -> Result<String, ShowError> {
    let meant = |row: &BackendRow| {
        filter.is_none_or(|filter| {
            snapshot.names.get(&row.service).is_some_and(|name| filter.matches(row.service, name, snapshot))
        })
    };
    let rows = snapshot.backends.iter().map(|(id, row)| (*id, row)).filter(|(_, row)| meant(row));
    if output == Output::Json {
        return json(&ListJson { backends: rows.map(|(id, row)| element(id, row, snapshot)).collect() });
    }
    Ok(table(rows, snapshot, true))
}

/// The endpoints of one Service port.
pub(super) fn of(service: u32, snapshot: &Snapshot) -> impl Iterator<Item = (u32, &BackendRow)> {
    snapshot.backends.iter().filter(move |(_, row)| row.service == service).map(|(id, row)| (*id, row))
}

pub(super) fn table<'a>(
    rows: impl Iterator<Item = (u32, &'a BackendRow)>,
    snapshot: &Snapshot,
    with_service: bool,
) -> String {
    let headings = ["ID", "ENDPOINT", "STATE", "LOCAL", "WEIGHT", "CONNECTIONS", "OPEN", "SERVICE"];
    let columns = if with_service { headings.len() } else { headings.len() - 1 };
    let mut table = Table::new(headings.into_iter().take(columns)).right(&[0, 4, 5, 6]);
    for (id, row) in rows {
        let mut state = row.state.label().to_owned();
        if row.terminating {
            state.push_str(", terminating");
        }
        if let Some(seconds) = snapshot.ejected.get(&id) {
            let _ = write!(state, ", ejected for {seconds}s");
        }
        let cells = [
            id.to_string(),
            format!("{}/{}", row.socket, row.protocol),
            state,
            if row.local { "yes" } else { "no" }.to_owned(),
            row.weight.to_string(),
            snapshot.backend_stats.get(&id).copied().unwrap_or_default().to_string(),
            open(id, row, snapshot).map_or_else(|| "-".to_owned(), |count| count.to_string()),
            title(row.service, snapshot),
        ];
        table.row(cells.into_iter().take(columns));
    }
    table.render("No endpoints are programmed.")
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
        weight: row.weight,
        connections: snapshot.backend_stats.get(&id).copied().unwrap_or_default(),
        open: open(id, row, snapshot),
    }
}

/// Open connections of an endpoint; `None` where they are not counted.
fn open(id: u32, row: &BackendRow, snapshot: &Snapshot) -> Option<u64> {
    let count = snapshot.open_connections.get(&id).copied().unwrap_or_default();
    (count > 0 || snapshot.by_load.contains(&row.service)).then_some(count)
}
