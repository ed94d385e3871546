//! Arguments that several commands share.

use std::path::PathBuf;

use super::bpffs::BpffsArgs;
use super::list::{OutputArgs, SelectorArgs};
use crate::question::{self, Peer};
use crate::value::Listen;
use proxy_core::model::FlowState;
use proxy_core::model::net::Protocol;

/// What every reading command takes that is no list.
#[derive(Clone, Debug, clap::Args)]
pub struct ReaderArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// How the answer is written.
    #[command(flatten)]
    pub format: OutputArgs,
}

/// What every command takes that asks the agent whether it is well.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct AgentArgs {
    /// Address of the agent's metrics server. Default: 127.0.0.1:10249 or, if nothing answers there, `[::1]:10249`.
    #[arg(long, env = "BALLAST_METRICS_BIND_ADDRESS", value_name = "ADDRESS")]
    pub metrics_bind_address: Option<Listen>,
}

/// Where it is noted what the counters were when they were made zero.
#[derive(Clone, Debug, clap::Args)]
pub struct ZeroArgs {
    /// Folder in which `ballast service zero` stores the values of the counters.
    #[arg(long, env = "BALLAST_RUN_DIR", value_name = "DIR", default_value = "/run/ballast")]
    pub run_dir: PathBuf,
}

/// Which connections are meant; those that all of it fits.
#[derive(Clone, Debug, clap::Args)]
pub struct FlowFilterArgs {
    /// Of which Services.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// Only connections of this client: an address or a range, with or without :PORT.
    #[arg(
        short = 's',
        long,
        visible_alias = "src",
        env = "BALLAST_CLIENT",
        value_name = "ADDRESS[:PORT][/PROTOCOL]"
    )]
    pub client: Option<Peer>,
    /// Only connections to this frontend: the destination to which the client connected.
    #[arg(
        short = 'd',
        long,
        visible_alias = "dst",
        env = "BALLAST_FRONTEND",
        value_name = "ADDRESS[:PORT][/PROTOCOL]"
    )]
    pub frontend: Option<Peer>,
    /// Only connections to this endpoint.
    #[arg(long, env = "BALLAST_BACKEND", value_name = "ADDRESS[:PORT][/PROTOCOL]")]
    pub backend: Option<Peer>,
    /// Only connections of this protocol.
    #[arg(short, long, visible_alias = "proto", env = "BALLAST_PROTOCOL", value_name = "PROTOCOL", value_parser = question::protocols())]
    pub protocol: Option<Protocol>,
    /// Only connections in this state.
    #[arg(long, env = "BALLAST_STATE", value_name = "STATE", value_parser = question::flow_states())]
    pub state: Option<FlowState>,
}
