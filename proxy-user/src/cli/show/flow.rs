//! `ballast flow list`.

use std::net::{IpAddr, SocketAddr};

use serde::Serialize;

use super::service::title;
use super::table::{Table, age};
use super::{ServiceFilter, ShowError, json};
use crate::cli::args::Output;
use crate::maps::view::{FlowRow, FlowState, Snapshot};

/// Which connections are meant.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Those to these Service ports.
    pub service: Option<ServiceFilter>,
    /// Those of this client.
    pub client: Option<IpAddr>,
    /// Expired ones too.
    pub all: bool,
}

/// `{"flows": [...]}`.
#[derive(Serialize)]
struct ListJson {
    flows: Vec<FlowJson>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FlowJson {
    protocol: String,
    client: SocketAddr,
    frontend: SocketAddr,
    backend: SocketAddr,
    /// Whom the backend sees; the client itself where nothing is changed.
    source: SocketAddr,
    /// `namespace/name:port`.
    service: String,
    service_id: u32,
    backend_id: u32,
    /// `unreplied`, `half-open`, `established`, `closing`, `closed`, `expired`.
    state: &'static str,
    /// `dnat`, `snat`, `dsr`, `direct`.
    forwarding: &'static str,
    age_seconds: f64,
    idle_seconds: f64,
}

/// One line for each connection that `selection` means.
pub fn list(
    rows: &[FlowRow],
    snapshot: &Snapshot,
    selection: &Selection,
    output: Output,
) -> Result<String, ShowError> {
    let rows = rows.iter().filter(|row| meant(row, snapshot, selection));
    if output == Output::Json {
        return json(&ListJson { flows: rows.map(|row| element(row, snapshot)).collect() });
    }
    let headings = [
        "PROTO",
        "CLIENT",
        "FRONTEND",
        "BACKEND",
        "STATE",
        "AGE",
        "IDLE",
        "SERVICE",
        "FORWARDING",
        "SOURCE",
        "BACKEND-ID",
    ];
    let columns = if output.is_wide() { headings.len() } else { 7 };
    let mut table = Table::new(headings.into_iter().take(columns)).right(&[5, 6]);
    for row in rows {
        let cells = [
            row.protocol.to_string(),
            row.client.to_string(),
            row.frontend.to_string(),
            row.backend.to_string(),
            row.state.label().to_owned(),
            age(row.age),
            age(row.idle),
            title(row.service, snapshot),
            row.forwarding.label().to_owned(),
            row.source.to_string(),
            row.backend_id.to_string(),
        ];
        table.row(cells.into_iter().take(columns));
    }
    Ok(table.render(
        "No connections. (Only the packet path keeps them; a connection of a local socket is translated once, \
         when it is made.)",
    ))
}

fn meant(row: &FlowRow, snapshot: &Snapshot, selection: &Selection) -> bool {
    let Selection { service, client, all } = selection;
    (*all || row.state != FlowState::Expired)
        && client.is_none_or(|client| client == row.client.ip())
        && service.as_ref().is_none_or(|filter| {
            snapshot.names.get(&row.service).is_some_and(|name| filter.matches(row.service, name, snapshot))
        })
}

fn element(row: &FlowRow, snapshot: &Snapshot) -> FlowJson {
    FlowJson {
        protocol: row.protocol.to_string(),
        client: row.client,
        frontend: row.frontend,
        backend: row.backend,
        source: row.source,
        service: title(row.service, snapshot),
        service_id: row.service,
        backend_id: row.backend_id,
        state: row.state.label(),
        forwarding: row.forwarding.label(),
        age_seconds: row.age.as_secs_f64(),
        idle_seconds: row.idle.as_secs_f64(),
    }
}
