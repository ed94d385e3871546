//! Where the page gets its data: from one agent, or from those of a cluster.

use futures::stream::BoxStream;
use serde::Deserialize;

use super::log::HistoryAnswer;

/// Events, each a JSON object in one line.
pub type Events = BoxStream<'static, String>;

/// What a browser asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Asked {
    /// Only Service ports with this text in their name or in an address.
    pub filter: String,
    /// The key of a Service port ([`ServiceRates::key`](crate::rates::ServiceRates::key)): it is told of, however silent it is.
    pub service: String,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Each listener costs something.
    #[error("{most} browsers are already connected: close a page")]
    TooMany {
        /// How many may.
        most: usize,
    },
    /// `--page-history 0`.
    #[error("the history is switched off (--page-history is 0)")]
    NoHistory,
    /// Other machines do not answer.
    #[error("{0}")]
    Unreachable(String),
}

/// Where the page gets its data.
pub trait Source: Clone + Send + Sync + 'static {
    /// What happens from now on, until the stream is dropped.
    fn events(&self, asked: Asked) -> impl Future<Output = Result<Events, Refusal>> + Send;

    /// What happened in the last hour, to all Service ports or to the one with this key.
    fn history(&self, service: String) -> impl Future<Output = Result<HistoryAnswer, Refusal>> + Send;
}
