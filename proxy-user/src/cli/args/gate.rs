//! `ballast gate`.

use std::net::{IpAddr, SocketAddr};

use clap::builder::FalseyValueParser;

use super::log::LogArgs;

/// `ballast gate`.
#[derive(Clone, Debug, clap::Args)]
pub struct GateArgs {
    /// A Service that selects the pod, in the pod's namespace; can be given several times.
    #[arg(long, required = true, env = "BALLAST_SERVICE", value_name = "NAME", value_delimiter = ',')]
    pub service: Vec<String>,
    /// The readiness gate: the type of the pod's condition.
    #[arg(long, env = "BALLAST_CONDITION", value_name = "TYPE", default_value = "ballast.io/programmed")]
    pub condition: String,
    /// Exit once the condition is set: for an init container. Without it, the command continues and answers at --listen: for a
    /// sidecar.
    #[arg(long, env = "BALLAST_ONCE", value_parser = FalseyValueParser::new())]
    pub once: bool,
    /// Where the preStop hooks of the pod's other containers ask, at the path /removed. The answer comes once no node sends new
    /// connections to the pod.
    #[arg(
        long,
        env = "BALLAST_LISTEN",
        value_name = "ADDRESS",
        default_value = "[::]:10266",
        conflicts_with = "once"
    )]
    pub listen: SocketAddr,
    /// Address of the node, where the agent answers (`status.hostIP`).
    #[arg(long, env = "BALLAST_HOST", value_name = "IP")]
    pub host: IpAddr,
    /// Port of the agent's health server.
    #[arg(long, env = "BALLAST_AGENT_PORT", value_name = "PORT", default_value_t = 10_256)]
    pub agent_port: u16,
    /// Namespace of the pod (`metadata.namespace`).
    #[arg(long, env = "BALLAST_NAMESPACE", value_name = "NAME")]
    pub namespace: String,
    /// Name of the pod (`metadata.name`).
    #[arg(long, env = "BALLAST_POD", value_name = "NAME")]
    pub pod: String,
    /// Addresses of the pod (`status.podIPs`).
    #[arg(long, env = "BALLAST_ADDRESSES", value_name = "IP", required = true, value_delimiter = ',')]
    pub addresses: Vec<IpAddr>,
    /// Its log.
    #[command(flatten)]
    pub log: LogArgs,
}
