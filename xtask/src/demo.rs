//! `cargo xtask demo`: `xtask/tools/demo.sh` with what it needs.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

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
    exec::require_root("create network namespaces and load programs", "demo")?;
    let workspace = Workspace::find()?;
    let script = Cmd::new(workspace.root().join("xtask/tools/demo.sh"));
    if args.down {
        return script.arg("down").run();
    }
    setup::tools(Need::Demo)?;
    let ballast = build::given_or_built(&workspace, args.ballast.as_deref())?;
    let example = workspace.root().join("deploy/examples/redis.yaml");
    let script = script.arg(ballast).arg(example).args(args.keep.then_some("keep"));
    // In the place of this process: Ctrl-C is for the script, which removes the cluster.
    Err(script.into_std().exec()).context("cannot start the demo")
}
