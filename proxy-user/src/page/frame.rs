//! One event: the data of a look for one browser. Its size is bounded, however many Services there are.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::SystemTime;

use serde::Serialize;

use super::clients::{Client, begun};
use super::sampler::{Examples, Sample};
use crate::config::page::Shows;
use crate::rates::{EndpointRates, Rates, ReasonRate, ServiceRates, Traffic};
use proxy_cli::page::PageQuery;

/// Maximum number of Service ports in an event; the busiest come first.
const SERVICES: usize = 200;
/// Maximum number of endpoints of a Service port, the busiest first; for the requested Service port it is [`ENDPOINTS_ASKED`].
const ENDPOINTS: usize = 16;
const ENDPOINTS_ASKED: usize = 500;
/// Maximum number of pairs of a client and a Service port.
const CLIENTS: usize = 100;
/// Maximum number of sentences about problems.
const PROBLEMS: usize = 20;
/// An estimate of connections made by sockets counts only above this share of all connections, and above this number: the
/// counters and the flows of the packet path are not read at the same moment.
const MIN_SOCKET_SHARE: f64 = 0.05;
const MIN_SOCKET_CONNECTIONS: f64 = 2.0;

/// One event.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Frame<'a> {
    node: &'a str,
    shows: Shows,
    /// Milliseconds since 1970.
    time: u128,
    /// Seconds since the previous look; 0: there was none, and all rates are 0.
    seconds: f64,
    /// Why the event holds no other data.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<&'a str>,
    problems: &'a [String],
    more_problems: usize,
    total: Traffic,
    flows: u64,
    /// Number of Service ports that match the filter; `all` is the number of all Service ports.
    matching: usize,
    all: usize,
    services: &'a [Row<'a>],
    reasons: &'a [ReasonRate],
    examples: &'a Examples,
    clients: Vec<FrontendRows<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    key: String,
    service: &'a str,
    protocol: &'a str,
    family: &'a str,
    frontends: &'a [SocketAddr],
    algorithm: &'static str,
    rates: Traffic,
    /// Connections per second that sockets of this node have made, an estimate; `null`: unknown.
    by_sockets: Option<f64>,
    connections: u64,
    failures: &'a BTreeMap<&'static str, f64>,
    /// Number of endpoints; `ready` is the number of those that take new connections.
    count: usize,
    ready: usize,
    endpoints: Vec<&'a EndpointRates>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FrontendRows<'a> {
    #[serde(flatten)]
    client: &'a Client,
    /// Key of the Service port.
    service: &'a str,
}

/// Returns the event of a look for one browser, as JSON.
pub(super) fn text(
    node: &str,
    shows: Shows,
    sample: &Sample,
    query: &PageQuery,
) -> serde_json::Result<String> {
    let none = Rates::default();
    let (rates, failure) = match &sample.rates {
        Ok(rates) => (rates, None),
        Err(failure) => (&none, Some(failure.as_str())),
    };
    let is_open = shows == Shows::All;
    let filter = query.filter.to_lowercase();
    let mut chosen: Vec<_> = rates.services.iter().filter(|row| matches(row, &filter, is_open)).collect();
    let matching = chosen.len();
    // Rows of the same rate stay in the order of names: the sort is stable.
    chosen.sort_by(|one, other| busier(&one.rates, &other.rates));
    chosen.truncate(SERVICES);
    // A Service is asked for by its key, or by the name that the page shows.
    let wanted = |row: &&ServiceRates| {
        !query.service.is_empty() && (row.key() == query.service || row.service == query.service)
    };
    if let Some(row) = rates.services.iter().find(wanted)
        && !chosen.iter().any(|known| known.id == row.id)
    {
        chosen.push(row);
    }
    let packets = begun(&sample.clients);
    let rows: Vec<_> = chosen
        .iter()
        .map(|row| {
            let by_packets = packets.get(&row.id).copied().unwrap_or_default();
            let most = if wanted(row) { ENDPOINTS_ASKED } else { ENDPOINTS };
            self::row(row, by_packets, rates.seconds, is_open.then_some(most))
        })
        .collect();
    let keys: BTreeMap<u32, &str> =
        chosen.iter().zip(&rows).map(|(service, row)| (service.id, row.key.as_str())).collect();
    let with_key = |client| Some(FrontendRows { client, service: keys.get(&client.service).copied()? });
    let clients = sample.clients.iter().filter_map(with_key).take(CLIENTS).collect();
    let time = sample.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    let shown = sample.problems.len().min(PROBLEMS);
    serde_json::to_string(&Frame {
        node,
        shows,
        time,
        seconds: rates.seconds,
        failure,
        problems: &sample.problems[..shown],
        more_problems: sample.problems.len() - shown,
        total: rates.total,
        flows: rates.flows,
        matching,
        all: rates.services.len(),
        services: &rows,
        reasons: &rates.reasons,
        examples: &sample.examples,
        clients,
    })
}

fn matches(row: &ServiceRates, filter: &str, is_open: bool) -> bool {
    let holds = |text: &str| text.to_lowercase().contains(filter);
    let has = |address: &SocketAddr| holds(&address.to_string());
    holds(&row.service)
        || (is_open && (row.frontends.iter().any(has) || row.endpoints.iter().any(|row| has(&row.address))))
}

fn busier(one: &Traffic, other: &Traffic) -> std::cmp::Ordering {
    let by = |of: fn(&Traffic) -> f64| of(other).total_cmp(&of(one));
    by(|rates| rates.connections)
        .then_with(|| by(|rates| rates.failures))
        .then_with(|| by(|rates| rates.packets))
}

/// Returns the row of a Service port, with up to `most` endpoints; `None`: without any addresses.
fn row(service: &ServiceRates, by_packets: f64, seconds: f64, most: Option<usize>) -> Row<'_> {
    let is_ready = |row: &&EndpointRates| row.state == "active" && row.ejected_seconds.is_none();
    let mut endpoints: Vec<_> = service.endpoints.iter().collect();
    endpoints.sort_by(|one, other| other.connections.total_cmp(&one.connections));
    endpoints.truncate(most.unwrap_or_default());
    let by_sockets = service.rates.connections - by_packets;
    let is_sure = by_sockets > service.rates.connections * MIN_SOCKET_SHARE
        && by_sockets * seconds > MIN_SOCKET_CONNECTIONS;
    Row {
        key: service.key(),
        service: &service.service,
        protocol: &service.protocol,
        family: &service.family,
        frontends: if most.is_some() { &service.frontends } else { &[] },
        algorithm: service.algorithm,
        rates: service.rates,
        by_sockets: most.map(|_| if is_sure { by_sockets } else { 0.0 }),
        connections: service.connections,
        failures: &service.failures,
        count: service.endpoints.len(),
        ready: service.endpoints.iter().filter(is_ready).count(),
        endpoints,
    }
}
