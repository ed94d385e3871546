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
pub struct FlowJson {
    /// The Service port, with the protocol and the family of the flow.
    #[serde(flatten)]
    identity: ServiceIdentity,
    #[serde(flatten)]
    row: FlowRow,
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
        let (service, family) = (snapshot.names.get(&row.service), IpFamily::of(row.frontend.ip()));
        let identity = ServiceIdentity::new(row.service, service, row.protocol, family);
        list.push(Row { group: "flows", name, key, cells, value: FlowJson { identity, row: row.clone() } });
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
        let is_at = |meant: &Option<Peer>, end: &SocketAddr| {
            meant.is_none_or(|meant| meant.is(end) && meant.has_protocol(row.protocol.0))
        };
        (*with_expired || row.state != FlowState::Expired || *state == Some(FlowState::Expired))
            && is_at(client, &row.client)
            && is_at(frontend, &row.frontend)
            && is_at(backend, &row.backend)
            && protocol.is_none_or(|meant| meant.number() == row.protocol.0)
            && state.is_none_or(|meant| meant == row.state)
            && services.takes(row.service, snapshot)
    }
}
