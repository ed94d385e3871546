//! What the answers about pods need.

use std::sync::Arc;

use tokio::sync::{Mutex, oneshot};

use crate::driver::{Ask, Question};
use proxy_core::model::ServiceName;

/// What the servers need to answer.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    /// The Service of all agents (`--gate-service`).
    pub(super) service: Option<ServiceName>,
    driver: Option<Ask>,
    /// One request at a time asks all agents: a client must not multiply its requests.
    pub(super) turn: Arc<Mutex<()>>,
}

impl Gate {
    /// Answers with the driver's state; `service`: the Service of all agents.
    pub fn new(service: Option<ServiceName>, driver: Ask) -> Self {
        Self { service, driver: Some(driver), turn: Arc::default() }
    }

    /// Asks the driver; `None` if it has ended.
    pub(super) async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        self.driver.as_ref()?.ask(question).await
    }
}
