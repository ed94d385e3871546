//! The result of one look at the maps.

use crate::cli::show::AgentState;
use crate::maps::view::FlowRow;
use crate::rates::Counters;

/// Maximum number of examples of each reason.
pub(super) const EXAMPLES: usize = 8;

/// The result of one look at the maps.
#[derive(Debug)]
pub(super) struct Sample {
    /// The counters, or why they cannot be read.
    pub counters: Result<Counters, String>,
    /// State of the agent.
    pub agent: AgentState,
    /// Flows, if they are shown.
    pub flows: Vec<FlowRow>,
    /// Refused and dropped packets and calls since the previous look, if shown: the reason's label, and the event as text.
    pub examples: Vec<(&'static str, String)>,
}
