//! The tracing span of a sync, with inner spans for planning and writing.

use std::time::Duration;

use tracing::field::Empty;
use tracing::info_span;
use tracing::span::{EnteredSpan, Span};

use proxy_core::spans;

/// Enters the span of a sync.
pub(super) fn begin(full: bool) -> EnteredSpan {
    info_span!(
        target: spans::TARGET,
        "sync",
        ballast.full = full,
        ballast.services = Empty,
        ballast.waited_us = Empty,
        ballast.failing_ports = Empty,
        error = Empty
    )
    .entered()
}

/// Enters the span of planning.
pub(super) fn plan() -> EnteredSpan {
    info_span!(target: spans::TARGET, "plan").entered()
}

/// Enters the span of writing.
pub(super) fn apply() -> EnteredSpan {
    info_span!(target: spans::TARGET, "apply").entered()
}

/// Records the result of a sync: the number of planned Services, how long the oldest change had waited, and the number of
/// failing Service ports.
pub(super) fn describe(span: &Span, services: usize, waited: Option<Duration>, failing: usize) {
    span.record("ballast.services", services as u64);
    if let Some(waited) = waited {
        span.record("ballast.waited_us", waited.as_micros() as u64);
    }
    span.record("ballast.failing_ports", failing as u64);
    if failing > 0 {
        span.record("error", "some Service ports are not programmed");
    }
}
