//! `ballast end-udp-sockets`.

use std::path::PathBuf;

use crate::config::value::{LogFormat, LogLevel};

/// `ballast end-udp-sockets`.
#[derive(Clone, Debug, clap::Args)]
pub struct EndUdpSocketsArgs {
    /// Where the BPF file system is mounted that the agent uses.
    #[arg(long, env = "BALLAST_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
    /// How log lines are written.
    #[arg(long, env = "BALLAST_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// How much is logged: error, warn, info, debug, trace, or a klog number.
    #[arg(
        short = 'v',
        long,
        alias = "v",
        env = "BALLAST_LOG_LEVEL",
        value_name = "LEVEL",
        default_value = "info"
    )]
    pub log_level: LogLevel,
}
