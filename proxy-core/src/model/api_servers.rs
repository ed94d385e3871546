//! The API servers that the agent knows.

use std::collections::BTreeMap;
use std::time::Instant;

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

/// The watches of the API server by resource, each with its failure if it fails.
pub type Watches = BTreeMap<&'static str, Option<WatchFailure>>;

/// A watch that fails: changes of its resource do not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchFailure {
    /// Time of the first failure since it worked.
    pub since: Instant,
    /// The last error.
    pub error: String,
}
