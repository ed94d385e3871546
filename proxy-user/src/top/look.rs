//! What one look at the maps has found.

use crate::cli::show::AgentState;
use crate::maps::view::FlowRow;
use crate::rates::Counters;

/// Examples that are kept of each reason.
pub(super) const EXAMPLES: usize = 8;

/// What one look has found.
#[derive(Debug)]
pub(super) struct Look {
    /// The counters, or why they cannot be read.
    pub counters: Result<Counters, String>,
    /// What the agent says.
    pub agent: AgentState,
    /// Connections, where they are shown.
    pub flows: Vec<FlowRow>,
    /// What was refused or dropped since the look before, where that is shown: the reason's label, and the event in words.
    pub examples: Vec<(&'static str, String)>,
}
