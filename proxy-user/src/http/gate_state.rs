//! What the answers about pods need.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, PoisonError};

use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};

use super::listen::Client;
use crate::driver::{Ask, Question};
use proxy_core::model::ServiceName;

/// What the servers need to answer.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    /// The Service of all agents (`--gate-service`).
    pub(super) service: Option<ServiceName>,
    driver: Option<Ask>,
    /// One request at a time asks all agents: a client must not multiply its requests.
    turn: Arc<Mutex<()>>,
    /// One request of each client waits for its turn: the others of the client wait for that one, so that clients with few
    /// requests do not wait for those with many.
    clients: Arc<std::sync::Mutex<BTreeMap<IpAddr, Arc<Mutex<()>>>>>,
}

impl Gate {
    /// Answers with the driver's state; `service`: the Service of all agents.
    pub fn new(service: Option<ServiceName>, driver: Ask) -> Self {
        Self { service, driver: Some(driver), ..Self::default() }
    }

    /// Waits for the turn of a request of this client. The turn ends when the result is dropped.
    pub(super) async fn turn(&self, client: Option<Client>) -> [OwnedMutexGuard<()>; 2] {
        // Pods of a node share a network of 64 bits, so the whole address counts.
        let client = client.map_or(Ipv6Addr::UNSPECIFIED.into(), |client| client.0);
        let own = {
            let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
            clients.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(clients.entry(client).or_default())
        };
        let own = own.lock_owned().await;
        [Arc::clone(&self.turn).lock_owned().await, own]
    }

    /// Asks the driver; `None` if it has ended.
    pub(super) async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        self.driver.as_ref()?.ask(question).await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn busy_client_delays_another_by_one_request() {
        let gate = Gate::default();
        let client = |last| Some(Client([10, 0, 0, last].into()));
        let first = gate.turn(client(1)).await;
        let mut many: Vec<_> = (0..40).map(|_| Box::pin(gate.turn(client(1)))).collect();
        many.iter_mut().for_each(|one| assert!(one.now_or_never().is_none()));
        let mut other = Box::pin(gate.turn(client(2)));
        assert!((&mut other).now_or_never().is_none());
        drop(first);
        let next = (&mut other).now_or_never();
        assert!(next.is_some(), "the client has waited for one request of the other client");
        drop((next, other, many));
        assert_eq!(gate.turn(None).await.len(), 2);
        assert_eq!(gate.clients.lock().unwrap().len(), 1, "only clients that wait are kept");
    }
}
