//! `cargo xtask scale`: the agent, and hollow agents, at a size that is chosen.

use std::path::PathBuf;

use anyhow::Result;

use crate::exec::Cmd;
use crate::workspace::Workspace;
use crate::{apiserver, build, log};

/// Measure the agent at size, against a real API server (needs root, and Go the first time).
///
/// First the real agent: cold start, memory, CPU. Then hollow agents, which do all that agents do with maps in memory:
/// what the API server has to do for each of them at a start, when all restart at once, and under churn. Nothing fails
/// because the machine is slow or busy.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// How many Services there are
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub services: u32,
    /// How many endpoints each of them has
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub endpoints: u32,
    /// How many hollow agents are run; 0 measures the real one only
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=500))]
    pub agents: u32,
    /// For how many seconds 20 endpoints change in each; from 600 on, the slope of the agent's memory is told
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub churn: u32,
    /// Measure hollow agents only
    #[arg(long)]
    pub hollow_only: bool,
    /// Write the figures to this file too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    build::to_load(&workspace, "scale")?;
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
        // The benchmark runs in a folder of its own.
        cargo = cargo.arg("--json").arg(std::path::absolute(json)?);
    }
    cargo.run()
}
