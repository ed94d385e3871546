//! The HTTP servers of kube-proxy: health (10256, for load balancers), metrics (10249, for people and Prometheus), and
//! one for each Service with a health check of load balancers.
//!
//! | server | path | answer |
//! |---|---|---|
//! | health | `/healthz`, `/livez` | JSON, 200 or 503; see [`health`] |
//! | | `/readyz` | `ok`, or 503 until the listed objects are in the maps, and while socket programs or those of an uplink cannot be attached; kube-proxy has none |
//! | | `/gate/...` | whether nodes have programmed a pod; see [`gate`]; kube-proxy has none |
//! | metrics | `/metrics` | see [`crate::metrics`] |
//! | | `/proxyMode` | `ebpf` |
//! | | `/healthz`, `/livez` | `ok`, or 503 and the same JSON |
//! | | `/programmed`, `/programmed/NAMESPACE/NAME` | which version of each Service is programmed; kube-proxy has none |
//! | | `/status` | JSON: the problems of objects as sentences, the uplinks with their XDP modes, the API servers, resident memory; kube-proxy has none |
//! | | `/configz` | the settings in effect, as JSON: Ballast's, and as kube-proxy would write them |
//! | | `/`, `/page/...` | see [`crate::page`]; only with `--page`, kube-proxy has none |
//! | `healthCheckNodePort` | any | see [`service_check`] |
//!
//! `0.0.0.0` and `::` stand for the addresses of both families, as for kube-proxy. [`listen`] limits the connections.
//!
//! If an address is in use, the agent continues and tries again every five seconds, as kube-proxy does. With
//! `bindAddressHardFail`, the agent exits.

mod answer;
pub mod gate;
pub mod gate_state;
pub mod health;
mod listen;
mod programmed;
pub mod service_check;

use std::net::SocketAddr;

use axum::extract;
use axum::http::header::ACCEPT;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::{any, get};
use axum::{Extension, Router};

pub use answer::State;
use answer::{RETRY, Turn, in_turn, json, text, with_type};

use crate::metrics::Format;
use crate::metrics::recent::{FIRST_ATTACH, SOCKET_PROGRAMS};
use health::{Check, report};
use listen::Connections;
use proxy_core::model::notice::Notice;
use proxy_core::model::plural::plural;
use proxy_core::model::settings::PROXY_MODE;

/// The most connections of the health server, and of the metrics server, whose answers are larger.
const MOST_HEALTH: usize = 256;
const MOST_METRICS: usize = 64;

/// The names of the servers, and kube-proxy's reasons of the events that report that they cannot listen.
const HEALTH: (&str, &str) = ("health", "FailedToStartProxierHealthcheck");
const METRICS: (&str, &str) = ("metrics", "FailedToStartMetricServer");

/// A server cannot listen, and `bindAddressHardFail` is set.
#[derive(Debug, thiserror::Error)]
#[error(
    "the {server} server cannot listen on {address}: {source}; free the address, use another one, or remove \
     bindAddressHardFail"
)]
pub struct ListenError {
    /// `health` or `metrics`.
    pub server: &'static str,
    /// The address of the server.
    pub address: SocketAddr,
    /// The cause.
    pub source: std::io::Error,
}

/// The addresses of the servers; `None`: the server is off.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addresses {
    /// The address of the health server.
    pub health: Option<SocketAddr>,
    /// The address of the metrics server.
    pub metrics: Option<SocketAddr>,
    /// Whether an address in use is an error, instead of being tried again.
    pub hard_fail: bool,
}

/// Runs the servers until the future is dropped; returns only with [`Addresses::hard_fail`].
pub async fn serve(addresses: Addresses, state: State) -> Result<(), ListenError> {
    let Addresses { health, metrics, hard_fail } = addresses;
    let checks = service_check::serve(state.clone());
    let limit = Connections::new;
    let health = listen(HEALTH, health, hard_fail, &state, health_router(state.clone()), limit(MOST_HEALTH));
    let metrics =
        listen(METRICS, metrics, hard_fail, &state, metrics_router(state.clone()), limit(MOST_METRICS));
    let checks = async {
        checks.await;
        Ok(())
    };
    let history = async {
        if let Some(page) = state.page.as_ref().filter(|_| addresses.metrics.is_some()) {
            page.keep_history().await;
        }
        Ok(())
    };
    tokio::try_join!(health, metrics, checks, history).map(|_| ())
}

/// Returns the paths of the health server.
pub fn health_router(state: State) -> Router {
    Router::new()
        // kube-proxy answers any method: HAProxy's `option httpchk` sends OPTIONS.
        .route("/healthz", any(healthz))
        .route("/livez", any(livez))
        .route("/readyz", get(readyz))
        .route("/gate/node/{namespace}/{name}", get(gate::node))
        .route("/gate/nodes/{namespace}/{name}", get(gate::nodes))
        .with_state(state)
}

/// Returns the paths of the metrics server.
pub fn metrics_router(state: State) -> Router {
    let page = state.page.clone().map(|page| {
        let names = vec![state.node_name.clone()];
        proxy_cli::page::router(page, names)
    });
    let router = Router::new()
        .route("/metrics", get(scrape))
        .route("/proxyMode", any(|| async { text(StatusCode::OK, PROXY_MODE.to_owned()) }))
        .route("/healthz", any(ping))
        .route("/livez", any(ping))
        .route("/configz", get(configz))
        .route("/status", get(agent_status))
        .route("/programmed", get(programmed::all))
        .route("/programmed/{namespace}/{name}", get(programmed::named))
        .layer(Extension(Turn::default()))
        .with_state(state);
    match page {
        Some(page) => router.merge(page),
        None => router,
    }
}

async fn listen(
    (server, reason): (&'static str, &'static str),
    address: Option<SocketAddr>,
    hard_fail: bool,
    state: &State,
    router: Router,
    connections: Connections,
) -> Result<(), ListenError> {
    let Some(address) = address else { return Ok(()) };
    let mut is_logged = false;
    let recent = &state.metrics.recent;
    loop {
        match listen::open(address) {
            Ok(listener) => {
                // With port 0 the kernel selects the port, which only the listener knows.
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!(server, %address, "listening");
                recent.set_standing(server, None);
                is_logged = false;
                connections.serve(&listener, &router).await;
            }
            Err(source) if hard_fail => {
                let error = ListenError { server, address, source };
                let _ = state.notices.try_send(Notice::no_server(reason, error.to_string()));
                return Err(error);
            }
            // As kube-proxy, without an event: while it still runs on the node, its ports are in use.
            Err(error) if !is_logged => {
                is_logged = true;
                tracing::warn!(server, %address, %error, "cannot listen; retrying every 5 s");
                recent.set_standing(server, [format!(
                    "the {server} server cannot listen on {address}: {error}; clients get the answers of the process that has the address"
                )]);
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn healthz(extract::State(state): extract::State<State>) -> Response {
    let report = report(&state, Check::Healthz);
    state.metrics.answered_healthz(report.code());
    json(report.code(), &report)
}

async fn livez(extract::State(state): extract::State<State>) -> Response {
    let report = report(&state, Check::Livez);
    state.metrics.answered_livez(report.code());
    json(report.code(), &report)
}

/// Answers whether a rollout may continue with the next node: the listed objects have been in the maps once, a first agent has attached
/// its programs, and the last attempt to attach the socket programs has not failed, nor for two sync periods those of an uplink. Objects that cannot be programmed do not count, unless most cannot.
async fn readyz(extract::State(state): extract::State<State>) -> Response {
    let of = |cause| state.metrics.recent.standing_of(cause).pop();
    if let Some(fault) = of(FIRST_ATTACH).or_else(|| of(SOCKET_PROGRAMS)) {
        return text(StatusCode::SERVICE_UNAVAILABLE, fault);
    }
    let (synced, complete, failing, bare) = {
        let status = state.status.borrow();
        (status.synced, status.complete, status.failing, state.metrics.bare.first(&status.uplinks))
    };
    if let Some(device) = bare.filter(|device| device.since.elapsed() > state.patience) {
        let reason = format!("the uplink {} has no packet programs; see /status", device.name);
        return text(StatusCode::SERVICE_UNAVAILABLE, reason);
    }
    let reason = match (synced, complete) {
        (_, true) => return text(StatusCode::OK, "ok".to_owned()),
        (true, false) => format!("{} not programmed yet; see /status", plural(failing, "Service port")),
        (false, false) => "the first sync is not complete".to_owned(),
    };
    text(StatusCode::SERVICE_UNAVAILABLE, reason)
}

/// The metrics server reports only whether the agent works; whether the node may get traffic is reported by the health server.
async fn ping(extract::State(state): extract::State<State>) -> Response {
    let report = report(&state, Check::Livez);
    match report.code() {
        200 => text(StatusCode::OK, "ok".to_owned()),
        code => json(code, &report),
    }
}

async fn configz(extract::State(state): extract::State<State>) -> Response {
    json(200, &*state.config)
}

/// For `ballast status`: what neither maps nor pins show.
async fn agent_status(
    extract::State(state): extract::State<State>,
    Extension(turn): Extension<Turn>,
) -> Response {
    let build = move || {
        let mut problems: Vec<_> = state.status.borrow().problems.iter().map(ToString::to_string).collect();
        problems.extend(state.metrics.recent.faults());
        let State { metrics, .. } = state;
        let status = serde_json::json!({
            "problems": problems,
            "xdp": metrics.xdp(),
            "resident": metrics.resident(),
            "apiServers": metrics.api_servers(),
        });
        json(200, &status)
    };
    in_turn(turn, build).await
}

async fn scrape(
    extract::State(state): extract::State<State>,
    Extension(turn): Extension<Turn>,
    headers: HeaderMap,
) -> Response {
    let accept: Vec<_> = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = Format::negotiate(&accept.join(","));
    let encode = move || match state.metrics.encode(format) {
        Ok(body) => with_type(StatusCode::OK, format.content_type(), body),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    in_turn(turn, encode).await
}

#[cfg(test)]
pub(crate) mod tests;
