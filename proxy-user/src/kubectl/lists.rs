//! `kubectl ballast backend list`, `flow list` and `stats`: the list of each node; and `check`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answers::{Outcome, PerNode};
use super::monitor::with_node;
use super::stream;
use crate::cli::args::kubectl::{NodeFlowArgs, NodeListArgs};
use crate::cli::args::list::Output;
use crate::cli::show::document;

/// Returns the arguments of a list command on a node; `selection`: those that select Services.
pub(super) fn arguments(words: &[&str], args: &NodeListArgs, selection: Vec<String>) -> Vec<String> {
    let NodeListArgs { output, sort_by, watch, output_watch_events, selector: _ } = args;
    let mut all: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    // YAML is written here, of the JSON of the nodes.
    let output = if output.is_document() { Output::Json } else { *output };
    let format = output.to_possible_value().map(|value| format!("--output={}", value.get_name()));
    all.extend(format);
    all.extend(sort_by.iter().map(|field| format!("--sort-by={field}")));
    if *watch {
        all.extend(["--watch", stream::END_WITH_STDIN].map(str::to_owned));
        all.extend(output_watch_events.then(|| "--output-watch-events".to_owned()));
    }
    all.extend(selection);
    all
}

/// Returns how the lines of a watched list are written, with the node in front; `width`: that of its column. Only the first
/// line of each node that is a heading is written: every node writes the same.
pub(super) fn watched(output: Output, width: usize) -> impl FnMut(&str, &str) -> Option<String> {
    let mut begun = BTreeSet::new();
    move |node, line| match output {
        Output::Json | Output::Otlp => Some(with_node(node, line)),
        Output::Yaml => {
            let row: Value = serde_json::from_str(&with_node(node, line)).ok()?;
            Some(format!("---\n{}", document(&row, output).ok()?.trim_end()))
        }
        Output::Text | Output::Wide if begun.insert(node.to_owned()) => {
            (begun.len() == 1).then(|| format!("{:width$}  {line}", "NODE"))
        }
        Output::Text | Output::Wide | Output::Name | Output::Short => Some(format!("{node:width$}  {line}")),
    }
}

/// Returns the arguments of `flow list` on a node.
pub(super) fn flow_arguments(args: &NodeFlowArgs, selection: Vec<String>) -> Vec<String> {
    let NodeFlowArgs { list, client, frontend, backend, protocol, state } = args;
    let mut all = arguments(&["flow", "list"], list, selection);
    for (flag, peer) in [("client", client), ("frontend", frontend), ("backend", backend)] {
        all.extend(peer.iter().map(|peer| format!("--{flag}={peer}")));
    }
    all.extend(protocol.iter().map(|protocol| format!("--protocol={protocol}")));
    all.extend(state.iter().map(|state| format!("--state={}", state.label())));
    all
}

/// Returns the lists of all nodes as text; the exit code is 0 if all nodes have answered.
pub(super) fn text(answers: &[(String, Result<Outcome, String>)], output: Output) -> Outcome {
    let (mut all, mut names) = (Outcome::new(String::new(), true), BTreeSet::new());
    for (node, answer) in answers {
        let (list, message, is_well) = match answer {
            Ok(Outcome { stdout, stderr, is_well: true }) => (stdout.as_str(), stderr, true),
            Ok(Outcome { stderr: message, .. }) | Err(message) => ("", message, false),
        };
        all.is_well &= is_well;
        all.note(node, message);
        if output == Output::Name {
            names.extend(list.lines());
        } else if !list.is_empty() {
            let gap = if all.stdout.is_empty() { "" } else { "\n" };
            // Writing to a `String` cannot fail.
            let _ = writeln!(all.stdout, "{gap}{node}:\n{}", list.trim_end());
        }
    }
    all.stdout.extend(names.into_iter().flat_map(|name| [name, "\n"]));
    all
}

/// Returns `{"nodes": {...}}`: for each node its document, or `{"error": ...}`.
pub(super) fn by_node<T: Serialize>(answers: &PerNode<T>) -> Value {
    let one = |answer: &Result<T, String>| match answer {
        Ok(document) => serde_json::json!(document),
        Err(error) => serde_json::json!({ "error": error }),
    };
    let nodes: BTreeMap<_, _> = answers.iter().map(|(node, answer)| (node.as_str(), one(answer))).collect();
    serde_json::json!({ "nodes": nodes })
}

/// The used part of `ballast check -o json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Checked {
    ok: bool,
    checks: Vec<Check>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Check {
    #[serde(rename = "check")]
    name: String,
    /// `pass`, `warn`, `fail`.
    outcome: String,
    seen: String,
    advice: Option<String>,
}

/// Returns what does not pass, with the nodes, and whether nothing fails.
pub(super) fn checked(nodes: &PerNode<Checked>) -> (String, bool) {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut well = true;
    for (node, answer) in nodes {
        match answer {
            Ok(Checked { ok, checks }) => {
                well &= ok;
                for Check { name, outcome, seen, advice } in checks.iter().filter(|one| one.outcome != "pass")
                {
                    let advice = advice.as_deref().map(|advice| format!("; {advice}")).unwrap_or_default();
                    found.entry(format!("{outcome} {name}: {seen}{advice}")).or_default().push(node);
                }
            }
            Err(error) => {
                well = false;
                found.entry(format!("no answer: {error}")).or_default().push(node);
            }
        }
    }
    let lines = found.into_iter().map(|(what, on)| {
        let is_all = on.len() == nodes.len() && on.len() > 1;
        format!("{}: {what}\n", if is_all { "all nodes".to_owned() } else { on.join(", ") })
    });
    let text: String = lines.collect();
    (if text.is_empty() { format!("ok: {} nodes\n", nodes.len()) } else { text }, well)
}
