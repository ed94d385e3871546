//! `ballast service list` and `ballast service show`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::SocketAddr;

use proxy_cli::selector::ServiceSelector;
use proxy_common::stats::ServiceStats;
use proxy_core::model::plural::plural;
use serde::Serialize;

use super::backend::{Draining, draining};
use super::by_service::{ByService, refusals};
use super::error::ShowError;
use super::names::{ServiceIdentity, title, unmanaged_note};
use crate::cli::selector::SelectInMaps as _;
use crate::maps::view::{BackendRow, FrontendRow, NameRow, Snapshot, UnmanagedRow};
use proxy_cli::args::list::Output;
use proxy_cli::output::{Column, FRONTENDS, List, Row, bytes, document};
use proxy_core::model::lookup::Places;
use proxy_core::model::net::IpFamily;
use proxy_core::plan::Scope;

/// Maximum number of endpoints in a cell before `+N more`, as in kubectl.
const SHOWN: usize = 3;

/// A row of `{"frontends": [...], "unmanaged": [...]}`: a frontend, or an unmanaged cluster address.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum ServiceRowJson {
    /// A frontend.
    Frontend(Box<FrontendJson>),
    /// An unmanaged cluster address.
    Unmanaged(UnmanagedRow),
}

/// A frontend.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendJson {
    /// The Service port.
    #[serde(flatten)]
    identity: ServiceIdentity,
    /// `ClusterIP`, `NodePort`, `LoadBalancer`, `ExternalIP`.
    r#type: &'static str,
    /// The clients that the frontend is for: `internal` or `external`.
    scope: &'static str,
    /// `10.96.0.10:80`.
    address: String,
    /// What happens to a client's connection: `forward`, `reject`, `drop`, `pass`.
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

/// Returns one row for each frontend of the selected Services.
pub fn list(snapshot: &Snapshot, selector: &ServiceSelector) -> List<ServiceRowJson> {
    let taken = snapshot.frontends.iter().filter(|row| selector.takes(row.service, snapshot));
    let mut rows: Vec<&FrontendRow> = taken.collect();
    rows.sort_by_key(|row| {
        (snapshot.names.get(&row.service), row.service, row.kind, row.address, row.port, row.scope)
    });
    let mut list = frontend_rows(&rows, &ByService::new(snapshot), true);
    // The maps do not contain the names of their Services, so only an unfiltered list shows these addresses.
    for row in snapshot.unmanaged.iter().filter(|_| selector.is_all()) {
        let address = row.address.to_string();
        let note = format!("<none> (unmanaged: {})", row.why());
        let known = ["-".to_owned(), "Unmanaged".to_owned(), address.clone(), address];
        let unknown = std::iter::repeat_n("-".to_owned(), 6);
        let cells = known.into_iter().chain(unknown).chain([note.clone(), note]).collect();
        let (key, value) = (row.address.to_string(), ServiceRowJson::Unmanaged(*row));
        list.push(Row { group: "unmanaged", name: String::new(), key, cells, value });
    }
    list
}

/// Returns one row for each frontend; the rows of one Service need no names.
fn frontend_rows(rows: &[&FrontendRow], snapshot: &ByService<'_>, with_names: bool) -> List<ServiceRowJson> {
    let is_of_service = |column: Column| ["SERVICE", "SERVICE-ID", "DRAINING"].contains(&column.heading());
    let columns =
        FRONTENDS.map(|column| if with_names || !is_of_service(column) { column } else { column.hidden() });
    let mut list = List::new("frontends", columns, "No Services are programmed.");
    for row in rows {
        let cells = vec![
            title(row.service, snapshot),
            row.kind.label().to_owned(),
            destination(row),
            format!("{}/{}", row.socket(), row.protocol),
            row.scope.to_string(),
            policy(row).to_owned(),
            affinity(row.affinity_secs),
            algorithm(row),
            row.service.to_string(),
            draining(row.service, snapshot).map_or_else(|| "-".to_owned(), |draining| draining.to_string()),
            endpoints(row, snapshot, SHOWN),
            endpoints(row, snapshot, usize::MAX),
        ];
        let key = format!("{}/{} {}", row.socket(), row.protocol, row.scope);
        let name = snapshot.names.get(&row.service).map(|_| title(row.service, snapshot)).unwrap_or_default();
        let value = ServiceRowJson::Frontend(Box::new(frontend(row, snapshot)));
        list.push(Row { group: "frontends", name, key, cells, value });
    }
    list
}

/// `{"ports": [...], "unmanaged": [...]}`: one element for each port and address family; and the unmanaged cluster addresses of
/// all Services.
#[derive(Serialize)]
struct ShowJson<'a> {
    ports: Vec<PortJson>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    unmanaged: &'a [UnmanagedRow],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PortJson {
    #[serde(flatten)]
    identity: ServiceIdentity,
    connections: u64,
    packets: u64,
    bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
    frontends: Vec<FrontendJson>,
    backends: Vec<super::backend::BackendJson>,
    refusals: Vec<RefusalJson>,
    /// Problems of the Service that the agent reports; empty if the agent does not answer.
    problems: Vec<String>,
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

/// Problems of Services that the agent reports, by namespace and name.
pub type ServiceProblems = BTreeMap<(String, String), Vec<String>>;

/// What others know of the Services.
#[derive(Clone, Debug, Default)]
pub struct ReportedState {
    /// Problems that the agent reports.
    pub problems: ServiceProblems,
    /// Places of endpoints that the API server reports.
    pub places: Places,
}

/// Returns all data of the selected Service ports.
pub fn show(
    snapshot: &Snapshot,
    selector: &ServiceSelector,
    known: &ReportedState,
    output: Output,
) -> Result<String, ShowError> {
    let mut ports: Vec<_> = snapshot.names.iter().filter(|(id, _)| selector.takes(**id, snapshot)).collect();
    let snapshot = &ByService::new(snapshot);
    ports.sort_by_key(|(_, name)| *name);
    let of_name = |name: &NameRow| {
        let key = (name.namespace.clone(), name.name.clone());
        known.problems.get(&key).map(Vec::as_slice).unwrap_or_default()
    };
    if output == Output::Name {
        let names: BTreeSet<String> = ports.iter().map(|(_, name)| format!("{name}\n")).collect();
        return Ok(names.into_iter().collect());
    }
    if output.is_document() {
        let ports = ports.into_iter().map(|(id, name)| port_json(*id, name, snapshot, of_name(name)));
        return Ok(document(&ShowJson { ports: ports.collect(), unmanaged: &snapshot.unmanaged }, output)?);
    }
    let parts = ports
        .into_iter()
        .map(|(id, name)| port_text(*id, name, snapshot, (of_name(name), &known.places), output));
    let note =
        unmanaged_note(snapshot).map(|all| Ok(format!("Unmanaged addresses, of all Services: {all}\n")));
    let parts: Vec<_> = parts.chain(note).collect::<Result<_, _>>()?;
    Ok(parts.join("\n"))
}

fn port_json(id: u32, name: &NameRow, snapshot: &ByService<'_>, problems: &[String]) -> PortJson {
    let ServiceStats { connections, packets, bytes, reply_packets, reply_bytes } =
        snapshot.service_stats.get(&id).copied().unwrap_or_default();
    PortJson {
        identity: ServiceIdentity::new(id, Some(name), name.protocol, name.family),
        connections,
        packets,
        bytes,
        reply_packets,
        reply_bytes,
        frontends: snapshot.frontends(id).iter().map(|row| frontend(row, snapshot)).collect(),
        backends: snapshot
            .backends(id)
            .iter()
            .map(|(id, row)| super::backend::element(*id, row, snapshot))
            .collect(),
        refusals: refusals(snapshot, id)
            .map(|(reason, count)| RefusalJson {
                reason: reason.label(),
                verdict: reason.verdict().label(),
                count,
            })
            .collect(),
        problems: problems.to_vec(),
        latency: super::latency::elements(id, snapshot),
    }
}

fn port_text(
    id: u32,
    name: &NameRow,
    snapshot: &ByService<'_>,
    (problems, places): (&[String], &Places),
    output: Output,
) -> Result<String, ShowError> {
    let stats = snapshot.service_stats.get(&id).copied().unwrap_or_default();
    let frontends = snapshot.frontends(id);
    let one = frontends.first();
    let mut text = String::new();
    // Writing to a `String` cannot fail.
    let _ = writeln!(text, "Service:      {name} ({}, {})", name.protocol, name.family);
    let _ = writeln!(text, "Id:           {id}");
    let _ = writeln!(
        text,
        "Affinity:     {}",
        one.map_or_else(|| "none".to_owned(), |f| affinity(f.affinity_secs))
    );
    let _ = writeln!(text, "Algorithm:    {}", algorithms(frontends));
    if frontends.iter().any(|row| row.dsr) {
        let _ = writeln!(text, "Forwarding:   dsr (clients outside, endpoints on other nodes)");
    }
    let _ = writeln!(text, "Connections:  {}", stats.connections);
    let _ = writeln!(
        text,
        "Packets:      {} to endpoints ({}), {} ({})",
        stats.packets,
        bytes(stats.bytes),
        plural(stats.reply_packets, "reply"),
        bytes(stats.reply_bytes)
    );
    let mut refusals = refusals(snapshot, id).filter(|(_, count)| *count > 0).peekable();
    if refusals.peek().is_none() {
        let _ = writeln!(text, "Refused:      none");
    }
    for (position, (reason, count)) in refusals.enumerate() {
        let label = if position == 0 { "Refused:" } else { "" };
        let (name, verdict) = (reason.label(), reason.verdict().label());
        let (explanation, advice) = (reason.explanation(), reason.advice());
        let _ = writeln!(text, "{label:<12}  {count} {name} ({verdict}):{explanation} {advice}");
    }
    for (position, problem) in problems.iter().enumerate() {
        let _ = writeln!(text, "{:<12}  {problem}", if position == 0 { "Problems:" } else { "" });
    }
    let parts = [
        (frontend_rows(frontends, snapshot, false).render(output, true)?, "No frontends."),
        (
            super::backend::of_service(id, snapshot, places).render(output, true)?,
            "No endpoints are programmed.",
        ),
    ];
    for (part, otherwise) in parts {
        let part = if part.is_empty() { format!("{otherwise}\n") } else { part };
        let _ = write!(text, "\n{part}");
    }
    text.push_str(&super::latency::table(id, snapshot));
    Ok(text)
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
fn algorithms(frontends: &[&FrontendRow]) -> String {
    let texts: BTreeSet<String> = frontends.iter().map(|row| algorithm(row)).collect();
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
    if row.backends.is_empty() { row.when_empty } else { "forward" }
}

fn destination(row: &FrontendRow) -> String {
    let note = match row.scope {
        Scope::External => " (external)",
        Scope::Internal => "",
    };
    format!("{}/{}{note}", row.socket(), row.protocol)
}

fn endpoints(row: &FrontendRow, snapshot: &Snapshot, shown: usize) -> String {
    match verdict(row) {
        "reject" => return "<none> (rejects)".to_owned(),
        "drop" => return "<none> (drops)".to_owned(),
        "pass" => return "<none> (passes)".to_owned(),
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

fn frontend(row: &FrontendRow, snapshot: &ByService<'_>) -> FrontendJson {
    let (ids, endpoints) = backends(row, snapshot).map(|(id, backend)| (id, backend.socket)).unzip();
    let (name, family) = (snapshot.names.get(&row.service), IpFamily::of(row.address));
    FrontendJson {
        identity: ServiceIdentity::new(row.service, name, row.protocol, family),
        r#type: row.kind.label(),
        scope: row.scope.into(),
        address: row.socket().to_string(),
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
