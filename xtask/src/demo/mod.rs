//! `cargo xtask demo`: creates a small cluster on this machine and shows what Ballast does in it. The demo checks what it
//! shows, and fails if a check fails.

mod client;
mod manifest;
mod screen;
mod steps;
mod topology;
mod traffic;
mod workdir;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::setup::Need;
use crate::workspace::Workspace;
use crate::{build, exec, log, setup, signal};
use manifest::Manifest;
use screen::Screen;
use steps::Demo;
use topology::Topology;
use workdir::Workdir;

/// Build Ballast, create a small cluster of network namespaces with redis, and show what Ballast does (needs root).
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Keep the cluster running at the end, and print how to use it
    #[arg(long)]
    pub keep: bool,
    /// Delete kept clusters and the remains of interrupted demos
    #[arg(long, conflicts_with = "keep")]
    pub down: bool,
    /// Use this `ballast` instead of building one
    #[arg(long, value_name = "FILE", conflicts_with = "down")]
    pub ballast: Option<PathBuf>,
    /// What the demo calls itself with: ask the redis at this address
    #[arg(long, hide = true)]
    pub ask: Option<SocketAddr>,
    /// How often to ask; 0: without end
    #[arg(long, hide = true, requires = "ask", default_value_t = 0)]
    pub count: u32,
    /// What the demo calls itself with: print what this URL answers
    #[arg(long, hide = true, conflicts_with = "ask")]
    pub fetch: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if let Some(address) = args.ask {
        return client::ask(address, args.count);
    }
    if let Some(url) = &args.fetch {
        return client::fetch(url);
    }
    if !exec::is_root() {
        bail!(
            "the demo needs root to create network namespaces and load programs: `sudo -E env \"PATH=$PATH\" cargo xtask demo`"
        );
    }
    if args.down {
        return clear(true);
    }
    setup::tools(Need::Demo)?;
    let workspace = Workspace::find()?;
    let ballast = match &args.ballast {
        Some(file) => file.canonicalize().with_context(|| format!("no file {}", file.display()))?,
        None => made(&workspace)?,
    };
    clear(false)?;
    signal::catch();
    let start = Instant::now();
    let mut topology = Topology::new(Workdir::make()?, ballast);
    let example = workspace.root().join("deploy/examples/redis.yaml");
    let shown = show(&mut topology, &example, args.keep);
    if shown.is_ok() && args.keep {
        return Ok(());
    }
    // The last step removes the cluster. After a failure or Ctrl-C it still exists.
    let down = if topology.workdir.remains().is_empty() { Ok(()) } else { topology.take_down() };
    shown.and(down)?;
    log::line(format_args!("the demo took {}", log::seconds(start.elapsed())));
    Ok(())
}

/// Builds the BPF programs and the agent that contains them. It builds without optimisations: this takes a third of the
/// time, and what the demo shows runs in the kernel.
fn made(workspace: &Workspace) -> Result<PathBuf> {
    let args = build::Args::default();
    build::bpf(workspace, &args)?;
    build::agent(workspace, &args)
}

/// Removes what ended demos left behind; with `kept`, also kept clusters.
fn clear(kept: bool) -> Result<()> {
    let places = Workdir::left_over(kept)?;
    for workdir in &places {
        log::line(format_args!("removing the demo in {}", workdir.dir().display()));
        workdir.take_down()?;
    }
    if kept && places.is_empty() {
        log::line("no demo is running");
    }
    Ok(())
}

fn show(topology: &mut Topology, example: &Path, keep: bool) -> Result<()> {
    let screen = Screen::new();
    log::step("create two nodes, pods, and a machine outside the cluster");
    topology.build()?;
    let manifest = Manifest::copy(example, &topology.manifests())?;
    log::step("start three redis, and an agent on each node");
    topology.start_pods()?;
    for node in 0..topology::NODES.len() {
        topology.start_agent(node)?;
    }
    for node in 0..topology::NODES.len() {
        topology.await_agent(node)?;
    }
    let mut demo = Demo { screen, topology, manifest };
    demo.await_service()?;
    demo.show()?;
    if keep { demo.keep() } else { demo.clean() }
}
