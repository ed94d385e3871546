//! `cargo xtask bench`: the figures, measured on this machine, as one table.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::apiserver::Binaries;
use crate::exec::{self, Cmd};
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{apiserver, build, say};

/// Measure the figures and print them beside their targets (needs root).
///
/// Nothing fails because the machine is slow or busy: compare the ratios, and measure more than once.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// What to measure; all when nothing is named
    #[arg(value_enum)]
    pub parts: Vec<Part>,
    /// Write the figures to this file too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The packet programs, by `BPF_PROG_TEST_RUN`
    Packets,
    /// Connections through the socket hooks, between network namespaces
    Sockets,
    /// Connections from outside through node ports, beside the official kube-proxy in nftables mode (needs Go)
    NodePorts,
    /// The agent, from events to maps
    Agent,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Packets => "packets",
            Self::Sockets => "sockets",
            Self::NodePorts => "node-ports",
            Self::Agent => "agent",
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    if !exec::is_root() {
        bail!("needs root, to load programs: sudo -E env \"PATH=$PATH\" cargo xtask bench");
    }
    setup::tools(Need::Netns)?;
    build::bpf(&workspace, &build::Args::default())?;
    let programs = apiserver_for(&workspace, &args.parts)?;
    say::step("bench");
    let mut cargo = Cmd::cargo()
        .args(["bench", "-p", "proxy-user", "--bench", "figures", "--"])
        .args(args.parts.iter().map(|part| part.name()))
        .dir(workspace.root());
    for (name, path) in programs.iter().flat_map(Binaries::environment) {
        cargo = cargo.env(name, path);
    }
    if let Some(json) = &args.json {
        // The benchmark runs in a folder of its own.
        cargo = cargo.arg("--json").arg(std::path::absolute(json)?);
    }
    cargo.run()
}

/// What the comparison with kube-proxy needs. Without Go everything else is measured, unless it was asked for.
fn apiserver_for(workspace: &Workspace, parts: &[Part]) -> Result<Option<Binaries>> {
    if !parts.is_empty() && !parts.contains(&Part::NodePorts) {
        return Ok(None);
    }
    match apiserver::build(workspace) {
        Err(error) if parts.is_empty() => {
            say::line(format_args!("node ports are not measured: {error:#}"));
            Ok(None)
        }
        result => result.map(Some),
    }
}
