//! The API servers that the agent knows.

use serde::{Deserialize, Serialize};

/// The API servers, and which of them is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiServers {
    /// Their URLs, in the order in which they are tried. Empty without a cluster.
    pub servers: Vec<String>,
    /// The URL of the server that is asked; `None` until one has answered.
    pub active: Option<String>,
    /// How often the active server did not answer and another one took its place.
    pub failovers: u64,
}
