//! From the model to the desired state of the maps, with pure functions: the same cluster and node always give the same plan.
//!
//! One Service is planned at a time, in steps:
//!
//! 1. [`merged`] merges its slices: the endpoints of one port in one family, each address and port once.
//! 2. [`usable`] selects two sets: the endpoints for clients that may use any endpoint, and those for clients that a
//!    policy keeps on this node.
//! 3. [`frontend`] lists the frontends, and determines which of the two sets each of them uses.
//! 4. [`access`] determines which clients may use the addresses of a load balancer.

pub mod access;
pub mod devices;
pub mod frontend;
mod ipsec;
pub mod maglev;
pub mod merged;
pub mod node;
mod ports;
pub mod rebalance;
pub mod service;
pub mod slow_start;
pub mod tunnels;
pub mod types;
pub mod usable;
pub mod weights;

pub use node::{AddressFacts, NodePlan, PodRanges, plan_node};
pub use service::{PlanSettings, plan_service};
pub use types::{
    Access, BackendAddress, BackendFacts, Changing, Frontend, FrontendKind, FrontendPlan, HealthCheck,
    PortPlan, Scope, ServicePlan, ServicePortName, Unmanaged,
};

#[cfg(test)]
mod properties;
