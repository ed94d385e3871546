//! `cargo xtask test bench`: measures the figures on this machine, and prints them as one table.

mod chart;
mod page;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::apiserver::Binaries;
use crate::exec::Cmd;
use crate::workspace::Workspace;
use crate::{apiserver, build, cross, log};
pub use chart::lines;

/// Run the benchmarks and print the figures with their targets (needs root).
///
/// The command does not fail on a slow or busy machine: compare the ratios, and measure more than once.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// What to measure [default: all]
    #[arg(value_enum)]
    pub parts: Vec<Part>,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page for `docs/` with tables and plots into this folder
    #[arg(long, value_name = "FOLDER")]
    pub page: Option<PathBuf>,
    /// Make the page from figures that `--json` wrote before; measure nothing
    #[arg(long, value_name = "FILE", requires = "page", conflicts_with_all = ["parts", "json"])]
    pub from: Option<PathBuf>,
}

/// A group of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The packet programs, with `BPF_PROG_TEST_RUN`
    Packets,
    /// XDP on a veth pair, compared with minimal programs
    Wire,
    /// A million flows: created, looked up, listed
    Flows,
    /// Traffic between pods without Services, with and without the packet programs
    Foreign,
    /// Maps that grow under 200,000 packets per second
    Growth,
    /// Connections through the socket hooks, between network namespaces
    Sockets,
    /// Connections through node ports and `ClusterIP`s, compared with kube-proxy in nftables and iptables mode (needs Go)
    NodePorts,
    /// Maglev tables: time, memory, shares
    Tables,
    /// The agent, from events to maps
    Agent,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    if let (Some(json), Some(folder)) = (&args.from, &args.page) {
        return write_page(json, &page::Machine::this(workspace.root()), folder);
    }
    build::prepare_to_load(&workspace, "bench")?;
    let programs = apiserver_for(&workspace, &args.parts)?;
    log::step("bench");
    let mut cargo = Cmd::cargo()
        .args(["bench", "--workspace", "--bench", "figures", "--"])
        .args(args.parts.iter().map(cross::name))
        .dir(workspace.root());
    for (name, path) in programs.iter().flat_map(Binaries::environment) {
        cargo = cargo.env(name, path);
    }
    // Absolute paths, because the benchmark runs in another folder.
    let between = workspace.target().join("figures.json");
    let json = match (&args.json, &args.page) {
        (Some(json), _) => Some(std::path::absolute(json)?),
        (None, Some(_)) => Some(between),
        (None, None) => None,
    };
    if let Some(json) = &json {
        cargo = cargo.arg("--json").arg(json);
    }
    cargo.run()?;
    if let (Some(json), Some(folder)) = (&json, &args.page) {
        write_page(json, &page::Machine::this(workspace.root()), folder)?;
    }
    Ok(())
}

fn write_page(json: &Path, machine: &page::Machine, folder: &Path) -> Result<()> {
    let figures = fs_err::read_to_string(json)?;
    page::write(&figures, machine, folder)?;
    log::line(format_args!("{}", folder.join("README.md").display()));
    Ok(())
}

/// Finds or builds the programs for the comparison with kube-proxy. If that fails, as without Go, everything else is
/// measured, unless `parts` names the comparison.
fn apiserver_for(workspace: &Workspace, parts: &[Part]) -> Result<Option<Binaries>> {
    if !parts.is_empty() && !parts.contains(&Part::NodePorts) {
        return Ok(None);
    }
    match apiserver::build(workspace) {
        Err(error) if parts.is_empty() => {
            log::line(format_args!("node ports are not measured: {error:#}"));
            Ok(None)
        }
        result => result.map(Some),
    }
}
