//! Commands that run on all nodes until they are interrupted: their lines as one stream.

use std::collections::BTreeSet;
use std::io::Write;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::cluster::{Agent, Cluster, Stdin, failure, is_success};
use super::error::KubectlError;
use crate::args::list::Output;
use crate::output::document;

/// Ends a command on a node with its input: the container runtime does not end a process whose reader has gone, but it closes
/// the process's standard input.
pub(super) const END_WITH_STDIN: &str = "--end-with-stdin";

/// Maximum number of lines that wait to be written.
const QUEUE: usize = 1024;
/// Maximum length of a line, in bytes.
const MOST: usize = 1 << 20;

/// A line of a node: of its standard output, or of its standard error.
type Line = Result<String, String>;

/// Runs `ballast` with these arguments on all nodes, and writes what `render` returns for a node and its line, until the stream
/// of each node has ended or `most` lines are written. Returns whether no node failed.
pub(super) async fn run(
    cluster: &Cluster,
    agents: &[Agent],
    arguments: &[String],
    mut render: impl FnMut(&str, &str) -> Option<String>,
    most: Option<u64>,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<bool, KubectlError> {
    let (sender, mut lines) = mpsc::channel(QUEUE);
    let mut nodes = JoinSet::new();
    for agent in agents {
        nodes.spawn(follow(cluster.clone(), agent.clone(), arguments.to_vec(), sender.clone()));
    }
    drop(sender);
    let mut written = 0;
    while let Some((node, line)) = lines.recv().await {
        match line {
            Ok(line) => {
                if let Some(line) = render(&node, &line) {
                    writeln!(out, "{line}")?;
                    written += 1;
                }
            }
            Err(message) => writeln!(err, "{node}: {message}")?,
        }
        out.flush()?;
        if most.is_some_and(|most| written >= most) {
            // Dropping the tasks closes the standard input of the processes, which end with it.
            return Ok(true);
        }
    }
    Ok(nodes.join_all().await.into_iter().all(|is_well| is_well))
}

/// Returns the width of the column with the names of these nodes.
pub(super) fn width(agents: &[Agent]) -> usize {
    agents.iter().map(|agent| agent.node.len()).max().unwrap_or_default()
}

/// Returns how the lines of the nodes are written, with the node in front; `width`: that of its column. Every node writes the
/// same headings, if any, of which the first ones are written.
pub(super) fn rows(
    output: Output,
    width: usize,
    has_headings: bool,
) -> impl FnMut(&str, &str) -> Option<String> {
    let width = if has_headings { width.max("NODE".len()) } else { width };
    let mut begun = BTreeSet::new();
    move |node, line| match output {
        Output::Json => Some(with_node(node, line)),
        Output::Otlp => Some(with_node_attribute(node, line)),
        Output::Yaml => {
            let row: Value = serde_json::from_str(&with_node(node, line)).ok()?;
            Some(format!("---\n{}", document(&row, output).ok()?.trim_end()))
        }
        Output::Text | Output::Wide if has_headings && begun.insert(node.to_owned()) => {
            (begun.len() == 1).then(|| format!("{:width$}  {line}", "NODE"))
        }
        Output::Text | Output::Wide | Output::Name | Output::Short => Some(format!("{node:width$}  {line}")),
    }
}

/// Adds the node's name to a row; a line that is not an object stays unchanged.
pub(super) fn with_node(node: &str, line: &str) -> String {
    match serde_json::from_str(line) {
        Ok(Value::Object(mut row)) => {
            row.insert("node".to_owned(), node.into());
            Value::Object(row).to_string()
        }
        _ => line.to_owned(),
    }
}

/// Sets the node's name, as the cluster knows it, in a document of OpenTelemetry; another line stays unchanged.
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
    let mut from = BufReader::new(from);
    loop {
        let mut line = String::new();
        let read = (&mut from).take(MOST as u64).read_line(&mut line).await;
        match read.map_err(|error| error.to_string())? {
            0 => return Ok(count),
            MOST if !line.ends_with('\n') => return Err(format!("a line is longer than {MOST} bytes")),
            _ => {}
        }
        count += 1;
        line.truncate(line.trim_end_matches(['\r', '\n']).len());
        if lines.send((node.to_owned(), of(line))).await.is_err() {
            return Ok(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn line_longer_than_the_limit_is_an_error() {
        let forwarded = async |bytes: &[u8]| {
            let (sender, mut lines) = mpsc::channel(QUEUE);
            let count = forward(Some(bytes), "a", Ok, &sender).await;
            lines.close();
            let mut all = Vec::new();
            while let Some((_, line)) = lines.recv().await {
                all.push(line.unwrap());
            }
            (count, all)
        };
        let all = vec!["one".to_owned(), String::new(), "two".to_owned()];
        assert_eq!(forwarded(b"one\r\n\ntwo").await, (Ok(3), all));
        let long = vec![b'x'; MOST];
        let (count, all) = forwarded(&[b"one\n", &*long].concat()).await;
        assert_eq!((count, all.len()), (Err("a line is longer than 1048576 bytes".to_owned()), 1));
        let (count, all) = forwarded(&[&long[1..], b"\n"].concat()).await;
        assert_eq!((count, all[0].len()), (Ok(1), MOST - 1));
    }
}
