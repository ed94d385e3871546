//! Lists from the API server.

use futures::{Stream, TryStreamExt};

use super::sources::{AuditError, Lists};
use proxy_core::model::{Key, Object};
use proxy_watch::api::fresh::Relister;

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
