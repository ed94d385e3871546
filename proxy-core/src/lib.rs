//! What Ballast's agent decides, without the means to do it: no clock, no I/O, no Kubernetes types, no BPF.
//!
//! * [`model`]: the cluster and the node in the agent's own types.
//! * [`plan`]: the desired contents of the maps, computed from the model, without ids or positions.
//! * [`store`]: the tables, in memory or behind an interface.
//! * [`docs`]: addresses of the documentation.
//! * [`spans`]: which of the agent's work is recorded as a span.
//! * [`sync`]: ids, extents, the difference to what is applied, ordered writes.

pub mod docs;
pub mod model;
pub mod plan;
pub mod spans;
pub mod store;
pub mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
