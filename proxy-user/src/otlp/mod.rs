//! OpenTelemetry: log records and spans in OTLP/JSON, and their export over HTTP.
//!
//! [`record`] and [`span`] are the formats; `ballast monitor -o otlp` writes a document of records on each line (the file format of
//! OpenTelemetry). The agent collects its log lines and spans by a [`Layer`] of the subscriber, and events of the programs from
//! elsewhere, in a bounded [`queue`]. [`export`] sends them in batches to a collector; it never holds up what fills the queue.
//!
//! OTLP/HTTP has two encodings, protobuf and JSON, and collectors take both at the same port. JSON needs nothing that the agent
//! does not have: its HTTP client, and serde. The crates `opentelemetry-*` bring 14 crates, `h2` and `prost` among them, and their
//! processors do not tell how much they have dropped.
//!
//! Source of the format: opentelemetry-proto (`logs.proto`, `trace.proto`), and the OTLP specification for JSON, retries and
//! partial success.

mod client;
pub mod counts;
mod envelope;
pub mod export;
mod layer;
pub mod queue;
pub mod record;
pub mod resource;
pub mod span;
pub mod value;

#[cfg(test)]
mod collector;
#[cfg(test)]
mod tests;

pub use client::{ClientError, Target};
pub use counts::{Counts, Loss, Signal};
pub use export::{Exporter, Running};
pub use layer::Layer;
pub use queue::Queue;
pub use resource::Resource;
