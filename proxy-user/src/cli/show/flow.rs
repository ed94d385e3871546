//! `ballast flow list`.

use std::net::SocketAddr;

use serde::Serialize;

use super::error::ShowError;
use super::names::{ServiceIdentity, title};
use crate::cli::selector::SelectInMaps as _;
use crate::maps::view::{FlowRow, Snapshot, View};
use proxy_cli::args::common::FlowFilterArgs;
use proxy_cli::output::{FLOWS, List, Row, age};
use proxy_cli::question::Peer;
use proxy_cli::selector::{AskLabels, ServiceSelector};
use proxy_core::model::FlowState;
use proxy_core::model::net::{IpFamily, Protocol};

/// Which flows are selected.
#[derive(Clone, Debug, Default)]
pub struct FlowSelection {
    /// Only flows to these Service ports.
    pub services: ServiceSelector,
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
    pub with_expired: bool,
}

/// A flow.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowJson {
    /// The Service port, with the protocol and the family of the flow.
    #[serde(flatten)]
    identity: ServiceIdentity,
    client: SocketAddr,
    frontend: SocketAddr,
    backend: SocketAddr,
    /// Source that the backend sees; the client's own if there is no SNAT.
    source: SocketAddr,
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
pub fn list(rows: &[FlowRow], snapshot: &Snapshot, selection: &FlowSelection) -> List<FlowJson> {
    let mut list = List::new(
        "flows",
        FLOWS,
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
    list
}

impl FlowSelection {
    /// Evaluates the arguments. Fails if a named Service or namespace is not programmed.
    pub(super) fn new(
        args: &FlowFilterArgs,
        with_expired: bool,
        view: &View,
        ask: AskLabels,
    ) -> Result<Self, ShowError> {
        Ok(Self::of(args, with_expired, ServiceSelector::programmed(&args.selector, view, ask)?))
    }

    /// Returns the selection of these arguments and Services.
    pub(super) fn of(args: &FlowFilterArgs, with_expired: bool, services: ServiceSelector) -> Self {
        let FlowFilterArgs { selector: _, client, frontend, backend, protocol, state } = args;
        Self {
            services,
            client: *client,
            frontend: *frontend,
            backend: *backend,
            protocol: *protocol,
            state: *state,
            with_expired,
        }
    }

    /// Whether all flows are selected, possibly without expired ones.
    pub fn is_all(&self) -> bool {
        let Self { services, client, frontend, backend, protocol, state, with_expired: _ } = self;
        let has_end = client.or(*frontend).or(*backend).is_some();
        services.is_all() && !has_end && protocol.is_none() && state.is_none()
    }

    /// Whether the flow is selected.
    pub fn takes(&self, row: &FlowRow, snapshot: &Snapshot) -> bool {
        let Self { services, client, frontend, backend, protocol, state, with_expired } = self;
        let is_at = |meant: &Option<Peer>, end: &SocketAddr| meant.is_none_or(|meant| meant.is(end));
        (*with_expired || row.state != FlowState::Expired || *state == Some(FlowState::Expired))
            && is_at(client, &row.client)
            && is_at(frontend, &row.frontend)
            && is_at(backend, &row.backend)
            && protocol.is_none_or(|meant| meant.number() == row.protocol.0)
            && state.is_none_or(|meant| meant == row.state)
            && services.takes(row.service, snapshot)
    }
}

fn element(row: &FlowRow, snapshot: &Snapshot) -> FlowJson {
    let (name, family) = (snapshot.names.get(&row.service), IpFamily::of(row.frontend.ip()));
    FlowJson {
        identity: ServiceIdentity::new(row.service, name, row.protocol, family),
        client: row.client,
        frontend: row.frontend,
        backend: row.backend,
        source: row.source,
        backend_id: row.backend_id,
        state: row.state.label(),
        forwarding: row.forwarding.label(),
        age_seconds: row.age.as_secs_f64(),
        idle_seconds: row.idle.as_secs_f64(),
        timeout_seconds: row.timeout.as_secs_f64(),
    }
}
