//! `kubectl ballast status` and `version`: one row for each node, and the problems with their nodes.

use std::collections::BTreeMap;

use proxy_common::version::ABI_VERSION;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answers::{self, PerNode, parsed};
use super::merged::MergedList;
use crate::output::{Column, List, Row, bytes};

/// The used part of `ballast status -o json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Node {
    /// The node has no problems.
    ok: bool,
    agent: AgentState,
    /// `null` without maps.
    counts: Option<Counts>,
    attachments: Vec<Attachment>,
    /// Resident memory of the agent, in bytes.
    resident: Option<u64>,
    /// Problems, in sentences.
    problems: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct AgentState {
    /// `ok`, `unhealthy`, `down`, `not-asked`.
    state: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Counts {
    ports: usize,
    frontends: usize,
    backends: usize,
    flows: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct Attachment {
    attached: bool,
}

/// Returns the state of the nodes as a table; the exit code is 0 if all nodes have answered and have no problems.
pub(super) fn table(nodes: PerNode<Value>) -> MergedList<Value> {
    let columns = [
        Column::new("NODE"),
        Column::new("OK"),
        Column::new("AGENT"),
        Column::new("PORTS").number().sorted_by("counts.ports"),
        Column::new("ADDRESSES").number().sorted_by("counts.frontends"),
        Column::new("ENDPOINTS").number().sorted_by("counts.backends"),
        Column::new("FLOWS").number().sorted_by("counts.flows").clock(),
        Column::new("PROGRAMS").number().wide(),
        Column::new("MEMORY").number().wide().sorted_by("resident").clock(),
        Column::new("PROBLEMS").number(),
    ];
    let mut list = List::new("nodes", columns, "No nodes.");
    let mut problems: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut is_well = true;
    let documents = documents(&nodes, &json!({ "ok": false }));
    let of_all = nodes.len();
    for (name, answer) in nodes {
        let node = answer.and_then(parsed).unwrap_or_else(|error| Node {
            agent: AgentState { state: "no answer".to_owned() },
            problems: vec![error],
            ..Node::default()
        });
        is_well &= node.ok;
        let cell =
            |of: fn(&Counts) -> u64| node.counts.as_ref().map(of).map_or("-".to_owned(), |n| n.to_string());
        let attached = node.attachments.iter().filter(|one| one.attached).count();
        let cells = vec![
            name.clone(),
            if node.ok { "yes" } else { "no" }.to_owned(),
            node.agent.state.clone(),
            cell(|counts| counts.ports as u64),
            cell(|counts| counts.frontends as u64),
            cell(|counts| counts.backends as u64),
            cell(|counts| counts.flows),
            format!("{attached}/{}", node.attachments.len()),
            node.resident.map_or("-".to_owned(), bytes),
            node.problems.len().to_string(),
        ];
        for problem in node.problems {
            problems.entry(problem).or_default().push(name.clone());
        }
        list.push(row(&name, cells, &documents));
    }
    let place = |on: Vec<String>| {
        if on.len() == of_all && on.len() > 1 { "all nodes".to_owned() } else { on.join(", ") }
    };
    let notes = problems.into_iter().map(|(problem, on)| format!("{}: {problem}", place(on))).collect();
    let document = [("nodes".to_owned(), documents.into())].into_iter().collect();
    MergedList { list, notes, messages: Vec::new(), document, is_well }
}

/// The used part of `ballast version -o json`.
#[derive(Clone, Debug, Deserialize)]
struct Versions {
    version: String,
    abi: u32,
    agent: AgentVersion,
}

#[derive(Clone, Debug, Deserialize)]
struct AgentVersion {
    /// `null`: the agent does not answer.
    version: Option<String>,
}

/// Returns the versions of this program.
pub(super) fn own_version() -> String {
    format!("kubectl-ballast {} (ABI {ABI_VERSION})", env!("CARGO_PKG_VERSION"))
}

/// Returns the versions of the nodes as a table; the exit code is 0 if all nodes have answered.
pub(super) fn versions(nodes: PerNode<Value>) -> MergedList<Value> {
    let columns = ["NODE", "PROGRAM", "ABI", "AGENT"].map(Column::new);
    let mut list = List::new("nodes", columns, "No nodes.");
    let documents = documents(&nodes, &json!({}));
    let mut silent = BTreeMap::new();
    for (name, answer) in nodes {
        match answer.and_then(parsed) {
            Ok(Versions { version, abi, agent }) => {
                let agent = agent.version.unwrap_or_else(|| "no answer".to_owned());
                list.push(row(&name, vec![name.clone(), version, abi.to_string(), agent], &documents));
            }
            Err(error) => drop(silent.insert(name, error)),
        }
    }
    let own = [
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("abi", json!(ABI_VERSION)),
        ("nodes", documents.into()),
    ];
    let document = own.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
    MergedList {
        list,
        notes: Vec::new(),
        is_well: silent.is_empty(),
        messages: answers::lines(&silent),
        document,
    }
}

/// Returns each node's document, or `failed` with the field `error`.
fn documents(nodes: &PerNode<Value>, failed: &Value) -> Map<String, Value> {
    let one = |answer: &Result<Value, String>| match answer {
        Ok(document) => document.clone(),
        Err(error) => {
            let mut failed = failed.clone();
            failed["error"] = json!(error);
            failed
        }
    };
    nodes.iter().map(|(name, answer)| (name.clone(), one(answer))).collect()
}

/// Returns the row of a node: its document, with its name.
fn row(name: &str, cells: Vec<String>, documents: &Map<String, Value>) -> Row<Value> {
    let mut value = documents.get(name).cloned().unwrap_or_default();
    if let Value::Object(value) = &mut value {
        value.insert("node".to_owned(), json!(name));
    }
    Row { group: "nodes", name: name.to_owned(), key: name.to_owned(), cells, value }
}
