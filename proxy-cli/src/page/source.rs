//! The source of the page's data: one agent, or the agents of a cluster.

use futures::stream::BoxStream;
use serde::Deserialize;

use super::history::HistoryAnswer;

/// Events, each a JSON object on one line.
pub type Events = BoxStream<'static, String>;

/// Parameters of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PageQuery {
    /// Select only Service ports with this text in their name or in an address.
    pub filter: String,
    /// Key of a Service port, like `default/web:http/TCP/IPv4`, that is included whatever its traffic.
    pub service: String,
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The maximum number of browsers is connected; each one costs resources.
    #[error("{most} browsers are already connected: close a page")]
    TooMany {
        /// The maximum number.
        most: usize,
    },
    /// The history is switched off (`--page-history 0`).
    #[error("the history is switched off (--page-history is 0)")]
    NoHistory,
    /// The agents of other nodes do not answer.
    #[error("{0}")]
    Unreachable(String),
}

/// A source of the page's data.
pub trait Source: Clone + Send + Sync + 'static {
    /// Returns the events from now on, until the stream is dropped.
    fn events(&self, query: PageQuery) -> impl Future<Output = Result<Events, Refusal>> + Send;

    /// Returns the history of the last hour, of all Service ports or of the one with this key.
    fn history(&self, service: String) -> impl Future<Output = Result<HistoryAnswer, Refusal>> + Send;
}
