//! `ballast takeover`.

use std::time::Duration;

use clap::builder::FalseyValueParser;

use proxy_cli::args::bpffs::BpffsArgs;
use proxy_cli::args::common::AgentArgs;
use proxy_cli::value;

/// `ballast takeover`.
#[derive(Clone, Debug, clap::Args)]
pub struct TakeoverArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Only print what would be removed.
    #[arg(long, env = "BALLAST_DRY_RUN", value_parser = FalseyValueParser::new())]
    pub dry_run: bool,
    /// Do not check whether the agent is ready and kube-proxy is stopped.
    #[arg(long)]
    pub force: bool,
    /// Wait at most this long for the connections of kube-proxy to end, then finish.
    #[arg(long, env = "BALLAST_WAIT", value_name = "DURATION", default_value = "0", value_parser = value::duration)]
    pub wait: Duration,
    /// Finish now. Connections of kube-proxy that are still open break.
    #[arg(long)]
    pub now: bool,
}
