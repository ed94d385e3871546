//! The sources of an audit: lists without a watch, the maps as the programs see them, and the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures::{Stream, TryStreamExt};
use proxy_common::service::{SCOPE_EXTERNAL, SCOPE_INTERNAL};
use tokio::task::spawn_blocking;

use crate::maps::view::{BackendState, View, ViewError};
use proxy_core::model::{Key, Object};
use proxy_core::plan::Scope;
use proxy_core::store::FrontendKey;
use proxy_watch::api::fresh::Relister;

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

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> AuditError {
    AuditError::List(Box::new(error))
}

impl Lists for Relister {
    fn all(&self) -> impl Stream<Item = Result<Object, AuditError>> + Send {
        Self::all(self).map_err(failed)
    }

    async fn one(&self, key: &Key) -> Result<Option<Object>, AuditError> {
        Self::one(self, key).await.map_err(failed)
    }
}

impl Frontends for View {
    async fn read(&self) -> Result<BTreeMap<FrontendKey, BTreeSet<SocketAddr>>, AuditError> {
        let view = self.clone();
        let found = spawn_blocking(move || read(&view)).await.map_err(|_| AuditError::Ending)?;
        found.map_err(|error| AuditError::Maps(Box::new(error)))
    }
}

fn read(view: &View) -> Result<BTreeMap<FrontendKey, BTreeSet<SocketAddr>>, ViewError> {
    let (frontends, backends) = (view.services()?, view.backends()?);
    let key = |row: &crate::maps::view::FrontendRow| FrontendKey {
        addr: row.address,
        port: row.port,
        proto: row.protocol.0,
        scope: if row.scope == Scope::External { SCOPE_EXTERNAL } else { SCOPE_INTERNAL },
    };
    let endpoints = |row: &crate::maps::view::FrontendRow| {
        let of = row.backends.iter().filter_map(|id| backends.get(id));
        // The programs skip backends that are not active, and ids that belong to another Service port by now.
        let serving = of.filter(|it| it.state == BackendState::Active && it.service == row.service);
        serving.map(|backend| backend.socket).collect()
    };
    Ok(frontends.iter().map(|row| (key(row), endpoints(row))).collect())
}
