//! `kubectl ballast service list`: the frontends that all nodes have programmed, and the nodes that differ.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::answers::{self, PerNode};
use super::merged::MergedList;
use crate::output::{Column, List, Row as MergedRow};
use crate::selector::{SelectorError, ServiceFilter, ServiceSelector, nearest_services};

/// Maximum number of endpoints in a cell before `+ N more`, as in kubectl.
const SHOWN: usize = 3;

/// The used part of `ballast service list -o json`.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct NodeList {
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
pub(super) fn select(nodes: &mut PerNode<NodeList>, selector: &ServiceSelector) -> Result<(), SelectorError> {
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
            return Err(SelectorError::NoService { filter, near, unmanaged: String::new() });
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
pub(super) fn merge(nodes: &PerNode<NodeList>) -> Merged {
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
    let phrase = |word: &str, endpoints: Vec<&SocketAddr>| {
        (!endpoints.is_empty()).then(|| format!("{word} {}", cell(endpoints)))
    };
    let lacks = phrase("does not have", most.endpoints.difference(&one.endpoints).collect());
    let has = phrase("also has", one.endpoints.difference(&most.endpoints).collect());
    let verdict = (one.verdict != most.verdict).then(|| format!("{} clients", does(&one.verdict)));
    [lacks, has, verdict].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Returns what the node does with clients, like `rejects`.
fn does(verdict: &str) -> String {
    format!("{verdict}{}", if verdict == "pass" { "es" } else { "s" })
}

fn listed<'a>(endpoints: impl IntoIterator<Item = &'a SocketAddr>) -> String {
    endpoints.into_iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn cell(endpoints: Vec<&SocketAddr>) -> String {
    let more = endpoints.len().saturating_sub(SHOWN);
    let shown = listed(endpoints.into_iter().take(SHOWN));
    if more > 0 { format!("{shown} + {more} more") } else { shown }
}

/// Returns the frontends as a table; `*` marks a row if nodes differ, and a line below the table describes each difference. The
/// exit code is 0 if all nodes have answered.
pub(super) fn table(merged: Merged) -> MergedList<Row> {
    let Merged { nodes, frontends, silent } = merged;
    let columns = [
        Column::new("SERVICE"),
        Column::new("TYPE"),
        Column::new("ADDRESS"),
        Column::new("FOR").wide(),
        Column::new("POLICY").wide(),
        Column::new("NODES"),
        Column::new("ENDPOINTS").narrow(),
        Column::new("ENDPOINTS").wide(),
    ];
    let mut list = List::new("frontends", columns, "No Services are programmed.");
    let mut notes = Vec::new();
    for row in frontends {
        let Key { service, r#type, address, protocol, scope } = &row.key;
        let mark = if row.differs.is_empty() { "" } else { "*" };
        let [narrow, wide] = match row.verdict.as_str() {
            _ if row.policy == "Local" => ["<by node> (policy Local)"; 2].map(str::to_owned),
            "forward" => [cell(row.endpoints.iter().collect()), listed(&row.endpoints)],
            verdict => [(); 2].map(|()| format!("<none> ({})", does(verdict))),
        };
        let cells = vec![
            service.clone(),
            r#type.clone(),
            format!("{address}/{protocol}"),
            scope.clone(),
            row.policy.clone(),
            format!("{}/{nodes}{mark}", nodes - row.differs.len()),
            narrow,
            wide,
        ];
        notes.extend(row.differs.iter().map(|(node, how)| format!("* {node}: {service} {address}: {how}")));
        let key = format!("{service} {type} {address} {protocol} {scope}");
        list.push(MergedRow { group: "frontends", name: service.clone(), key, cells, value: row });
    }
    let mut messages = answers::lines(&silent);
    if list.rows().is_empty() && nodes > 0 {
        messages.insert(0, "No Services are programmed.".to_owned());
    }
    let is_well = silent.is_empty();
    let document = [("nodes".to_owned(), nodes.into()), ("silent".to_owned(), serde_json::json!(silent))]
        .into_iter()
        .collect();
    MergedList { list, notes, messages, document, is_well }
}
