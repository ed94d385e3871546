//! The API servers that the agent knows.

use serde::{Deserialize, Serialize};

/// The API servers, and which of them is active.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiServers {
    /// Their URLs, in the order in which they are tried. Empty without a cluster.
    pub servers: Vec<String>,
    /// The URL of the active server, to which the agent sends its requests; `None` until a server has answered.
    pub active: Option<String>,
    /// How often the active server did not answer and another one took its place.
    pub failovers: u64,
}
