//! `kubectl ballast monitor`: the events of all nodes as one stream.

use std::io::Write;

use clap::ValueEnum as _;
use serde_json::Value;

use super::cluster::{Agent, Cluster};
use super::error::KubectlError;
use super::stream;
use crate::cli::args::kubectl::{MergedEventOutput, MergedMonitorArgs};

/// Writes the events of all nodes, until the stream of each node has ended. Returns whether no node failed.
pub(super) async fn run(
    cluster: &Cluster,
    agents: &[Agent],
    args: &MergedMonitorArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<bool, KubectlError> {
    let arguments = arguments(args, cluster.selection(&args.selector)?);
    let width = stream::width(agents);
    let render = |node: &str, line: &str| {
        Some(match args.output {
            MergedEventOutput::Text => format!("{node:width$}  {line}"),
            MergedEventOutput::Json => with_node(node, line),
            MergedEventOutput::Otlp => with_node_attribute(node, line),
        })
    };
    stream::run(cluster, agents, &arguments, render, out, err).await
}

/// Returns the arguments for `ballast monitor` on a node; `selection`: those that select Services.
fn arguments(args: &MergedMonitorArgs, selection: Vec<String>) -> Vec<String> {
    let MergedMonitorArgs { output, selector: _, client, reason, kind, sample, timeout } = args;
    let mut words =
        vec!["monitor".to_owned(), stream::END_WITH_STDIN.to_owned(), format!("--sample={sample}")];
    words.push(format!("--timeout={}s", timeout.as_secs().max(1)));
    words.extend(selection);
    words.extend(client.iter().map(|client| format!("--client={client}")));
    words.extend(reason.iter().map(|reason| format!("--reason={}", reason.label())));
    let kinds =
        kind.iter().filter_map(|kind| Some(format!("--kind={}", kind.to_possible_value()?.get_name())));
    words.extend(kinds);
    match output {
        MergedEventOutput::Text => {}
        MergedEventOutput::Json => words.push("--output=json".to_owned()),
        MergedEventOutput::Otlp => words.push("--output=otlp".to_owned()),
    }
    words
}

/// Adds the node's name to an event; a line that is not an event stays unchanged.
pub(super) fn with_node(node: &str, line: &str) -> String {
    match serde_json::from_str(line) {
        Ok(Value::Object(mut event)) => {
            event.insert("node".to_owned(), node.into());
            Value::Object(event).to_string()
        }
        _ => line.to_owned(),
    }
}

/// Sets the node's name, as the cluster knows it, in a document; a line that is not a document stays unchanged.
pub(super) fn with_node_attribute(node: &str, line: &str) -> String {
    const KEY: &str = "k8s.node.name";
    let Ok(mut document) = serde_json::from_str::<Value>(line) else { return line.to_owned() };
    let Some(Value::Array(attributes)) = document.pointer_mut("/resourceLogs/0/resource/attributes") else {
        return line.to_owned();
    };
    attributes.retain(|attribute| attribute["key"] != KEY);
    attributes.push(serde_json::json!({"key": KEY, "value": {"stringValue": node}}));
    document.to_string()
}
