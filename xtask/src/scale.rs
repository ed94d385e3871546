//! `cargo xtask test scale`: measures the agent, and hollow agents, with a chosen number of Services and endpoints.

use std::path::PathBuf;

use anyhow::Result;

use crate::exec::Cmd;
use crate::workspace::Workspace;
use crate::{apiserver, build, log};

/// Measure the agent at scale, with a real API server (needs root, and Go the first time).
///
/// First the real agent: cold start, memory, CPU. Then hollow agents, which do the work of agents with maps in memory: the load
/// of the API server at a start, when all agents restart at the same time, and under churn. The command does not fail on a
/// slow or busy machine.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Number of Services
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub services: u32,
    /// Number of endpoints of each Service
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub endpoints: u32,
    /// Number of hollow agents; 0: measure only the real agent
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=500))]
    pub agents: u32,
    /// Duration of the churn in seconds: in each second 20 endpoints change. From 600 on, the growth of the agent's memory is reported
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub churn: u32,
    /// Measure only hollow agents
    #[arg(long)]
    pub hollow_only: bool,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    build::prepare_to_load(&workspace, "scale")?;
    let programs = apiserver::build(&workspace)?;
    log::step("scale");
    let mut cargo = Cmd::cargo()
        .args(["bench", "--workspace", "--bench", "scale", "--"])
        .args(["--services", &args.services.to_string(), "--endpoints", &args.endpoints.to_string()])
        .args(["--agents", &args.agents.to_string(), "--churn", &args.churn.to_string()])
        .dir(workspace.root());
    for (name, path) in programs.environment() {
        cargo = cargo.env(name, path);
    }
    if args.hollow_only {
        cargo = cargo.arg("--hollow-only");
    }
    if let Some(json) = &args.json {
        // An absolute path, because the benchmark runs in another folder.
        cargo = cargo.arg("--json").arg(std::path::absolute(json)?);
    }
    cargo.run()
}
