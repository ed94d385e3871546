//! The sources of an audit: lists without a watch, the maps as the programs see them, and the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures::Stream;

use proxy_core::model::{Key, Object};
use proxy_core::store::FrontendKey;

/// The time for which a difference must last. A watch is behind by milliseconds; a failed watch restarts within 20 s.
pub const GRACE: Duration = Duration::from_mins(1);
/// The reason why an audit failed.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The API server did not list its objects.
    #[error("cannot list from the API server: {0}")]
    List(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The maps cannot be read.
    #[error("cannot read the maps: {0}")]
    Maps(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The agent is shutting down.
    #[error("the agent is shutting down")]
    Ending,
}

/// A source that lists objects without a watch.
pub trait Lists {
    /// Returns every existing Service and EndpointSlice; the stream ends after an error.
    fn all(&self) -> impl Stream<Item = Result<Object, AuditError>> + Send;
    /// Returns the current content of one object; `None` if it does not exist.
    fn one(&self, key: &Key) -> impl Future<Output = Result<Option<Object>, AuditError>> + Send;
}

/// What the programs see: the endpoints for new connections, by frontend.
pub trait Frontends {
    /// Reads the maps; this takes milliseconds.
    fn read(
        &self,
    ) -> impl Future<Output = Result<BTreeMap<FrontendKey, BTreeSet<SocketAddr>>, AuditError>> + Send;
}
