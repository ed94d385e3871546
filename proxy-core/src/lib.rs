//! What Ballast's agent decides, without the means to do it: no clock, no I/O, no Kubernetes types, no BPF.
//!
//! * [`model`]: the cluster and the node in the agent's own types.
//! * [`plan`]: the desired contents of the maps, computed from the model, without ids or positions.

pub mod model;
pub mod plan;
