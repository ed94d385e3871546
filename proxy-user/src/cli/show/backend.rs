//! `ballast backend list`.

use std::fmt::{self, Write as _};
use std::net::SocketAddr;

use serde::Serialize;

use super::by_service::ByService;
use super::names::{ServiceIdentity, title};
use crate::cli::selector::SelectInMaps as _;
use crate::maps::view::{BackendRow, BackendState, Snapshot};
use proxy_cli::args::list::ApiArgs;
use proxy_cli::output::{BACKENDS, List, Row};
use proxy_cli::selector::ServiceSelector;
use proxy_core::model::lookup::{Place, Places};
use proxy_core::model::net::IpFamily;

/// An endpoint.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendJson {
    id: u32,
    address: SocketAddr,
    /// The Service port.
    #[serde(flatten)]
    identity: ServiceIdentity,
    /// Where the endpoint runs, as the API server tells; omitted if it was not asked.
    #[serde(flatten)]
    place: Option<Place>,
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

/// Asks the API server for the places of the endpoints of a namespace, or of all; the error is a text.
pub type AskPlaces = fn(&ApiArgs, Option<&str>) -> Result<Places, String>;

/// Returns one row for each endpoint of the selected Service ports.
pub fn list(snapshot: &Snapshot, selector: &ServiceSelector, places: &Places) -> List<BackendJson> {
    let rows = snapshot.backends.iter().filter(|(_, row)| selector.takes(row.service, snapshot));
    of_rows(rows.map(|(id, row)| (*id, row)), snapshot, places, true)
}

/// Returns one row for each endpoint of one Service port.
pub(super) fn of_service(service: u32, snapshot: &ByService<'_>, places: &Places) -> List<BackendJson> {
    of_rows(snapshot.backends(service).iter().copied(), snapshot, places, false)
}

fn of_rows<'a>(
    rows: impl Iterator<Item = (u32, &'a BackendRow)>,
    snapshot: &Snapshot,
    places: &Places,
    with_service: bool,
) -> List<BackendJson> {
    let columns = BACKENDS
        .map(|column| if with_service || column.heading() != "SERVICE" { column } else { column.hidden() });
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
        let place = place(row, snapshot, places);
        let unless_empty = |text: fn(&Place) -> &Option<String>| {
            place.as_ref().and_then(|place| text(place).clone()).unwrap_or_else(|| "-".to_owned())
        };
        let cells = vec![
            id.to_string(),
            endpoint.clone(),
            state,
            if row.local { "yes" } else { "no" }.to_owned(),
            row.weight.to_string(),
            snapshot.backend_stats.get(&id).copied().unwrap_or_default().to_string(),
            open(id, row, snapshot).map_or_else(|| "-".to_owned(), |count| count.to_string()),
            title(row.service, snapshot),
            unless_empty(|place| &place.pod),
            unless_empty(|place| &place.node),
            unless_empty(|place| &place.zone),
        ];
        let value = BackendJson { place, ..element(id, row, snapshot) };
        let key = format!("{id} {endpoint} {}", row.service);
        list.push(Row { group: "backends", name: endpoint, key, cells, value });
    }
    list
}

fn place(row: &BackendRow, snapshot: &Snapshot, places: &Places) -> Option<Place> {
    let name = snapshot.names.get(&row.service)?;
    places.get(&(name.namespace.clone(), name.name.clone(), row.socket.ip())).cloned()
}

pub(super) fn element(id: u32, row: &BackendRow, snapshot: &Snapshot) -> BackendJson {
    BackendJson {
        id,
        address: row.socket,
        identity: ServiceIdentity::new(
            row.service,
            snapshot.names.get(&row.service),
            row.protocol,
            IpFamily::of(row.socket.ip()),
        ),
        place: None,
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
pub(super) fn draining(service: u32, snapshot: &ByService<'_>) -> Option<Draining> {
    let left = snapshot.backends(service).iter();
    let flows = left.filter_map(|(id, row)| flows_left(*id, row, snapshot));
    let (endpoints, flows) = flows.fold((0, 0), |(endpoints, sum), flows| (endpoints + 1, sum + flows));
    (endpoints > 0).then_some(Draining { endpoints, flows })
}

/// Returns the open connections of an endpoint; `None` if they are not counted.
fn open(id: u32, row: &BackendRow, snapshot: &Snapshot) -> Option<u64> {
    let count = snapshot.open_connections.get(&id).copied().unwrap_or_default();
    (count > 0 || snapshot.by_load.contains(&row.service)).then_some(count)
}
