//! `ballast end-udp-sockets`.

use super::log::LogArgs;
use proxy_cli::args::bpffs::BpffsArgs;

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
