//! Answers that stay apart: one list or text of each node; and `kubectl ballast check`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answers::{Outcome, PerNode};
use crate::args::list::Output;
use proxy_core::model::plural::plural;

/// Returns the lists of all nodes as text: each under the name of its node or, without headings, with the node in front of each
/// row. The exit code is 0 if all nodes have answered.
pub(super) fn text(
    answers: &[(String, Result<Outcome, String>)],
    output: Output,
    has_headings: bool,
) -> Outcome {
    let (mut all, mut names) = (Outcome::new(String::new(), true), BTreeSet::new());
    let width = answers.iter().map(|(node, _)| node.len()).max().unwrap_or_default();
    for (node, answer) in answers {
        let (list, message, is_well) = match answer {
            Ok(Outcome { stdout, stderr, is_well: true }) => (stdout.as_str(), stderr, true),
            Ok(Outcome { stderr: message, .. }) | Err(message) => ("", message, false),
        };
        all.is_well &= is_well;
        all.note(node, message);
        if output == Output::Name {
            names.extend(list.lines());
        } else if !has_headings {
            all.stdout.extend(list.lines().map(|row| format!("{node:width$}  {row}\n")));
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
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Checked {
    ok: bool,
    checks: Vec<Check>,
}

#[derive(Clone, Debug, Deserialize)]
struct Check {
    #[serde(rename = "check")]
    name: String,
    /// `pass`, `warn`, `fail`.
    outcome: String,
    seen: String,
    advice: Option<String>,
}

/// Returns what does not pass, with the nodes, and whether nothing fails; the wide output also has what passes.
pub(super) fn checked(nodes: &PerNode<Checked>, output: Output) -> (String, bool) {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut well = true;
    for (node, answer) in nodes {
        match answer {
            Ok(Checked { ok, checks }) => {
                well &= ok;
                let is_shown = |one: &&Check| output.is_wide() || one.outcome != "pass";
                for Check { name, outcome, seen, advice } in checks.iter().filter(is_shown) {
                    let advice = advice.as_deref().map(|advice| format!("; {advice}")).unwrap_or_default();
                    let what = match output {
                        Output::Name => name.clone(),
                        _ => format!("{outcome} {name}: {seen}{advice}"),
                    };
                    found.entry(what).or_default().push(node);
                }
            }
            Err(error) => {
                well = false;
                found.entry(format!("no answer: {error}")).or_default().push(node);
            }
        }
    }
    if output == Output::Name {
        return (found.into_keys().map(|name| name + "\n").collect(), well);
    }
    let lines = found.into_iter().map(|(what, on)| {
        let is_all = on.len() == nodes.len() && on.len() > 1;
        format!("{}: {what}\n", if is_all { "all nodes".to_owned() } else { on.join(", ") })
    });
    let text: String = lines.collect();
    (if text.is_empty() { format!("ok: {}\n", plural(nodes.len(), "node")) } else { text }, well)
}
