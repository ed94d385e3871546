//! From the model to what the maps should say, purely: the same cluster and node always give the same plan.

pub mod types;

pub use types::{
    BackendAddress, BackendFacts, Frontend, FrontendKind, FrontendPlan, PortId, PortPlan, Problem, Scope,
    ServicePlan,
};
