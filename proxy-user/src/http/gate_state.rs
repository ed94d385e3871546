//! What the answers about pods need.

use std::sync::Arc;

use tokio::sync::{Mutex, mpsc, oneshot};

use crate::driver::Question;
use proxy_core::model::ServiceName;

/// What the servers need to answer.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    /// The Service of all agents (`--gate-service`).
    pub(super) service: Option<ServiceName>,
    /// The queue of the driver.
    questions: Option<mpsc::Sender<Question>>,
    /// One request at a time asks all agents: a client must not multiply its requests.
    pub(super) turn: Arc<Mutex<()>>,
}

impl Gate {
    /// Answers with the driver's state; `service`: the Service of all agents.
    pub fn new(service: Option<ServiceName>, questions: mpsc::Sender<Question>) -> Self {
        Self { service, questions: Some(questions), turn: Arc::default() }
    }

    /// Asks the driver; `None` if it has ended.
    pub(super) async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.questions.as_ref()?.send(question(reply)).await.ok()?;
        answer.await.ok()
    }
}
