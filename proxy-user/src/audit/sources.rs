//! What an audit asks: lists apart from any watch, the maps as the programs see them, and the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures::Stream;
use tokio::sync::{mpsc, oneshot};

use crate::maps::FrontendKey;
use crate::model::{Key, Object};
use crate::sync::Question;

/// How long a difference must last. A watch is behind by milliseconds; one that has failed begins again within 20 s, and its list
/// may be silent for 10 s before another one is asked for.
pub const GRACE: Duration = Duration::from_mins(1);
/// Why an audit came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The API server did not list its objects.
    #[error("cannot list from the API server: {0}")]
    List(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The maps cannot be read.
    #[error("cannot read the maps: {0}")]
    Maps(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The agent is ending.
    #[error("the agent is shutting down")]
    Ending,
}

/// Where objects are listed apart from any watch.
pub trait Lists {
    /// Every Service and every EndpointSlice that there is; an error is the end.
    fn all(&self) -> impl Stream<Item = Result<Object, AuditError>> + Send;
    /// One of them, as it is now; `None` if there is none.
    fn one(&self, key: &Key) -> impl Future<Output = Result<Option<Object>, AuditError>> + Send;
}

/// What the programs see: endpoints that take connections, by frontend.
pub trait Frontends {
    /// Reads the maps, which takes milliseconds.
    fn read(
        &self,
    ) -> impl Future<Output = Result<BTreeMap<FrontendKey, BTreeSet<SocketAddr>>, AuditError>> + Send;
}

/// The driver, to be asked.
#[derive(Clone, Debug)]
pub struct Ask(mpsc::Sender<Question>);

impl Ask {
    /// Asks the driver that takes its questions from the other end of `sender`.
    pub const fn new(sender: mpsc::Sender<Question>) -> Self {
        Self(sender)
    }

    pub(super) async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, AuditError> {
        let (reply, answer) = oneshot::channel();
        self.0.send(question(reply)).await.map_err(|_| AuditError::Ending)?;
        answer.await.map_err(|_| AuditError::Ending)
    }
}
