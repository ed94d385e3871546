//! `kubectl ballast monitor`: the events of all nodes as one stream.

use std::io::Write;

use clap::ValueEnum as _;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::cluster::{Agent, Cluster, Stdin, failure, is_success};
use super::error::KubectlError;
use crate::cli::args::kubectl::{MergedEventOutput, MergedMonitorArgs};

/// Maximum number of lines that wait to be written.
const QUEUE: usize = 1024;

/// A line of a node: of its standard output, or of its standard error.
type Line = Result<String, String>;

/// Writes the events of all nodes, until the stream of each node has ended. Returns whether no node failed.
pub(super) async fn run(
    cluster: &Cluster,
    agents: &[Agent],
    args: &MergedMonitorArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<bool, KubectlError> {
    let arguments = arguments(args, cluster.selection(&args.selector)?);
    let (sender, mut lines) = mpsc::channel(QUEUE);
    let mut nodes = JoinSet::new();
    for agent in agents {
        nodes.spawn(follow(cluster.clone(), agent.clone(), arguments.clone(), sender.clone()));
    }
    drop(sender);
    let width = agents.iter().map(|agent| agent.node.len()).max().unwrap_or_default();
    while let Some((node, line)) = lines.recv().await {
        match line {
            Ok(line) => match args.output {
                MergedEventOutput::Text => writeln!(out, "{node:width$}  {line}")?,
                MergedEventOutput::Json => writeln!(out, "{}", with_node(&node, &line))?,
                MergedEventOutput::Otlp => writeln!(out, "{}", with_node_attribute(&node, &line))?,
            },
            Err(message) => writeln!(err, "{node}: {message}")?,
        }
        out.flush()?;
    }
    Ok(nodes.join_all().await.into_iter().all(|is_well| is_well))
}

/// Forwards the lines of one node. Returns whether its process succeeded.
async fn follow(
    cluster: Cluster,
    agent: Agent,
    arguments: Vec<String>,
    lines: mpsc::Sender<(String, Line)>,
) -> bool {
    let node = &agent.node;
    let followed = async {
        let mut process = cluster.exec(&agent, &arguments, Stdin::Open).await?;
        let status = process.take_status();
        let (out, error) = (process.stdout(), process.stderr());
        let (_, messages) =
            tokio::try_join!(forward(out, node, Ok, &lines), forward(error, node, Err, &lines))?;
        let status = match status {
            Some(status) => status.await,
            None => None,
        };
        let is_well = is_success(status.as_ref());
        if !is_well && messages == 0 {
            return Err(failure(status));
        }
        Ok(is_well)
    };
    match followed.await {
        Ok(is_well) => is_well,
        Err(error) => {
            // Sending fails only if the reader of standard output has gone.
            let _ = lines.send((node.clone(), Err(error))).await;
            false
        }
    }
}

/// Forwards the lines of a stream, and returns their number.
async fn forward(
    from: Option<impl AsyncRead + Unpin>,
    node: &str,
    of: fn(String) -> Line,
    lines: &mpsc::Sender<(String, Line)>,
) -> Result<usize, String> {
    let mut count = 0;
    let Some(from) = from else { return Ok(count) };
    let mut read = BufReader::new(from).lines();
    while let Some(line) = read.next_line().await.map_err(|error| error.to_string())? {
        count += 1;
        if lines.send((node.to_owned(), of(line))).await.is_err() {
            break;
        }
    }
    Ok(count)
}

/// Returns the arguments for `ballast monitor` on a node; `selection`: those that select Services.
fn arguments(args: &MergedMonitorArgs, selection: Vec<String>) -> Vec<String> {
    let MergedMonitorArgs { output, selector: _, client, reason, kind, sample, timeout } = args;
    // The container runtime does not end a process whose reader has gone, but it closes the process's standard input.
    let mut words = vec!["monitor".to_owned(), "--end-with-stdin".to_owned(), format!("--sample={sample}")];
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
