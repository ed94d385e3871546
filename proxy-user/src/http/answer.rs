//! Common parts of the HTTP servers: their state, and functions that build responses.

use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use tokio::sync::{Mutex, mpsc, watch};

use super::gate_state::Gate;
use crate::driver::{Programmed, Status};
use crate::metrics::Metrics;
use crate::page::Agent;
use proxy_core::model::notice::Notice;

/// The pause between two attempts to listen.
pub(super) const RETRY: Duration = Duration::from_secs(5);

/// The state from which the servers build their answers.
#[derive(Clone, Debug)]
pub struct State {
    /// The status that the owner of the maps publishes.
    pub status: watch::Receiver<Status>,
    /// Which version of each Service is programmed.
    pub programmed: Programmed,
    /// How long a change may wait before the agent is unhealthy: two sync periods.
    pub patience: Duration,
    /// The queue of Kubernetes Events.
    pub notices: mpsc::Sender<Notice>,
    /// This node's name.
    pub node_name: String,
    /// All metrics.
    pub metrics: Arc<Metrics>,
    /// The settings in effect, by component.
    pub config: Arc<serde_json::Value>,
    /// What pods may ask.
    pub gate: Gate,
    /// The page of the metrics server, if it is enabled.
    pub page: Option<Agent>,
}

/// Large answers are built one after the other: each reads all maps, or the state of all Services.
pub(super) type Turn = Arc<Mutex<()>>;

/// Builds a large answer, which takes milliseconds or more, on a thread that serves no requests.
pub(super) async fn in_turn(turn: Turn, build: impl FnOnce() -> Response + Send + 'static) -> Response {
    let turn = turn.lock_owned().await;
    let build = move || {
        // If the client gives up, the next answer still waits for the end of this one.
        let _turn = turn;
        build()
    };
    let built = tokio::task::spawn_blocking(build).await;
    built.unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

pub(super) fn text(status: StatusCode, body: String) -> Response {
    with_type(status, "text/plain; charset=utf-8", body)
}

pub(super) fn json(code: u16, value: &impl serde::Serialize) -> Response {
    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    match serde_json::to_string(value) {
        Ok(body) => with_type(status, "application/json", body),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

pub(super) fn with_type(status: StatusCode, kind: &'static str, body: String) -> Response {
    let headers: [(HeaderName, HeaderValue); 2] = [
        (CONTENT_TYPE, HeaderValue::from_static(kind)),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (status, headers, body).into_response()
}
