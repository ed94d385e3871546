//! `ballast programmed`.

use super::common::AgentArgs;
use super::list::{SelectorArgs, ViewArgs};

/// `ballast programmed`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProgrammedArgs {
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// How.
    #[command(flatten)]
    pub list: ViewArgs,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
}
