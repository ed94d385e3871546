//! Spans, and the documents that carry them.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use serde::{Serialize, Serializer};

use super::envelope;
use super::resource::Resource;
use super::value::{Attributes, nanoseconds};

/// `SPAN_KIND_INTERNAL`: the span neither serves a request nor makes one.
const INTERNAL: u8 = 1;

/// Ids of a span; OTLP's JSON encoding writes them as hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Context {
    /// Id of the trace, shared by all spans that belong together.
    #[serde(serialize_with = "trace_digits")]
    pub trace_id: u128,
    /// Id of the span.
    #[serde(serialize_with = "span_digits")]
    pub span_id: u64,
}

impl Context {
    /// Creates the ids of a span within `parent`, or of a span that starts a new trace.
    pub fn below(parent: Option<Self>) -> Self {
        let trace_id = || u128::from(random()) << 64 | u128::from(random());
        Self { trace_id: parent.map_or_else(trace_id, |parent| parent.trace_id), span_id: random() }
    }
}

/// Returns a random id; never 0, which OpenTelemetry treats as invalid. The keys of the standard library's hasher are random.
fn random() -> u64 {
    RandomState::new().hash_one(0).max(1)
}

/// OTLP's `Span`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Span {
    /// Ids of the span.
    #[serde(flatten)]
    pub context: Context,
    /// Id of the enclosing span.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "parent_digits")]
    pub parent_span_id: Option<u64>,
    /// Name of the operation.
    pub name: &'static str,
    /// Always [`INTERNAL`].
    kind: u8,
    /// Start time, in nanoseconds since 1970.
    #[serde(serialize_with = "nanoseconds")]
    pub start_time_unix_nano: u64,
    /// End time, in nanoseconds since 1970.
    #[serde(serialize_with = "nanoseconds")]
    pub end_time_unix_nano: u64,
    /// Details of the operation.
    pub attributes: Attributes,
    /// Whether the operation failed.
    pub status: Status,
}

impl Span {
    /// Creates a span that starts at `now` (nanoseconds since 1970).
    pub fn begin(name: &'static str, parent: Option<Context>, now: u64) -> Self {
        Self {
            context: Context::below(parent),
            parent_span_id: parent.map(|parent| parent.span_id),
            name,
            kind: INTERNAL,
            start_time_unix_nano: now,
            end_time_unix_nano: now,
            attributes: Attributes::default(),
            status: Status::default(),
        }
    }
}

/// OTLP's `Status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Error message; empty if there was no error.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// 0: unset; 2: error.
    pub code: u8,
}

impl Status {
    /// Returns the status of a failed operation.
    pub const fn error(message: String) -> Self {
        Self { message, code: 2 }
    }
}

fn trace_digits<S: Serializer>(id: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{id:032x}"))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn span_digits<S: Serializer>(id: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{id:016x}"))
}

#[expect(clippy::ref_option, reason = "serde hands over the field")]
fn parent_digits<S: Serializer>(id: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => span_digits(id, serializer),
        None => serializer.serialize_none(),
    }
}

/// Returns spans as one JSON document without line breaks.
pub fn document(resource: &Resource, spans: &[Span]) -> serde_json::Result<String> {
    envelope::document(resource, ["resourceSpans", "scopeSpans", "spans"], spans)
}
