//! A sync as a span, with planning and writing as spans in it.

use std::time::Duration;

use tracing::field::Empty;
use tracing::info_span;
use tracing::span::{EnteredSpan, Span};

use crate::spans;

/// Begins a sync.
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

/// Begins a part of it.
pub(super) fn plan() -> EnteredSpan {
    info_span!(target: spans::TARGET, "plan").entered()
}

/// The same.
pub(super) fn apply() -> EnteredSpan {
    info_span!(target: spans::TARGET, "apply").entered()
}

/// Says what it did: for so many Services, the first of which has waited so long; so many Service ports are not as they should be.
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
