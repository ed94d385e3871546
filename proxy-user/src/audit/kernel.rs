//! Reads from the pinned maps what the programs see.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use proxy_common::service::{SCOPE_EXTERNAL, SCOPE_INTERNAL};
use tokio::task::spawn_blocking;

use super::sources::{AuditError, Frontends};
use crate::maps::view::{BackendState, FrontendRowScope, View, ViewError};
use proxy_core::store::FrontendKey;

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
        scope: if row.scope == FrontendRowScope::External { SCOPE_EXTERNAL } else { SCOPE_INTERNAL },
    };
    let endpoints = |row: &crate::maps::view::FrontendRow| {
        let of = row.backends.iter().filter_map(|id| backends.get(id));
        // The programs skip backends that are not active, and ids that belong to another Service port by now.
        let serving = of.filter(|it| it.state == BackendState::Active && it.service == row.service);
        serving.map(|backend| backend.socket).collect()
    };
    Ok(frontends.iter().map(|row| (key(row), endpoints(row))).collect())
}
