//! Commands that change something: they have no short names, and no environment variable selects what they remove.

use std::path::PathBuf;

use clap::Arg;
use clap::builder::FalseyValueParser;

use super::bpffs::BpffsArgs;
use super::common::{AgentArgs, FlowFilterArgs, ZeroArgs};
use super::list::{FormatArgs, SelectorArgs};

/// For commands that remove something: removes the variables of flags, so that only the command line selects what is removed.
pub(super) fn without_variables(arg: Arg) -> Arg {
    let stays = ["bpffs", "output", "no-headers", "run-dir", "kubeconfig", "master"];
    if arg.get_long().is_some_and(|long| stays.contains(&long)) { arg } else { arg.env(None::<&str>) }
}

/// `ballast flow delete`.
#[derive(Clone, Debug, clap::Args)]
pub struct FlowDeleteArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// How the connections are written that were removed.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Which.
    #[command(flatten)]
    pub which: FlowFilterArgs,
    /// Delete all connections; needed if no filter is given.
    #[arg(long, conflicts_with_all = ["services", "namespace", "selector", "client", "frontend", "backend", "protocol", "state"])]
    pub all: bool,
    /// Only print the connections that would be deleted.
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub dry_run: bool,
}

/// `ballast service zero`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceZeroArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The counters' zero.
    #[command(flatten)]
    pub zero: ZeroArgs,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// Reset the counters of all Services; needed if no Service is selected.
    #[arg(long, conflicts_with_all = ["services", "namespace", "selector"])]
    pub all: bool,
}

/// `ballast cleanup`.
#[derive(Clone, Debug, clap::Args)]
pub struct CleanupArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// Root of the cgroups whose sockets the agent translated. Default: the mount point of cgroup2.
    #[arg(long, env = "BALLAST_CGROUP_ROOT", value_name = "DIR")]
    pub cgroup_root: Option<PathBuf>,
    /// Only print what would be removed.
    #[arg(long, env = "BALLAST_DRY_RUN", value_parser = FalseyValueParser::new())]
    pub dry_run: bool,
    /// Do not ask for confirmation. Without a terminal the command never asks.
    #[arg(short, long)]
    pub yes: bool,
    /// After the cleanup, wait for SIGTERM. For containers that would otherwise be restarted.
    #[arg(long, env = "BALLAST_STAY", value_parser = FalseyValueParser::new(), conflicts_with = "dry_run")]
    pub stay: bool,
}

/// `ballast sysdump`.
#[derive(Clone, Debug, clap::Args)]
pub struct SysdumpArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The file to write; `-`: standard output. Default: ballast-sysdump-<host>-<time>.tar.gz in the current folder.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
}
