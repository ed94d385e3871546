//! The clients of each Service port, counted from the flows of the packet path.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;

use serde::Serialize;

use crate::maps::view::FlowRow;
use proxy_core::model::FlowState;

/// The connections of one client to one Service port.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Client {
    /// Address of the client.
    #[serde(rename = "client")]
    pub address: IpAddr,
    /// Id of the Service port.
    #[serde(skip)]
    pub service: u32,
    /// Number of open connections.
    pub open: u64,
    /// New connections per second.
    pub begun: f64,
}

/// Connections of the previous look, to recognise new ones: the age of a flow is known only to within a second.
#[derive(Debug, Default)]
pub(super) struct KnownFlows(Option<BTreeSet<u64>>);

/// Returns all clients, the busiest first. `seconds` is the time since the previous look; 0 if there was none.
pub(super) fn clients(flows: &[FlowRow], known: &mut KnownFlows, seconds: f64) -> Vec<Client> {
    let mut counts: BTreeMap<(IpAddr, u32), (u64, u32)> = BTreeMap::new();
    let before = known.0.take();
    let mut met = BTreeSet::new();
    for flow in flows.iter().filter(|flow| flow.state != FlowState::Expired) {
        let identity = identity(flow);
        met.insert(identity);
        let (open, begun) = counts.entry((flow.client.ip(), flow.service)).or_default();
        *open += u64::from(flow.state != FlowState::Closed);
        *begun += u32::from(before.as_ref().is_some_and(|before| !before.contains(&identity)));
    }
    known.0 = Some(met);
    let rate = |begun: u32| if seconds > 0.0 { f64::from(begun) / seconds } else { 0.0 };
    let mut clients: Vec<_> = counts
        .into_iter()
        .map(|((address, service), (open, begun))| Client { address, service, open, begun: rate(begun) })
        .collect();
    clients.sort_by(|one, other| {
        other.begun.total_cmp(&one.begun).then_with(|| Reverse(one.open).cmp(&Reverse(other.open)))
    });
    clients
}

/// Returns a hash of eight bytes that identifies a connection.
fn identity(flow: &FlowRow) -> u64 {
    let mut hasher = DefaultHasher::new();
    let FlowRow { protocol, client, frontend, backend, source, service, backend_id, .. } = flow;
    (protocol.0, client, frontend, backend, source, service, backend_id).hash(&mut hasher);
    hasher.finish()
}

/// Returns the new connections of the packet path per second, by the id of the Service port.
pub(super) fn begun(clients: &[Client]) -> BTreeMap<u32, f64> {
    let mut rates = BTreeMap::new();
    for client in clients {
        *rates.entry(client.service).or_default() += client.begun;
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::view::{Forwarding, Transport};
    use std::time::Duration;

    fn flow(client: u8, port: u16, service: u32, state: FlowState) -> FlowRow {
        let socket = ([10, 0, 0, client], port).into();
        FlowRow {
            protocol: Transport(6),
            client: socket,
            frontend: socket,
            backend: socket,
            source: socket,
            service,
            backend_id: 1,
            state,
            forwarding: Forwarding::Dnat,
            age: Duration::from_secs(1),
            idle: Duration::ZERO,
            timeout: Duration::ZERO,
        }
    }

    #[test]
    fn connections_are_counted_by_client_and_service() {
        let old = [flow(1, 1, 7, FlowState::Established), flow(2, 1, 8, FlowState::Unreplied)];
        let mut known = KnownFlows::default();
        assert!(
            clients(&old, &mut known, 0.0).iter().all(|one| one.begun == 0.0),
            "there was no sample before"
        );
        let new = [
            flow(2, 2, 7, FlowState::Closed),
            flow(2, 3, 7, FlowState::Established),
            flow(3, 1, 7, FlowState::Expired),
        ];
        let flows = [&old[..], &new].concat();
        let found = clients(&flows, &mut known, 2.0);
        let counts: Vec<_> = found
            .iter()
            .map(|one| (one.address.to_string(), one.service, one.open, one.begun.to_string()))
            .collect();
        let expected =
            |client: &str, service, open, begun: &str| (client.to_owned(), service, open, begun.to_owned());
        assert_eq!(
            counts,
            [
                expected("10.0.0.2", 7, 1, "1"),
                expected("10.0.0.1", 7, 1, "0"),
                expected("10.0.0.2", 8, 1, "0"),
            ]
        );
        assert_eq!(begun(&found).get(&7).copied(), Some(1.0));
        assert!(clients(&flows, &mut known, 2.0).iter().all(|one| one.begun == 0.0), "all are known");
    }
}
