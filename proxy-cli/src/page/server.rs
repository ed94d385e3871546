//! The paths of the page.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::from_fn_with_state;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures::StreamExt as _;

use super::assets::{FILES, INDEX};
use super::guard::{self, Names};
use super::source::{PageQuery, Refusal, Source};

/// Returns the paths of the page. Besides addresses and `localhost`, browsers may use the host names `names` for this server.
pub fn router<S: Source>(source: S, names: Vec<String>) -> Router {
    let names: Names = Arc::new(names);
    Router::new()
        .route("/", get(|| async { file("text/html; charset=utf-8", INDEX) }))
        .route("/page/events", get(events::<S>))
        .route("/page/history", get(history::<S>))
        .route("/page/{name}", get(named))
        .route_layer(from_fn_with_state(names, guard::check))
        .with_state(source)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, kind)], text).into_response()
}

async fn named(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(known, ..)| *known == name) {
        Some((_, kind, text)) => file(kind, text),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn events<S: Source>(State(source): State<S>, Query(query): Query<PageQuery>) -> Response {
    match source.events(query).await {
        Ok(events) => {
            let events = events.map(|data| Ok::<_, Infallible>(Event::default().data(data)));
            Sse::new(events).keep_alive(KeepAlive::default()).into_response()
        }
        Err(refusal) => refused(&refusal),
    }
}

async fn history<S: Source>(State(source): State<S>, Query(query): Query<PageQuery>) -> Response {
    match source.history(query.service).await {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(refusal) => refused(&refusal),
    }
}

fn refused(refusal: &Refusal) -> Response {
    let status = match refusal {
        Refusal::TooMany { .. } => StatusCode::SERVICE_UNAVAILABLE,
        Refusal::NoHistory => StatusCode::NOT_FOUND,
        Refusal::Unreachable(_) => StatusCode::BAD_GATEWAY,
    };
    (status, refusal.to_string()).into_response()
}
