//! Commands that run on all nodes until they are interrupted: their lines as one stream.

use std::io::Write;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::cluster::{Agent, Cluster, Stdin, failure, is_success};
use super::error::KubectlError;

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
/// of each node has ended. Returns whether no node failed.
pub(super) async fn run(
    cluster: &Cluster,
    agents: &[Agent],
    arguments: &[String],
    mut render: impl FnMut(&str, &str) -> Option<String>,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<bool, KubectlError> {
    let (sender, mut lines) = mpsc::channel(QUEUE);
    let mut nodes = JoinSet::new();
    for agent in agents {
        nodes.spawn(follow(cluster.clone(), agent.clone(), arguments.to_vec(), sender.clone()));
    }
    drop(sender);
    while let Some((node, line)) = lines.recv().await {
        match line {
            Ok(line) => {
                if let Some(line) = render(&node, &line) {
                    writeln!(out, "{line}")?;
                }
            }
            Err(message) => writeln!(err, "{node}: {message}")?,
        }
        out.flush()?;
    }
    Ok(nodes.join_all().await.into_iter().all(|is_well| is_well))
}

/// Returns the width of the column with the names of these nodes.
pub(super) fn width(agents: &[Agent]) -> usize {
    agents.iter().map(|agent| agent.node.len()).max().unwrap_or_default()
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
