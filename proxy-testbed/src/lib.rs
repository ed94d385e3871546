//! What the tests and benchmarks of the agent share: network namespaces, API servers, the folder of manifests, packets, and the
//! programs in the kernel, with and without hooks.
#![expect(missing_docs, reason = "the names of what a test uses say what it is")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::missing_panics_doc, reason = "as above")]
#![expect(clippy::print_stdout, reason = "a benchmark prints a table")]

pub mod attach;
mod family;
pub mod harness;
pub mod isolate;
pub mod kube;
pub mod manifest;
pub mod node;
pub mod one_cpu;
pub mod packet;
pub mod report;
pub mod space;

pub use family::Family;
