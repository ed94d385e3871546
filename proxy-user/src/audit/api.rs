//! Lists of the API server.

use super::{AuditError, Lists};
use crate::api::fresh::Fresh;
use crate::model::{Key, Object};

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> AuditError {
    AuditError::List(Box::new(error))
}

impl Lists for Fresh {
    async fn all(&self, each: impl FnMut(Object) + Send) -> Result<(), AuditError> {
        Self::all(self, each).await.map_err(failed)
    }

    async fn one(&self, key: &Key) -> Result<Option<Object>, AuditError> {
        Self::one(self, key).await.map_err(failed)
    }
}
