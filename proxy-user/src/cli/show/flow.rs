//! `ballast flow list`.

use std::net::{IpAddr, SocketAddr};

use serde::Serialize;

use super::ShowError;
use super::filter::Scope;
use super::list::{Column, List, Row};
use super::service::title;
use super::table::age;
use crate::maps::view::{FlowRow, FlowState, Snapshot};

/// Which connections are meant.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Those to these Service ports.
    pub scope: Scope,
    /// Those of this client.
    pub client: Option<IpAddr>,
    /// Expired ones too.
    pub all: bool,
}

/// A connection.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowJson {
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
) -> Result<List<FlowJson>, ShowError> {
    selection.scope.check(snapshot)?;
    let columns = [
        Column::new("PROTO"),
        Column::new("CLIENT"),
        Column::new("FRONTEND"),
        Column::new("BACKEND"),
        Column::new("STATE"),
        Column::new("AGE").number().clock(),
        Column::new("IDLE").number().clock(),
        Column::new("SERVICE").wide(),
        Column::new("FORWARDING").wide(),
        Column::new("SOURCE").wide(),
        Column::new("BACKEND-ID").wide(),
    ];
    let mut list = List::new(
        "flows",
        columns,
        "No connections. (Only the packet path keeps them; a connection of a local socket is translated once, \
         when it is made.)",
    );
    for row in rows.iter().filter(|row| meant(row, snapshot, selection)) {
        let cells = vec![
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
        let name = format!("{}/{}/{}", row.protocol, row.client, row.frontend);
        // A direct flow and a translated one may be of the same two.
        let key = format!("{name} {} {}", row.backend, row.source);
        list.push(Row { group: "flows", name, key, cells, value: element(row, snapshot) });
    }
    Ok(list)
}

fn meant(row: &FlowRow, snapshot: &Snapshot, selection: &Selection) -> bool {
    let Selection { scope, client, all } = selection;
    (*all || row.state != FlowState::Expired)
        && client.is_none_or(|client| client == row.client.ip())
        && scope.takes(row.service, snapshot)
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
