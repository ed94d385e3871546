//! `cargo xtask test traffic`: `xtask/tools/traffic.sh` with what it needs.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::exec::{self, Cmd};
use crate::setup::{self, Need};
use crate::workspace::{self, Workspace};
use crate::{apiserver, build, log};

/// Packages of `PyPI`: QUIC and gRPC.
const PYTHON: [&str; 2] = ["aioquic==1.7.2", "grpcio==1.85.3"];

/// Run real clients and servers through Ballast on two nodes of network namespaces, with neighbours like keepalived and
/// firewalld, while endpoints change and agents are killed (needs root, and Go for kube-proxy).
///
/// Each request that fails is a failure. Without a part, all run, in 10 minutes.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// http, algorithms, redis, dns, iperf3, grpc, quic, sip, haproxy, keepalived, nodelocal, firewall, firewalld, kube-proxy
    /// [default: all]
    #[arg(value_name = "PART")]
    parts: Vec<String>,
    /// Remove what interrupted runs left behind
    #[arg(long, conflicts_with = "parts")]
    down: bool,
    /// Use this `ballast` instead of building one
    #[arg(long, value_name = "FILE", conflicts_with = "down")]
    ballast: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    exec::require_root("create network namespaces and load programs", "test traffic")?;
    let workspace = Workspace::find()?;
    let mut script = Cmd::new(workspace.root().join("xtask/tools/traffic.sh")).dir(workspace.root());
    if args.down {
        return script.arg("down").run();
    }
    setup::tools(Need::Traffic)?;
    if args.parts.is_empty() || args.parts.iter().any(|part| part == "kube-proxy") {
        for (name, path) in apiserver::build(&workspace)?.environment() {
            script = script.env(name, path);
        }
    }
    let ballast = build::given_or_built(&workspace, args.ballast.as_deref())?;
    let script = script.env("TRAFFIC_PYTHON", python_packages()?).arg(ballast).args(&args.parts);
    // In the place of this process: Ctrl-C is for the script, which removes the namespaces.
    Err(script.into_std().exec()).context("cannot start the script")
}

/// Finds or installs the packages of `PyPI`, in a folder of their own.
fn python_packages() -> Result<PathBuf> {
    let folder = workspace::cache()?.join(format!("python-{}", PYTHON.join("-").replace("==", "-")));
    if !folder.exists() {
        log::step(format_args!("pip install {}", PYTHON.join(" ")));
        let unfinished = folder.with_extension("unfinished");
        Cmd::new("python3")
            .args(["-m", "pip", "install", "-q", "--target"])
            .arg(&unfinished)
            .args(PYTHON)
            .run()?;
        fs_err::rename(&unfinished, &folder)?;
    }
    Ok(folder)
}
