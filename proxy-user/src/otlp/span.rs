//! Spans, and the documents that carry them.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use serde::{Serialize, Serializer};

use super::envelope;
use super::resource::Resource;
use super::value::{Attributes, nanoseconds};

/// `SPAN_KIND_INTERNAL`: it neither serves a request nor makes one.
const INTERNAL: u8 = 1;

/// Which span: in hexadecimal digits, as the JSON of OTLP has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Context {
    /// Of all spans that belong together.
    #[serde(serialize_with = "trace_digits")]
    pub trace_id: u128,
    /// Of this one.
    #[serde(serialize_with = "span_digits")]
    pub span_id: u64,
}

impl Context {
    /// A span in a span, or one that begins a trace.
    pub fn below(parent: Option<Self>) -> Self {
        let trace_id = || u128::from(random()) << 64 | u128::from(random());
        Self { trace_id: parent.map_or_else(trace_id, |parent| parent.trace_id), span_id: random() }
    }
}

/// Random and never 0, which OpenTelemetry takes for no id. The keys of the standard library's hasher are random.
fn random() -> u64 {
    RandomState::new().hash_one(0).max(1)
}

/// `Span`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Span {
    /// Which one.
    #[serde(flatten)]
    pub context: Context,
    /// The span that it is in.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "parent_digits")]
    pub parent_span_id: Option<u64>,
    /// What was done.
    pub name: &'static str,
    /// Always [`INTERNAL`].
    kind: u8,
    /// When it began, in nanoseconds since 1970.
    #[serde(serialize_with = "nanoseconds")]
    pub start_time_unix_nano: u64,
    /// When it ended, likewise.
    #[serde(serialize_with = "nanoseconds")]
    pub end_time_unix_nano: u64,
    /// With what.
    pub attributes: Attributes,
    /// How it ended.
    pub status: Status,
}

impl Span {
    /// A span that begins now.
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

/// `Status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// What failed, if something did.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// 0: nothing is said; 2: an error.
    pub code: u8,
}

impl Status {
    /// It failed.
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

/// Spans as one document, without line breaks.
pub fn document(resource: &Resource, spans: &[Span]) -> serde_json::Result<String> {
    envelope::document(resource, ["resourceSpans", "scopeSpans", "spans"], spans)
}
