//! `ballast flow list`.

use std::net::SocketAddr;

use serde::Serialize;

use super::error::ShowError;
use super::filter::Scope;
use super::list::{Column, List, Row};
use super::names::title;
use super::table::age;
use crate::cli::question::Peer;
use crate::maps::view::{FlowRow, FlowState, Snapshot};
use crate::model::net::Protocol;

/// Which flows are selected.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only flows to these Service ports.
    pub scope: Scope,
    /// Only flows of this client.
    pub client: Option<Peer>,
    /// Only flows to this frontend.
    pub frontend: Option<Peer>,
    /// Only flows to this endpoint.
    pub backend: Option<Peer>,
    /// Only flows of this protocol.
    pub protocol: Option<Protocol>,
    /// Only flows in this state.
    pub state: Option<FlowState>,
    /// Include expired flows.
    pub all: bool,
}

/// A flow.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowJson {
    protocol: String,
    client: SocketAddr,
    frontend: SocketAddr,
    backend: SocketAddr,
    /// Source that the backend sees; the client's own if there is no SNAT.
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
    /// Seconds until the flow expires if no packet arrives.
    timeout_seconds: f64,
}

/// Returns one row for each selected flow.
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
        Column::new("AGE").number().clock().sorted_by("ageSeconds"),
        Column::new("IDLE").number().clock().sorted_by("idleSeconds"),
        Column::new("TIMEOUT").number().clock().wide().sorted_by("timeoutSeconds"),
        Column::new("SERVICE").wide(),
        Column::new("FORWARDING").wide(),
        Column::new("SOURCE").wide(),
        Column::new("BACKEND-ID").wide(),
    ];
    let mut list = List::new(
        "flows",
        columns,
        "No connections. (Connections of local sockets are translated at connect, and have no entry.)",
    );
    for row in rows.iter().filter(|row| selection.takes(row, snapshot)) {
        let cells = vec![
            row.protocol.to_string(),
            row.client.to_string(),
            row.frontend.to_string(),
            row.backend.to_string(),
            row.state.label().to_owned(),
            age(row.age),
            age(row.idle),
            age(row.timeout),
            title(row.service, snapshot),
            row.forwarding.label().to_owned(),
            row.source.to_string(),
            row.backend_id.to_string(),
        ];
        let name = format!("{}/{}/{}", row.protocol, row.client, row.frontend);
        // A direct flow and a translated flow may have the same client and frontend.
        let key = format!("{name} {} {}", row.backend, row.source);
        list.push(Row { group: "flows", name, key, cells, value: element(row, snapshot) });
    }
    Ok(list)
}

impl Selection {
    /// Whether all flows are selected, possibly without expired ones.
    pub fn is_all(&self) -> bool {
        let Self { scope, client, frontend, backend, protocol, state, all: _ } = self;
        let has_end = client.or(*frontend).or(*backend).is_some();
        scope.is_all() && !has_end && protocol.is_none() && state.is_none()
    }

    /// Whether the flow is selected.
    pub fn takes(&self, row: &FlowRow, snapshot: &Snapshot) -> bool {
        let Self { scope, client, frontend, backend, protocol, state, all } = self;
        let is_at = |meant: &Option<Peer>, end: &SocketAddr| meant.is_none_or(|meant| meant.is(end));
        (*all || row.state != FlowState::Expired || *state == Some(FlowState::Expired))
            && is_at(client, &row.client)
            && is_at(frontend, &row.frontend)
            && is_at(backend, &row.backend)
            && protocol.is_none_or(|meant| meant.number() == row.protocol.0)
            && state.is_none_or(|meant| meant == row.state)
            && scope.takes(row.service, snapshot)
    }
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
        timeout_seconds: row.timeout.as_secs_f64(),
    }
}
