//! `cargo xtask demo`: `xtask/tools/demo.sh` with what it needs.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::build;
use crate::exec::{self, Cmd};
use crate::setup::{self, Need};
use crate::workspace::Workspace;

/// Build Ballast, create a small cluster of network namespaces with redis, and show what Ballast does (needs root).
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Keep the cluster running at the end, and print how to use it
    #[arg(long)]
    keep: bool,
    /// Delete kept clusters and the remains of interrupted demos
    #[arg(long, conflicts_with = "keep")]
    down: bool,
    /// Use this `ballast` instead of building one
    #[arg(long, value_name = "FILE", conflicts_with = "down")]
    ballast: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !exec::is_root() {
        bail!(
            "the demo needs root to create network namespaces and load programs: `sudo -E env \"PATH=$PATH\" cargo xtask demo`"
        );
    }
    let workspace = Workspace::find()?;
    let script = Cmd::new(workspace.root().join("xtask/tools/demo.sh"));
    if args.down {
        return script.arg("down").run();
    }
    setup::tools(Need::Demo)?;
    let ballast = match &args.ballast {
        Some(file) => file.canonicalize().with_context(|| format!("no file {}", file.display()))?,
        None => {
            // Without optimisations: this takes a third of the time, and what the demo shows runs in the kernel.
            build::bpf(&workspace, &build::Args::default())?;
            build::agent(&workspace, &build::Args::default())?
        }
    };
    let example = workspace.root().join("deploy/examples/redis.yaml");
    let script = script.arg(ballast).arg(example).args(args.keep.then_some("keep"));
    // In the place of this process: Ctrl-C is for the script, which removes the cluster.
    Err(script.into_std().exec()).context("cannot start the demo")
}
