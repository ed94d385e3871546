//! Commands that change something: each is named in full, and nothing is removed by a variable.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;

/// `ballast cleanup`.
#[derive(Clone, Debug, clap::Args)]
pub struct CleanupArgs {
    /// Where the BPF file system is mounted that the agent used.
    #[arg(long, env = "BALLAST_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
    /// Root of the control groups whose sockets the agent served. Default: where cgroup2 is mounted.
    #[arg(long, env = "BALLAST_CGROUP_ROOT", value_name = "DIR")]
    pub cgroup_root: Option<PathBuf>,
    /// Only say what would be removed.
    #[arg(long, env = "BALLAST_DRY_RUN", value_parser = FalseyValueParser::new())]
    pub dry_run: bool,
    /// When all is removed, wait for SIGTERM: for a container, which would be started again otherwise.
    #[arg(long, env = "BALLAST_STAY", value_parser = FalseyValueParser::new(), conflicts_with = "dry_run")]
    pub stay: bool,
}
