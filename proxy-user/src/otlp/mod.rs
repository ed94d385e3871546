//! OpenTelemetry: log records and spans in OTLP/JSON, and their export over HTTP.
//!
//! [`record`] and [`span`] are the formats; `ballast monitor -o otlp` writes one document of records per line (OpenTelemetry's
//! file format). A [`Layer`] of the subscriber collects the agent's log lines and spans; events of the programs come from other
//! code. All wait in a bounded [`queue`]; [`export`] sends them in batches to a collector, and never blocks a caller.
//!
//! OTLP/HTTP has two encodings, protobuf and JSON, and collectors accept both at the same port. JSON needs only what the agent
//! already has: its HTTP client, and serde. The crates `opentelemetry-*` bring 14 crates, `h2` and `prost` among them, and
//! their processors do not report how many records they have dropped.
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
