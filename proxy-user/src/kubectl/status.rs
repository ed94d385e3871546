//! `kubectl ballast status`: one line for each node, and the problems with their nodes.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::answers::PerNode;
use crate::cli::show::Table;

/// The used part of `ballast status -o json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Node {
    /// The node has no problems.
    pub ok: bool,
    /// State of the agent.
    pub agent: AgentState,
    /// Numbers of objects; `null` without maps.
    pub counts: Option<Counts>,
    /// Problems, in sentences.
    pub problems: Vec<String>,
}

/// State of the agent of a node.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct AgentState {
    /// `ok`, `unhealthy`, `down`, `not-asked`.
    pub state: String,
}

/// Numbers of objects on a node.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Counts {
    ports: usize,
    frontends: usize,
    backends: usize,
    flows: u64,
}

/// Whether all nodes have answered and have no problems.
pub(super) fn is_well(nodes: &PerNode<Node>) -> bool {
    nodes.values().all(|node| node.as_ref().is_ok_and(|node| node.ok))
}

/// Returns the JSON for scripts: for each node its answer, or `{"ok": false, "error": ...}`.
pub(super) fn json(nodes: &PerNode<Node>) -> serde_json::Value {
    let one = |node: &Result<Node, String>| match node {
        Ok(node) => serde_json::json!(node),
        Err(error) => serde_json::json!({ "ok": false, "error": error }),
    };
    let nodes: BTreeMap<_, _> = nodes.iter().map(|(name, node)| (name.as_str(), one(node))).collect();
    serde_json::json!({ "nodes": nodes })
}

/// Returns the text for people.
pub(super) fn text(nodes: &PerNode<Node>) -> String {
    let headings = ["NODE", "OK", "AGENT", "PORTS", "ADDRESSES", "ENDPOINTS", "FLOWS", "PROBLEMS"];
    let mut table = Table::new(headings).right(&[3, 4, 5, 6, 7]);
    let mut problems: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, node) in nodes {
        let unknown = || vec!["-".to_owned(); 4];
        let (ok, agent, counts, found) = match node {
            Ok(node) => {
                let counts = node.counts.as_ref().map_or_else(unknown, |c| {
                    [c.ports as u64, c.frontends as u64, c.backends as u64, c.flows]
                        .map(|n| n.to_string())
                        .to_vec()
                });
                (node.ok, node.agent.state.as_str(), counts, node.problems.as_slice())
            }
            Err(error) => (false, "no answer", unknown(), std::slice::from_ref(error)),
        };
        for problem in found {
            problems.entry(problem).or_default().push(name);
        }
        let lead = [name.clone(), if ok { "yes" } else { "no" }.to_owned(), agent.to_owned()];
        table.row(lead.into_iter().chain(counts).chain([found.len().to_string()]));
    }
    let mut text = table.render("No nodes.");
    for (problem, on) in problems {
        let place =
            if on.len() == nodes.len() && on.len() > 1 { "all nodes".to_owned() } else { on.join(", ") };
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "{place}: {problem}");
    }
    text
}
