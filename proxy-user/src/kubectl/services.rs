//! `kubectl ballast service list`: the frontends that all nodes have programmed, and the nodes that differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::answers::{Outcome, PerNode};
use crate::cli::args::list::Output;
use crate::cli::selector::{SelectorError, ServiceFilter, ServiceSelector, nearest_services};
use crate::cli::show::{ShowError, Table, document};

/// Maximum number of endpoints in a cell before `+ N more`, as in kubectl.
const SHOWN: usize = 3;

/// The used part of `ballast service list -o json`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct List {
    pub frontends: Vec<Frontend>,
}

/// One frontend on one node.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Frontend {
    #[serde(flatten)]
    pub key: Key,
    /// What happens to a client's connection: `forward`, `reject`, `drop`, `pass`.
    pub verdict: String,
    /// `Cluster` or `Local`.
    pub policy: String,
    pub endpoints: BTreeSet<SocketAddr>,
}

/// Identifies a frontend: the same frontend has the same key on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub(super) struct Key {
    pub service: String,
    pub r#type: String,
    pub address: String,
    pub protocol: String,
    pub scope: String,
}

/// The frontends of all nodes.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Merged {
    /// Number of nodes that have answered.
    pub nodes: usize,
    pub frontends: Vec<Row>,
    /// Nodes that have not answered, and why.
    pub silent: BTreeMap<String, String>,
}

/// One frontend, compared between the nodes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub key: Key,
    pub verdict: String,
    pub policy: String,
    /// Endpoints on most nodes.
    pub endpoints: BTreeSet<SocketAddr>,
    /// Nodes that differ from most nodes, and how.
    pub differs: BTreeMap<String, String>,
}

/// The ports of Services on all nodes, each with the numbers of its frontends, by `namespace/name:port`.
type KnownPorts = BTreeMap<String, BTreeSet<u16>>;

/// Returns namespace, name and port of a Service port, whose name is `namespace/name:port` or `namespace/name`.
fn parts(service: &str) -> Option<(&str, &str, &str)> {
    let (namespace, rest) = service.split_once('/')?;
    let (name, port) = rest.split_once(':').unwrap_or((rest, ""));
    Some((namespace, name, port))
}

/// Keeps the selected Services. Fails if no node that has answered has a named Service or the namespace.
pub(super) fn select(nodes: &mut PerNode<List>, selector: &ServiceSelector) -> Result<(), ShowError> {
    let mut known = KnownPorts::new();
    for frontend in nodes.values().flatten().flat_map(|list| &list.frontends) {
        let port = frontend.key.address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        known.entry(frontend.key.service.clone()).or_default().extend(port);
    }
    let is_named = |filter: &ServiceFilter, (service, numbers): (&String, &BTreeSet<u16>)| {
        parts(service).is_some_and(|(namespace, name, port)| {
            filter.is_of(namespace, name) && filter.is_port(port, numbers.iter().copied())
        })
    };
    if nodes.values().any(Result::is_ok) {
        let names = || known.keys().filter_map(|service| parts(service));
        let is_missing = |filter: &&ServiceFilter| !known.iter().any(|one| is_named(filter, one));
        if let Some(filter) = selector.services.iter().find(is_missing) {
            let near =
                nearest_services(filter, &names().map(|(namespace, name, _)| (namespace, name)).collect());
            let filter = filter.to_string();
            return Err(SelectorError::NoService { filter, near, unmanaged: String::new() }.into());
        }
        selector.check_namespace(names().map(|(namespace, ..)| namespace))?;
    }
    known.retain(|service, numbers| {
        parts(service).map_or(selector.is_all(), |(namespace, name, _)| selector.is_of(namespace, name))
            && (selector.services.is_empty()
                || selector.services.iter().any(|filter| is_named(filter, (service, &*numbers))))
    });
    for list in nodes.values_mut().flatten() {
        list.frontends.retain(|frontend| known.contains_key(&frontend.key.service));
    }
    Ok(())
}

/// Compares the frontends of the nodes. With the policy `Local`, endpoints differ by design.
pub(super) fn merge(nodes: &PerNode<List>) -> Merged {
    let mut found: BTreeMap<&Key, BTreeMap<&str, &Frontend>> = BTreeMap::new();
    let mut merged = Merged::default();
    let mut answered = Vec::new();
    for (node, list) in nodes {
        match list {
            Ok(list) => {
                answered.push(node.as_str());
                for frontend in &list.frontends {
                    found.entry(&frontend.key).or_default().insert(node, frontend);
                }
            }
            Err(error) => drop(merged.silent.insert(node.clone(), error.clone())),
        }
    }
    merged.nodes = answered.len();
    merged.frontends = found.into_iter().filter_map(|(key, by_node)| row(key, &by_node, &answered)).collect();
    merged
}

#[cfg(test)]
thread_local! {
    /// How many times the state of a frontend on a node was compared or counted.
    pub(super) static STATES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// What has to be equal on all nodes: the policy, and unless it is `Local`, verdict and endpoints.
type State<'a> = (&'a str, Option<(&'a str, &'a BTreeSet<SocketAddr>)>);

impl Frontend {
    fn state(&self) -> State<'_> {
        #[cfg(test)]
        STATES.set(STATES.get() + 1);
        let is_compared = self.policy != "Local";
        (&self.policy, is_compared.then_some((&*self.verdict, &self.endpoints)))
    }
}

fn row(key: &Key, by_node: &BTreeMap<&str, &Frontend>, answered: &[&str]) -> Option<Row> {
    let mut votes = BTreeMap::<State<'_>, usize>::new();
    for frontend in by_node.values() {
        *votes.entry(frontend.state()).or_default() += 1;
    }
    // If two states are equally frequent, that of the first node is taken.
    let most = by_node.values().rev().max_by_key(|frontend| votes.get(&frontend.state()))?;
    let usual = most.state();
    let how = |node: &&str| match by_node.get(node) {
        None => Some("not programmed".to_owned()),
        Some(frontend) if frontend.state() == usual => None,
        Some(frontend) => Some(difference(frontend, most)),
    };
    let differs = answered.iter().filter_map(|node| Some(((*node).to_owned(), how(node)?))).collect();
    Some(Row {
        key: key.clone(),
        verdict: most.verdict.clone(),
        policy: most.policy.clone(),
        endpoints: most.endpoints.clone(),
        differs,
    })
}

fn difference(one: &Frontend, most: &Frontend) -> String {
    if one.policy != most.policy {
        return format!("policy {}", one.policy);
    }
    let told = |word: &str, endpoints: Vec<&SocketAddr>| {
        (!endpoints.is_empty()).then(|| format!("{word} {}", cell(endpoints)))
    };
    let lacks = told("does not have", most.endpoints.difference(&one.endpoints).collect());
    let has = told("also has", one.endpoints.difference(&most.endpoints).collect());
    let verdict = (one.verdict != most.verdict).then(|| format!("{} clients", does(&one.verdict)));
    [lacks, has, verdict].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Returns what the node does with clients, like `rejects`.
fn does(verdict: &str) -> String {
    format!("{verdict}{}", if verdict == "pass" { "es" } else { "s" })
}

fn list<'a>(endpoints: impl IntoIterator<Item = &'a SocketAddr>) -> String {
    endpoints.into_iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn cell(endpoints: Vec<&SocketAddr>) -> String {
    let more = endpoints.len().saturating_sub(SHOWN);
    let shown = list(endpoints.into_iter().take(SHOWN));
    if more > 0 { format!("{shown} + {more} more") } else { shown }
}

/// Renders the frontends in the requested format; the exit code is 0 if all nodes have answered.
pub(super) fn render(merged: &Merged, output: Output) -> Result<Outcome, ShowError> {
    let mut all = if output.is_document() {
        return Ok(Outcome::new(document(merged, output)?, merged.silent.is_empty()));
    } else if output == Output::Name {
        let names: BTreeSet<&str> = merged.frontends.iter().map(|row| &*row.key.service).collect();
        Outcome::new(names.into_iter().flat_map(|name| [name, "\n"]).collect(), true)
    } else {
        Outcome::new(text(merged, output == Output::Wide), true)
    };
    if merged.frontends.is_empty() && merged.nodes > 0 {
        all.stderr.push_str("No Services are programmed.\n");
    }
    for (node, error) in &merged.silent {
        all.is_well = false;
        all.note(node, error);
    }
    Ok(all)
}

/// Returns the text for people: `*` marks a row if nodes differ, and a line below the table describes each difference.
fn text(merged: &Merged, is_wide: bool) -> String {
    let wide: &[&str] = if is_wide { &["FOR", "POLICY"] } else { &[] };
    let headings = ["SERVICE", "TYPE", "ADDRESS"].iter().chain(wide).chain(&["NODES", "ENDPOINTS"]);
    let mut table = Table::new(headings.copied());
    for row in &merged.frontends {
        let Key { service, r#type, address, protocol, scope } = &row.key;
        let mark = if row.differs.is_empty() { "" } else { "*" };
        let endpoints = match row.verdict.as_str() {
            _ if row.policy == "Local" => "<by node> (policy Local)".to_owned(),
            "forward" if is_wide => list(&row.endpoints),
            "forward" => cell(row.endpoints.iter().collect()),
            verdict => format!("<none> ({})", does(verdict)),
        };
        let mut cells = vec![service.clone(), r#type.clone(), format!("{address}/{protocol}")];
        cells.extend(is_wide.then(|| [scope.clone(), row.policy.clone()]).into_iter().flatten());
        cells.push(format!("{}/{}{mark}", merged.nodes - row.differs.len(), merged.nodes));
        cells.push(endpoints);
        table.row(cells);
    }
    let mut text = table.render_rows();
    for row in &merged.frontends {
        for (node, how) in &row.differs {
            // Writing to a `String` cannot fail.
            let _ = writeln!(text, "* {node}: {} {}: {how}", row.key.service, row.key.address);
        }
    }
    text
}
