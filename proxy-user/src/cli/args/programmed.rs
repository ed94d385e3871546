//! `ballast programmed`.

use super::common::AgentArgs;

/// `ballast programmed`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProgrammedArgs {
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Only this Service: NAMESPACE/NAME; without namespace, `default`.
    #[arg(value_name = "NAMESPACE/NAME")]
    pub service: Option<String>,
}
