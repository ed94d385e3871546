//! `kubectl ballast`: asks the agents of all nodes at the same time, and merges their answers.
//!
//! [`cluster`] finds the agents' pods and runs `ballast` in them as the user; pure functions of [`status`], [`services`] and
//! [`wait`] merge the answers, [`merged`] writes them, and [`lists`] and [`stream`] write those that stay apart; [`names`] resolves names of pods and Services; [`ui`] serves the page of the whole cluster.

mod answers;
mod cluster;
mod error;
mod forward;
mod lists;
mod merged;
mod names;
mod services;
mod status;
mod stream;
mod sysdump;
mod ui;
mod wait;

use std::fmt::Write as _;
use std::io::Write;
use std::time::Duration;

use clap::ValueEnum as _;
use serde_json::Value;

use crate::args::kubectl::{
    KubectlArgs, KubectlCommand, NodesBackendCommand, NodesFlowCommand, NodesMapCommand, NodesServiceCommand,
};
use crate::args::list::{Output, SelectorArgs, ViewArgs};
use crate::output::{self, Column, document};
pub use answers::Outcome;
use answers::{PerNode, decoded, parsed};
use cluster::{Agent, Cluster};
pub use error::KubectlError;
use proxy_core::model::problem::chain;

/// How long an archive of a node may take, if `--request-timeout` is shorter.
const SYSDUMP: Duration = Duration::from_mins(2);

/// Returns the columns of the table of this command, or those of the lists of the nodes.
pub(crate) fn columns(command: &str) -> Vec<Column> {
    match command {
        "status" => status::table(PerNode::new()).list.columns().to_vec(),
        "version" => status::versions(PerNode::new()).list.columns().to_vec(),
        "service list" => services::table(services::Merged::default()).list.columns().to_vec(),
        _ => output::columns(command).to_vec(),
    }
}

/// Runs a command. Commands that follow events write them to `out`, and messages to `err`.
pub fn run(args: &KubectlArgs, out: &mut impl Write, err: &mut impl Write) -> Result<Outcome, KubectlError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(run_async(args, out, err));
    match (&args.command, outcome) {
        // The version of this program is known without a cluster.
        (KubectlCommand::Version(version), Err(error)) if version.args.format.output.output.is_document() => {
            let own = Value::Object(status::versions(PerNode::new()).document);
            let stdout = document(&own, version.args.format.output.output)?;
            Ok(Outcome { stdout, stderr: format!("ballast: {}\n", chain(&error)), is_well: false })
        }
        (_, outcome) => outcome,
    }
}

async fn run_async(
    args: &KubectlArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<Outcome, KubectlError> {
    if let KubectlCommand::Version(version) = &args.command
        && version.args.format.output.output.is_text()
    {
        // It is known without a cluster.
        writeln!(out, "{}", status::own_version())?;
    }
    let mut cluster = Cluster::connect(&args.cluster).await?;
    match &args.command {
        KubectlCommand::Status(status) => {
            merged::write(&status.args, out, err, async || {
                Ok(status::table(cluster.ask_json(&["status", "-o", "json"]).await?))
            })
            .await
        }
        KubectlCommand::Version(version) => {
            merged::write(&version.args, out, err, async || {
                Ok(status::versions(cluster.ask_json(&["version", "-o", "json"]).await?))
            })
            .await
        }
        KubectlCommand::Service { command: NodesServiceCommand::List(list) } => {
            // Labels are read here, as the user.
            let words = cluster.selection(&SelectorArgs { selector: None, ..list.args.selector.clone() })?;
            let selector = names::selector(&cluster, &list.args.selector).await?;
            merged::write(&list.args.list.view, out, err, async || {
                let mut answers: PerNode<services::NodeList> = decoded(frontends(&cluster, &words).await?);
                services::select(&mut answers, &selector)?;
                Ok(services::table(services::merge(&answers)))
            })
            .await
        }
        KubectlCommand::Service { command: NodesServiceCommand::Show(show) } => {
            let output = show.args.reader.format.output;
            let words =
                words(&cluster, &["service", "show"], output, &show.words, Some(&show.args.selector))?;
            once(&cluster, &words, output, true).await
        }
        KubectlCommand::Check(check) => {
            let words = words(&cluster, &["check"], Output::Json, &check.words, None)?;
            let answers: PerNode<Value> = cluster.ask_json(&refs(&words)).await?;
            let checked = answers.clone().into_iter().map(|(node, answer)| (node, answer.and_then(parsed)));
            let (text, well) = lists::checked(&checked.collect(), check.args.output);
            if check.args.output.is_document() {
                return Ok(Outcome::new(document(&lists::by_node(&answers), check.args.output)?, well));
            }
            Ok(Outcome::new(text, well))
        }
        KubectlCommand::Backend { command: NodesBackendCommand::List(backends) } => {
            let (list, selector) = (&backends.args.list.view, Some(&backends.args.selector));
            let words =
                words(&cluster, &["backend", "list"], list.format.output.output, &backends.words, selector)?;
            each(&cluster, words, list, out, err).await
        }
        KubectlCommand::Flow { command: NodesFlowCommand::List(flows) } => {
            let (list, selector) = (&flows.args.list.view, Some(&flows.args.which.selector));
            let words =
                words(&cluster, &["flow", "list"], list.format.output.output, &flows.words, selector)?;
            each(&cluster, words, list, out, err).await
        }
        KubectlCommand::Stats(stats) => {
            cluster.measuring(stats.args.rate.unwrap_or_default());
            let (list, selector) = (&stats.args.list.view, Some(&stats.args.selector));
            let words = words(&cluster, &["stats"], list.format.output.output, &stats.words, selector)?;
            each(&cluster, words, list, out, err).await
        }
        KubectlCommand::Programmed(programmed) => {
            let (list, selector) = (&programmed.args.list, Some(&programmed.args.selector));
            let words =
                words(&cluster, &["programmed"], list.format.output.output, &programmed.words, selector)?;
            each(&cluster, words, list, out, err).await
        }
        KubectlCommand::Map { command: NodesMapCommand::List(maps) } => {
            let list = &maps.args.list.view;
            let words = words(&cluster, &["map", "list"], list.format.output.output, &maps.words, None)?;
            each(&cluster, words, list, out, err).await
        }
        KubectlCommand::Map { command: NodesMapCommand::Dump(map) } => {
            let list = &map.args.list.view;
            let words = words(&cluster, &["map", "dump"], list.format.output.output, &map.words, None)?;
            each(&cluster, words, list, out, err).await
        }
        KubectlCommand::Top(top) => {
            cluster.measuring(top.args.interval);
            let output = top.args.format.output;
            let words = words(&cluster, &["top", "--once"], output, &top.words, Some(&top.args.selector))?;
            once(&cluster, &words, output, true).await
        }
        KubectlCommand::Explain { named_in, format, client, destination } => {
            cluster.in_namespace(named_in);
            explain(&cluster, client, destination, format.output).await
        }
        KubectlCommand::Monitor(monitor) => {
            let args = &monitor.args;
            let mut words = words(&cluster, &["monitor"], args.output, &monitor.words, Some(&args.selector))?;
            words.push(stream::END_WITH_STDIN.to_owned());
            if !words.iter().any(|word| word.starts_with("--timeout=")) {
                words.extend(args.timeout.map(|time| format!("--timeout={}s", time.as_secs())));
            }
            let agents = cluster.agents().await?;
            let render = stream::rows(args.output, stream::width(&agents), false);
            let is_well = stream::run(&cluster, &agents, &words, render, args.count, out, err).await?;
            Ok(Outcome::new(String::new(), is_well))
        }
        KubectlCommand::Ui { port } => {
            ui::run(cluster, *port, out).await?;
            Ok(Outcome::new(String::new(), true))
        }
        KubectlCommand::Sysdump { file } => {
            cluster.at_least(SYSDUMP);
            sysdump::run(&cluster, file.as_deref()).await
        }
        KubectlCommand::Wait { named_in, object, timeout, .. } => {
            cluster.in_namespace(named_in);
            wait::run(&cluster, object, *timeout).await
        }
    }
}

/// Returns the command for a node: its name, the format that is merged here, and the other arguments as they were given.
fn words(
    cluster: &Cluster,
    command: &[&str],
    output: Output,
    given: &[String],
    selector: Option<&SelectorArgs>,
) -> Result<Vec<String>, KubectlError> {
    let mut all: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
    // YAML is written here, of the JSON of the nodes.
    let output = if output == Output::Yaml { Output::Json } else { output };
    let format = output.to_possible_value().map(|value| format!("--output={}", value.get_name()));
    all.extend(format);
    all.extend_from_slice(given);
    if let Some(selector) = selector {
        all.extend(cluster.selection(selector)?);
    }
    Ok(all)
}

/// Asks all nodes for the frontends of a selection. A node that does not have one of the Services refuses, and is asked for
/// all of them, because other nodes may have it.
async fn frontends(
    cluster: &Cluster,
    selection: &[String],
) -> Result<Vec<(String, Result<Outcome, String>)>, KubectlError> {
    let mut agents = cluster.agents().await?;
    let all = ["service", "list", "-o", "json"];
    let words: Vec<&str> = all.into_iter().chain(selection.iter().map(String::as_str)).collect();
    let (refusals, mut answers): (Vec<_>, Vec<_>) =
        cluster.ask_all(&agents, &words).await.into_iter().partition(|(_, answer)| {
            answer.as_ref().is_ok_and(|answer| !answer.is_well && !selection.is_empty())
        });
    agents.retain(|agent| refusals.iter().any(|(node, _)| *node == agent.node));
    answers.extend(cluster.ask_all(&agents, &all).await);
    Ok(answers)
}

/// Asks all nodes for a list, or watches it on all nodes.
async fn each(
    cluster: &Cluster,
    mut words: Vec<String>,
    list: &ViewArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<Outcome, KubectlError> {
    let (output, has_headings) = (list.format.output.output, !list.format.no_headers);
    if !list.watch {
        return once(cluster, &words, output, has_headings).await;
    }
    words.push(stream::END_WITH_STDIN.to_owned());
    let agents = cluster.agents().await?;
    let render = stream::rows(output, stream::width(&agents), has_headings);
    let is_well = stream::run(cluster, &agents, &words, render, None, out, err).await?;
    Ok(Outcome::new(String::new(), is_well))
}

/// Asks all nodes once; a document has the answer of each node by its name.
async fn once(
    cluster: &Cluster,
    words: &[String],
    output: Output,
    has_headings: bool,
) -> Result<Outcome, KubectlError> {
    if output.is_document() {
        let answers: PerNode<Value> = cluster.ask_json(&refs(words)).await?;
        let is_well = answers.values().all(Result::is_ok);
        return Ok(Outcome::new(document(&lists::by_node(&answers), output)?, is_well));
    }
    let answers = cluster.ask_all(&cluster.agents().await?, &refs(words)).await;
    Ok(lists::text(&answers, output, has_headings))
}

fn refs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Asks the node where the connection starts, or all nodes if it is unknown.
async fn explain(
    cluster: &Cluster,
    client: &str,
    destination: &str,
    output: Output,
) -> Result<Outcome, KubectlError> {
    let (client, destination) =
        (names::client(cluster, client).await?, names::destination(cluster, destination).await?);
    let agents = cluster.agents().await?;
    let agents: Vec<Agent> = match &client.node {
        Some(node) => cluster::select(agents, std::slice::from_ref(node))?,
        None => agents,
    };
    let mut words = vec!["explain", &client.is, &destination];
    match output {
        Output::Text => {}
        Output::Wide => words.push("--output=wide"),
        Output::Name => words.push("--output=name"),
        Output::Short | Output::Json | Output::Yaml | Output::Otlp => words.push("--output=json"),
    }
    let answers = cluster.ask_all(&agents, &words).await;
    if output.is_document() {
        let answers: PerNode<Value> = decoded(answers);
        let is_well = answers.values().all(Result::is_ok);
        return Ok(Outcome::new(document(&lists::by_node(&answers), output)?, is_well));
    }
    let mut all = Outcome::new(String::new(), true);
    for (node, answer) in answers {
        match answer {
            Ok(Outcome { stdout, is_well: true, .. }) => {
                if output.is_text() {
                    // Writing to a `String` cannot fail.
                    let _ = writeln!(
                        all.stdout,
                        "{} on node {node} connects to {destination}",
                        client.description
                    );
                }
                all.stdout.push_str(&stdout);
            }
            Ok(Outcome { stderr: message, .. }) | Err(message) => {
                all.is_well = false;
                all.note(&node, &message);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod mock;
#[cfg(test)]
mod tests;
