//! `kubectl ballast service list`: the frontends that all nodes have programmed, and the nodes that differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::answers::{Outcome, PerNode};
use crate::cli::show::Table;

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
    /// What happens to a client's connection: `forward`, `reject`, `drop`.
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

fn row(key: &Key, by_node: &BTreeMap<&str, &Frontend>, answered: &[&str]) -> Option<Row> {
    let like = |one: &Frontend, other: &Frontend| {
        one.policy == other.policy
            && (one.policy == "Local" || (&one.verdict, &one.endpoints) == (&other.verdict, &other.endpoints))
    };
    let votes = |one: &Frontend| by_node.values().filter(|other| like(one, other)).count();
    // If two states are equally frequent, that of the first node is taken.
    let most = by_node.values().rev().max_by_key(|frontend| votes(frontend))?;
    let how = |node: &&str| match by_node.get(node) {
        None => Some("not programmed".to_owned()),
        Some(frontend) if like(frontend, most) => None,
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
    let verdict = (one.verdict != most.verdict).then(|| format!("{}s clients", one.verdict));
    [lacks, has, verdict].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

fn cell(endpoints: Vec<&SocketAddr>) -> String {
    let more = endpoints.len().saturating_sub(SHOWN);
    let shown: Vec<_> = endpoints.into_iter().take(SHOWN).map(ToString::to_string).collect();
    if more > 0 { format!("{} + {more} more", shown.join(",")) } else { shown.join(",") }
}

/// Returns the text for people: `*` marks a row if nodes differ, and a line below the table describes each difference.
pub(super) fn text(merged: &Merged) -> Outcome {
    let mut table = Table::new(["SERVICE", "TYPE", "ADDRESS", "NODES", "ENDPOINTS"]);
    for row in &merged.frontends {
        let Key { service, r#type, address, protocol, .. } = &row.key;
        let mark = if row.differs.is_empty() { "" } else { "*" };
        let endpoints = match row.verdict.as_str() {
            _ if row.policy == "Local" => "<by node> (policy Local)".to_owned(),
            "forward" => cell(row.endpoints.iter().collect()),
            verdict => format!("<none> ({verdict}s)"),
        };
        table.row([
            service.clone(),
            r#type.clone(),
            format!("{address}/{protocol}"),
            format!("{}/{}{mark}", merged.nodes - row.differs.len(), merged.nodes),
            endpoints,
        ]);
    }
    let mut all = Outcome::new(table.render_rows(), merged.silent.is_empty());
    for row in &merged.frontends {
        for (node, how) in &row.differs {
            // Writing to a `String` cannot fail.
            let _ = writeln!(all.stdout, "* {node}: {} {}: {how}", row.key.service, row.key.address);
        }
    }
    if merged.frontends.is_empty() && merged.nodes > 0 {
        all.stderr.push_str("No Services are programmed.\n");
    }
    for (node, error) in &merged.silent {
        all.note(node, error);
    }
    all
}
