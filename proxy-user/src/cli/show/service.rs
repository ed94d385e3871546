//! `ballast service list` and `ballast service show`.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use proxy_common::stats::ServiceStats;
use serde::Serialize;

use super::backend::{Draining, draining};
use super::document::document;
use super::error::ShowError;
use super::filter::{Scope, ServiceFilter};
use super::list::{Column, List, Row};
use super::names::{left_alone, title};
use super::table::{Table, bytes};
use crate::cli::args::Output;
use crate::maps::view::{BackendRow, FrontendRow, Snapshot, UnmanagedRow};

/// Maximum number of endpoints in a cell before `+N more`, as in kubectl.
const SHOWN: usize = 3;

/// A row of `{"frontends": [...], "unmanaged": [...]}`: a frontend, or an unmanaged cluster address.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Line {
    /// A frontend.
    Frontend(Box<FrontendJson>),
    /// An unmanaged cluster address.
    Unmanaged(UnmanagedJson),
}

/// An unmanaged cluster address.
#[derive(Debug, Serialize)]
pub struct UnmanagedJson {
    /// `10.96.0.10`.
    address: IpAddr,
    /// `own-address`: this node has the address; `other-proxy`: another proxy serves it.
    reason: &'static str,
}

/// A frontend.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendJson {
    /// `namespace/name:port`, or `id N` if the id has no name (yet).
    service: String,
    /// Id of the Service port.
    id: u32,
    /// `ClusterIP`, `NodePort`, `LoadBalancer`, `ExternalIP`.
    r#type: &'static str,
    /// The clients that the frontend is for: `internal` or `external`.
    scope: &'static str,
    /// `10.96.0.10:80`.
    address: String,
    /// `TCP`, `UDP`, `SCTP`.
    protocol: String,
    /// What happens to a client's connection: `forward`, `reject`, `drop`.
    verdict: &'static str,
    /// Traffic policy that selected the backends: `Cluster` or `Local`.
    policy: &'static str,
    /// Only clients in `spec.loadBalancerSourceRanges` are allowed.
    source_ranges: bool,
    /// Timeout of the session affinity in seconds; 0: none.
    affinity_seconds: u32,
    /// Name of the algorithm, like `random` or `rr`.
    algorithm: &'static str,
    /// Algorithm for clients outside the cluster, if it is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm_outside: Option<&'static str>,
    /// How packets of clients outside reach endpoints on other nodes: `dsr` or `snat`.
    forwarding: &'static str,
    /// Removed endpoints of the Service port, and their flows.
    #[serde(skip_serializing_if = "Option::is_none")]
    draining: Option<Draining>,
    /// Ids of the backends.
    backends: Vec<u32>,
    /// Addresses and ports of the backends.
    endpoints: Vec<SocketAddr>,
}

/// Returns one row for each frontend of the Services in `scope`.
pub fn list(snapshot: &Snapshot, scope: &Scope) -> Result<List<Line>, ShowError> {
    scope.check(snapshot)?;
    let taken = snapshot.frontends.iter().filter(|row| scope.takes(row.service, snapshot));
    let mut rows: Vec<&FrontendRow> = taken.collect();
    rows.sort_by_key(|row| {
        (snapshot.names.get(&row.service), row.service, row.kind, row.address, row.port, row.scope)
    });
    let columns = [
        Column::new("SERVICE"),
        Column::new("TYPE"),
        Column::new("ADDRESS").narrow().sorted_by("address"),
        Column::new("ADDRESS").wide().sorted_by("address"),
        Column::new("FOR").wide(),
        Column::new("POLICY").wide(),
        Column::new("AFFINITY").wide().sorted_by("affinitySeconds"),
        Column::new("ALGORITHM").wide(),
        Column::new("ID").number().wide(),
        Column::new("DRAINING").wide().sorted_by("draining.flows"),
        Column::new("ENDPOINTS").narrow(),
        Column::new("ENDPOINTS").wide(),
    ];
    let mut list = List::new("frontends", columns, "No Services are programmed.");
    for row in rows {
        let cells = vec![
            title(row.service, snapshot),
            row.kind.label().to_owned(),
            destination(row),
            format!("{}/{}", row.socket(), row.protocol),
            row.scope.label().to_owned(),
            policy(row).to_owned(),
            affinity(row.affinity_secs),
            algorithm(row),
            row.service.to_string(),
            draining(row.service, snapshot).map_or_else(|| "-".to_owned(), |draining| draining.to_string()),
            endpoints(row, snapshot, SHOWN),
            endpoints(row, snapshot, usize::MAX),
        ];
        let key = format!("{}/{} {}", row.socket(), row.protocol, row.scope.label());
        let name = snapshot.names.get(&row.service).map(|_| title(row.service, snapshot)).unwrap_or_default();
        let value = Line::Frontend(Box::new(frontend(row, snapshot)));
        list.push(Row { group: "frontends", name, key, cells, value });
    }
    // The maps do not contain the names of their Services, so only an unfiltered list shows these addresses.
    let unnamed = unmanaged(snapshot).into_iter().zip(&snapshot.unmanaged).filter(|_| scope.is_all());
    for (value, row) in unnamed {
        let address = row.address.to_string();
        let note = format!("<none> (unmanaged: {})", row.why());
        let known = ["-".to_owned(), "Unmanaged".to_owned(), address.clone(), address];
        let unknown = std::iter::repeat_n("-".to_owned(), 6);
        let cells = known.into_iter().chain(unknown).chain([note.clone(), note]).collect();
        let (key, value) = (row.address.to_string(), Line::Unmanaged(value));
        list.push(Row { group: "unmanaged", name: String::new(), key, cells, value });
    }
    Ok(list)
}

fn unmanaged(snapshot: &Snapshot) -> Vec<UnmanagedJson> {
    let reason = |is_own| if is_own { "own-address" } else { "other-proxy" };
    let element = |row: &UnmanagedRow| UnmanagedJson { address: row.address, reason: reason(row.is_own) };
    snapshot.unmanaged.iter().map(element).collect()
}

/// `{"ports": [...], "unmanaged": [...]}`: one element for each port and address family; and the unmanaged cluster addresses of
/// all Services.
#[derive(Serialize)]
struct ShowJson {
    ports: Vec<PortJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unmanaged: Vec<UnmanagedJson>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PortJson {
    namespace: String,
    name: String,
    /// Name of the port; empty when it has none.
    port: String,
    protocol: String,
    /// `IPv4` or `IPv6`.
    family: String,
    id: u32,
    connections: u64,
    packets: u64,
    bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
    frontends: Vec<FrontendJson>,
    backends: Vec<super::backend::BackendJson>,
    refusals: Vec<RefusalJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    latency: Vec<super::latency::LatencyJson>,
}

#[derive(Serialize)]
struct RefusalJson {
    /// A label of `docs/reasons.md`.
    reason: &'static str,
    /// `reject`, `drop`, `pass`.
    verdict: &'static str,
    count: u64,
}

/// Returns all data of the Service ports that `filter` selects.
pub fn show(snapshot: &Snapshot, filter: &ServiceFilter, output: Output) -> Result<String, ShowError> {
    let mut ports: Vec<_> =
        snapshot.names.iter().filter(|(id, name)| filter.matches(**id, name, snapshot)).collect();
    if ports.is_empty() {
        return Err(filter.not_found(snapshot));
    }
    ports.sort_by_key(|(_, name)| *name);
    let ids = ports.into_iter().map(|(id, _)| *id);
    if output.is_document() {
        let ports = ids.filter_map(|id| port_json(id, snapshot)).collect();
        return document(&ShowJson { ports, unmanaged: unmanaged(snapshot) }, output);
    }
    let parts = ids.map(|id| port_text(id, snapshot, output));
    let note = left_alone(snapshot).map(|all| Ok(format!("Unmanaged addresses, of all Services: {all}\n")));
    let parts: Vec<_> = parts.chain(note).collect::<Result<_, _>>()?;
    Ok(parts.join("\n"))
}

fn port_json(id: u32, snapshot: &Snapshot) -> Option<PortJson> {
    let name = snapshot.names.get(&id)?;
    let ServiceStats { connections, packets, bytes, reply_packets, reply_bytes } =
        snapshot.service_stats.get(&id).copied().unwrap_or_default();
    let refusals = snapshot.refusals.iter().filter(|((service, _), _)| *service == id);
    Some(PortJson {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        port: name.port.clone(),
        protocol: name.protocol.to_string(),
        family: name.family.to_string(),
        id,
        connections,
        packets,
        bytes,
        reply_packets,
        reply_bytes,
        frontends: frontends(id, snapshot).map(|row| frontend(row, snapshot)).collect(),
        backends: super::backend::of(id, snapshot)
            .map(|(id, row)| super::backend::element(id, row, snapshot))
            .collect(),
        refusals: refusals
            .map(|((_, reason), count)| RefusalJson {
                reason: reason.label(),
                verdict: reason.verdict().label(),
                count: *count,
            })
            .collect(),
        latency: super::latency::elements(id, snapshot),
    })
}

fn port_text(id: u32, snapshot: &Snapshot, output: Output) -> Result<String, ShowError> {
    let shown = if output == Output::Wide { usize::MAX } else { SHOWN };
    let stats = snapshot.service_stats.get(&id).copied().unwrap_or_default();
    let protocol =
        snapshot.names.get(&id).map_or_else(String::new, |n| format!(" ({}, {})", n.protocol, n.family));
    let one = frontends(id, snapshot).next();
    let mut text = String::new();
    // Writing to a `String` cannot fail.
    let _ = writeln!(text, "Service:      {}{protocol}", title(id, snapshot));
    let _ = writeln!(text, "Id:           {id}");
    let _ = writeln!(
        text,
        "Affinity:     {}",
        one.map_or_else(|| "none".to_owned(), |f| affinity(f.affinity_secs))
    );
    let _ = writeln!(text, "Algorithm:    {}", algorithms(id, snapshot));
    if frontends(id, snapshot).any(|row| row.dsr) {
        let _ = writeln!(text, "Forwarding:   dsr (clients outside, endpoints on other nodes)");
    }
    let _ = writeln!(text, "Connections:  {}", stats.connections);
    let _ = writeln!(
        text,
        "Packets:      {} to endpoints ({}), {} replies ({})",
        stats.packets,
        bytes(stats.bytes),
        stats.reply_packets,
        bytes(stats.reply_bytes)
    );
    let mut refusals =
        snapshot.refusals.iter().filter(|((service, _), count)| *service == id && **count > 0).peekable();
    if refusals.peek().is_none() {
        let _ = writeln!(text, "Refused:      none");
    }
    for (position, ((_, reason), count)) in refusals.enumerate() {
        let label = if position == 0 { "Refused:" } else { "" };
        let (name, verdict) = (reason.label(), reason.verdict().label());
        let (explanation, advice) = (reason.explanation(), reason.advice());
        let _ = writeln!(text, "{label:<12}  {count} {name} ({verdict}):{explanation} {advice}");
    }
    text.push('\n');
    let mut table = Table::new(["TYPE", "ADDRESS", "ENDPOINTS"]);
    for row in frontends(id, snapshot) {
        table.row([row.kind.label().to_owned(), destination(row), endpoints(row, snapshot, shown)]);
    }
    text.push_str(&table.render("No frontends."));
    text.push('\n');
    text.push_str(&super::backend::table(id, snapshot)?);
    text.push_str(&super::latency::table(id, snapshot));
    Ok(text)
}

fn frontends(id: u32, snapshot: &Snapshot) -> impl Iterator<Item = &FrontendRow> {
    snapshot.frontends.iter().filter(move |row| row.service == id)
}

/// Returns the backends of a frontend, without ids that were reassigned to another Service after their slot was read.
fn backends<'a>(row: &'a FrontendRow, snapshot: &'a Snapshot) -> impl Iterator<Item = (u32, &'a BackendRow)> {
    row.backends.iter().filter_map(|id| {
        let backend = snapshot.backends.get(id)?;
        (backend.service == row.service).then_some((*id, backend))
    })
}

fn affinity(seconds: u32) -> String {
    if seconds == 0 { "none".to_owned() } else { format!("client address, {seconds}s") }
}

/// Returns the algorithm as text, like `random` or `random, mh outside`.
fn algorithm(row: &FrontendRow) -> String {
    row.outside
        .map_or_else(|| row.algorithm.to_owned(), |outside| format!("{}, {outside} outside", row.algorithm))
}

/// Returns the algorithms of a Service port as text; only some of its frontends have another algorithm for clients outside.
fn algorithms(id: u32, snapshot: &Snapshot) -> String {
    let texts: BTreeSet<String> = frontends(id, snapshot).map(algorithm).collect();
    texts.into_iter().next_back().unwrap_or_else(|| "-".to_owned())
}

/// Returns how packets of clients outside reach endpoints on other nodes.
fn forwarding(row: &FrontendRow) -> &'static str {
    if row.dsr { "dsr" } else { "snat" }
}

fn policy(row: &FrontendRow) -> &'static str {
    if row.local { "Local" } else { "Cluster" }
}

fn verdict(row: &FrontendRow) -> &'static str {
    match (row.backends.is_empty(), row.drop_when_empty) {
        (false, _) => "forward",
        (true, false) => "reject",
        (true, true) => "drop",
    }
}

fn destination(row: &FrontendRow) -> String {
    let note = match row.scope {
        crate::maps::view::Scope::External => " (external)",
        crate::maps::view::Scope::Internal => "",
    };
    format!("{}/{}{note}", row.socket(), row.protocol)
}

fn endpoints(row: &FrontendRow, snapshot: &Snapshot, shown: usize) -> String {
    match verdict(row) {
        "reject" => return "<none> (rejects)".to_owned(),
        "drop" => return "<none> (drops)".to_owned(),
        _ => {}
    }
    let all: Vec<_> = backends(row, snapshot).map(|(_, backend)| backend.socket.to_string()).collect();
    let shown = shown.min(all.len());
    let mut text = all.get(..shown).unwrap_or_default().join(",");
    if all.len() > shown {
        let _ = write!(text, " +{} more", all.len() - shown);
    }
    text
}

fn frontend(row: &FrontendRow, snapshot: &Snapshot) -> FrontendJson {
    let (ids, endpoints) = backends(row, snapshot).map(|(id, backend)| (id, backend.socket)).unzip();
    FrontendJson {
        service: title(row.service, snapshot),
        id: row.service,
        r#type: row.kind.label(),
        scope: row.scope.label(),
        address: row.socket().to_string(),
        protocol: row.protocol.to_string(),
        verdict: verdict(row),
        policy: policy(row),
        source_ranges: row.restricted,
        affinity_seconds: row.affinity_secs,
        algorithm: row.algorithm,
        algorithm_outside: row.outside,
        forwarding: forwarding(row),
        draining: draining(row.service, snapshot),
        backends: ids,
        endpoints,
    }
}
