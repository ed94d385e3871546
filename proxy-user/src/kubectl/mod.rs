//! `kubectl ballast`: asks the agents of all nodes at the same time, and merges their answers.
//!
//! [`cluster`] finds the agents' pods and runs `ballast` in them as the user; pure functions of [`status`], [`services`] and
//! [`wait`] merge the answers; [`names`] resolves names of pods and Services; [`ui`] serves the page of the whole cluster.

mod answers;
mod cluster;
mod error;
mod forward;
mod lists;
mod monitor;
mod names;
mod services;
mod status;
mod stream;
mod sysdump;
mod ui;
mod wait;

use std::fmt::Write as _;
use std::io::Write;

use serde::de::DeserializeOwned;

use crate::cli::args::kubectl::{
    KubectlArgs, KubectlCommand, MergedSelectorArgs, MergedServiceCommand, NodeBackendCommand,
    NodeFlowCommand, NodeListArgs,
};
use crate::cli::show::document;
pub use answers::Outcome;
use answers::PerNode;
use cluster::{Agent, Cluster};
pub use error::KubectlError;

/// Runs a command. Commands that follow events write them to `out`, and messages to `err`.
pub fn run(args: &KubectlArgs, out: &mut impl Write, err: &mut impl Write) -> Result<Outcome, KubectlError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run_async(args, out, err))
}

async fn run_async(
    args: &KubectlArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<Outcome, KubectlError> {
    let cluster = Cluster::connect(&args.cluster).await?;
    match &args.command {
        KubectlCommand::Status { output } => {
            let answers: PerNode<status::Node> =
                decoded(cluster.ask_all(&cluster.agents().await?, &["status", "-o", "json"]).await);
            let well = status::is_well(&answers);
            let text = if output.is_document() {
                document(&status::json(&answers), *output)?
            } else {
                status::text(&answers)
            };
            Ok(Outcome::new(text, well))
        }
        KubectlCommand::Service { command: MergedServiceCommand::List { output, selector } } => {
            // Labels are read here, as the user.
            let words = cluster.selection(&MergedSelectorArgs { selector: None, ..selector.clone() })?;
            let selector = names::selector(&cluster, selector).await?;
            let mut answers: PerNode<services::List> = decoded(frontends(&cluster, &words).await?);
            services::select(&mut answers, &selector)?;
            Ok(services::render(&services::merge(&answers), *output)?)
        }
        KubectlCommand::Check { output } => {
            let answers = cluster.ask_all(&cluster.agents().await?, &["check", "-o", "json"]).await;
            let answers: PerNode<lists::Checked> = decoded(answers);
            let (text, well) = lists::checked(&answers);
            if output.is_document() {
                return Ok(Outcome::new(document(&lists::by_node(&answers), *output)?, well));
            }
            Ok(Outcome::new(text, well))
        }
        KubectlCommand::Backend { command: NodeBackendCommand::List(args) } => {
            let words = lists::arguments(&["backend", "list"], args, cluster.selection(&args.selector)?);
            list(&cluster, &words, args, out, err).await
        }
        KubectlCommand::Flow { command: NodeFlowCommand::List(args) } => {
            let words = lists::flow_arguments(args, cluster.selection(&args.list.selector)?);
            list(&cluster, &words, &args.list, out, err).await
        }
        KubectlCommand::Stats(args) => {
            let words = lists::arguments(&["stats"], args, cluster.selection(&args.selector)?);
            list(&cluster, &words, args, out, err).await
        }
        KubectlCommand::Explain { client, destination } => explain(&cluster, client, destination).await,
        KubectlCommand::Monitor(args) => {
            let is_well = monitor::run(&cluster, &cluster.agents().await?, args, out, err).await?;
            Ok(Outcome::new(String::new(), is_well))
        }
        KubectlCommand::Ui { port } => {
            ui::run(cluster, *port, out).await?;
            Ok(Outcome::new(String::new(), true))
        }
        KubectlCommand::Sysdump { file } => sysdump::run(&cluster, file.as_deref()).await,
        KubectlCommand::Wait { object, timeout, .. } => wait::run(&cluster, object, *timeout).await,
    }
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
async fn list(
    cluster: &Cluster,
    words: &[String],
    args: &NodeListArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> Result<Outcome, KubectlError> {
    let (agents, output) = (cluster.agents().await?, args.output);
    if args.watch {
        let render = lists::watched(output, stream::width(&agents).max("NODE".len()));
        let is_well = stream::run(cluster, &agents, words, render, out, err).await?;
        return Ok(Outcome::new(String::new(), is_well));
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let answers = cluster.ask_all(&agents, &words).await;
    if !output.is_document() {
        return Ok(lists::text(&answers, output));
    }
    let answers: PerNode<serde_json::Value> = decoded(answers);
    let is_well = answers.values().all(Result::is_ok);
    Ok(Outcome::new(document(&lists::by_node(&answers), output)?, is_well))
}

/// Asks the node where the connection starts, or all nodes if it is unknown.
async fn explain(cluster: &Cluster, client: &str, destination: &str) -> Result<Outcome, KubectlError> {
    let (client, destination) =
        (names::client(cluster, client).await?, names::destination(cluster, destination).await?);
    let agents = cluster.agents().await?;
    let agents: Vec<Agent> = match &client.node {
        Some(node) => cluster::select(agents, std::slice::from_ref(node))?,
        None => agents,
    };
    let answers = cluster.ask_all(&agents, &["explain", &client.is, &destination]).await;
    let mut all = Outcome::new(String::new(), true);
    for (node, answer) in answers {
        match answer {
            Ok(Outcome { stdout, is_well: true, .. }) => {
                // Writing to a `String` cannot fail.
                let _ =
                    write!(all.stdout, "{} on node {node} connects to {destination}\n{stdout}", client.told);
            }
            Ok(Outcome { stderr: message, .. }) | Err(message) => {
                all.is_well = false;
                all.note(&node, &message);
            }
        }
    }
    Ok(all)
}

/// Parses the JSON of each node. If it cannot be parsed, the error is the node's standard error.
fn decoded<T: DeserializeOwned>(answers: Vec<(String, Result<Outcome, String>)>) -> PerNode<T> {
    let decode = |answer: Outcome| {
        serde_json::from_str(&answer.stdout).map_err(|error| match answer.stderr.trim() {
            "" => format!("cannot parse the answer: {error}"),
            told => told.to_owned(),
        })
    };
    answers.into_iter().map(|(node, answer)| (node, answer.and_then(decode))).collect()
}

#[cfg(test)]
mod mock;
#[cfg(test)]
mod tests;
