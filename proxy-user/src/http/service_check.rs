//! Answers the health checks of load balancers for Services with `externalTrafficPolicy: Local`: one server for each
//! `spec.healthCheckNodePort`, opened and closed together with the Service.
//!
//! Port, answer and header are kube-proxy's (`pkg/proxy/healthcheck/service_health.go`, 1.37): 200 if the node has a
//! ready endpoint and `/healthz` reports the agent as healthy, otherwise 503, for any path. Whether the node leaves does not
//! count: its endpoints still serve.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract;
use axum::http::HeaderValue;
use axum::response::Response;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::answer::{RETRY, State, json};
use super::health::{Check, report};
use super::listen::{Connections, open_one};
use crate::driver::Status;
use proxy_core::model::ServiceName;
use proxy_core::model::net::IpFamily;
use proxy_core::model::notice::Notice;

/// The pause between the first and the second attempt to listen: a port that moves from one Service to another is free by then.
const SOON: Duration = Duration::from_millis(200);
/// The most connections of all these servers together.
const MOST: usize = 1024;

/// The Service and the address of a server.
type Key = (ServiceName, SocketAddr);

/// The state from which a server builds its answers.
#[derive(Clone, Debug)]
struct CheckContext {
    service: ServiceName,
    family: IpFamily,
    state: State,
    fault: Arc<Fault>,
}

/// Why a server cannot listen; `None`: it listens.
#[derive(Debug)]
struct Fault {
    reason: Mutex<Option<String>>,
    /// Woken when the reason changes.
    changed: Arc<Notify>,
}

impl Fault {
    fn set(&self, reason: Option<String>) {
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        self.changed.notify_one();
    }

    fn get(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The cause of the standing faults of servers that cannot listen.
const CAUSE: &str = "health check node ports";

/// Runs the servers that the status requires, until the future is dropped.
pub async fn serve(state: State) {
    let mut status = state.status.clone();
    let mut servers: BTreeMap<Key, Server> = BTreeMap::new();
    let connections = Connections::new(MOST);
    let faults = Arc::new(Notify::new());
    loop {
        let wanted = wanted(&status.borrow_and_update());
        servers.retain(|key, _| wanted.contains(key));
        for key in wanted {
            let (service, address) = key.clone();
            let family = IpFamily::of(address.ip());
            let connections = connections.clone();
            servers.entry(key).or_insert_with(|| {
                let fault = Arc::new(Fault { reason: Mutex::default(), changed: Arc::clone(&faults) });
                let context =
                    CheckContext { service, family, state: state.clone(), fault: Arc::clone(&fault) };
                Server { task: tokio::spawn(run(address, context, connections)), fault }
            });
        }
        state.metrics.recent.set_standing(CAUSE, servers.values().filter_map(|server| server.fault.get()));
        tokio::select! {
            changed = status.changed() => if changed.is_err() {
                return;
            },
            () = faults.notified() => {}
        }
    }
}

/// Returns all addresses at which health checks are answered, in the families of each Service.
fn wanted(status: &Status) -> BTreeSet<Key> {
    let mut wanted = BTreeSet::new();
    for (service, check) in &*status.health_checks {
        let addresses = status.listen.iter().filter(|ip| check.local.contains_key(&IpFamily::of(**ip)));
        wanted.extend(addresses.map(|ip| (service.clone(), SocketAddr::new(*ip, check.port))));
    }
    wanted
}

/// A server that ends, and frees its port, when this is dropped.
struct Server {
    task: JoinHandle<()>,
    fault: Arc<Fault>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(address: SocketAddr, context: CheckContext, connections: Connections) {
    let router = Router::new().fallback(answer).with_state(context.clone());
    let mut failures = 0u32;
    loop {
        // In one family only: a Service may have only one.
        match open_one(address, true) {
            Ok(listener) => {
                tracing::debug!(service = %context.service, %address, "health check server started");
                if failures > 1 {
                    context.fault.set(None);
                }
                failures = 0;
                connections.serve(&listener, &router).await;
            }
            Err(error) => {
                failures = failures.saturating_add(1);
                if failures == 2 {
                    context.fault.set(Some(format!(
                        "Service {}: cannot listen on its healthCheckNodePort at {address}: {error}; load balancers get \
                         the answers of the process that has the port",
                        context.service
                    )));
                    tracing::warn!(
                        service = %context.service, %address, %error,
                        "cannot listen on the healthCheckNodePort; retrying every 5 s"
                    );
                    // The text is kube-proxy's. If the queue is full, the event is lost; the log has it.
                    let note = format!(
                        "node {} failed to start healthcheck {:?} on port {}: {error}",
                        context.state.node_name,
                        context.service.to_string(),
                        address.port()
                    );
                    let notice = Notice::no_health_check(context.service.clone(), note);
                    let _ = context.state.notices.try_send(notice);
                }
            }
        }
        tokio::time::sleep(if failures == 1 { SOON } else { RETRY }).await;
    }
}

/// The body of the answer, with kube-proxy's fields.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HealthCheckReply<'a> {
    service: Named<'a>,
    local_endpoints: usize,
    service_proxy_healthy: bool,
}

#[derive(Serialize)]
struct Named<'a> {
    namespace: &'a str,
    name: &'a str,
}

async fn answer(extract::State(context): extract::State<CheckContext>) -> Response {
    let CheckContext { service, family, state, .. } = context;
    let local = |status: &Status| Some(*status.health_checks.get(&service)?.local.get(&family)?);
    let local_endpoints = local(&state.status.borrow()).unwrap_or_default();
    let service_proxy_healthy = report(&state, Check::Healthz).is_healthy();
    let code = if local_endpoints > 0 && service_proxy_healthy { 200 } else { 503 };
    let service = Named { namespace: &service.namespace, name: &service.name };
    let mut response = json(code, &HealthCheckReply { service, local_endpoints, service_proxy_healthy });
    response
        .headers_mut()
        .insert("X-Load-Balancing-Endpoint-Weight", HeaderValue::from(local_endpoints as u64));
    response
}

#[cfg(test)]
mod tests;
