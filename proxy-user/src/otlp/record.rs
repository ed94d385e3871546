//! Log records, and the documents that carry them.

use serde::{Serialize, Serializer};

use super::envelope;
use super::resource::Resource;
use super::span::Context;
use super::value::{Attributes, Value, nanoseconds};

/// OTLP's `LogRecord`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LogRecord {
    /// Time of the event, in nanoseconds since 1970; 0: unknown.
    #[serde(serialize_with = "nanoseconds")]
    pub time_unix_nano: u64,
    /// Time at which the event was observed, in nanoseconds since 1970.
    #[serde(serialize_with = "nanoseconds")]
    pub observed_time_unix_nano: u64,
    /// Severity of the event.
    #[serde(flatten)]
    pub severity: Severity,
    /// Message for people.
    pub body: Value,
    /// Details for programs.
    pub attributes: Attributes,
    /// Span in which the event happened.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub context: Option<Context>,
    /// Kind of the event; empty for a line of the log.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub event_name: &'static str,
}

/// OTLP's `SeverityNumber`: the first number of each range. It is serialized with its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "OpenTelemetry's names")]
pub enum Severity {
    Trace = 1,
    Debug = 5,
    Info = 9,
    Warn = 13,
    Error = 17,
}

impl Severity {
    const fn text(self) -> &'static str {
        match self {
            Self::Trace => "TRACE",
            Self::Debug => "DEBUG",
            Self::Info => "INFO",
            Self::Warn => "WARN",
            Self::Error => "ERROR",
        }
    }
}

impl Serialize for Severity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Both {
            severity_number: u8,
            severity_text: &'static str,
        }
        Both { severity_number: *self as u8, severity_text: self.text() }.serialize(serializer)
    }
}

/// Returns records as one JSON document without line breaks.
pub fn document(resource: &Resource, records: &[LogRecord]) -> serde_json::Result<String> {
    envelope::document(resource, ["resourceLogs", "scopeLogs", "logRecords"], records)
}
