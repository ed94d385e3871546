//! Flags of `ballast end-udp-sockets`, and flags about the log of the commands beside the agent.

use crate::config::choices::choice;
use proxy_cli::args::bpffs::BpffsArgs;
use proxy_cli::value::{LogFormat, LogLevel};

/// Flags about the log.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct LogArgs {
    /// Format of log lines.
    #[arg(long, env = "BALLAST_LOG_FORMAT", value_name = "FORMAT", default_value = "text", value_parser = choice::<LogFormat>())]
    pub log_format: LogFormat,
    /// Log level: error, warn, info, debug, trace, or a klog number.
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

/// `ballast end-udp-sockets`.
#[derive(Clone, Debug, clap::Args)]
pub struct EndUdpSocketsArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// Its log.
    #[command(flatten)]
    pub log: LogArgs,
}
