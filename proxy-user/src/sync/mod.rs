//! From plans to maps: ids, extents, the difference to what is applied, ordered writes.
//!
//! [`Driver`] is the task that owns it all; [`Reconciler`] is what it does, without a clock or a channel.
//! `desired` is what the plans ask for, `applied` is what the maps hold.

mod addresses;
mod applied;
mod audit;
mod claims;
mod counters;
mod driver;
mod extents;
mod filter;
mod histogram;
mod ids;
mod job;
mod node;
mod outlook;
mod phases;
mod programmed;
mod question;
mod reconcile;
mod recover;
mod release;
mod report;
mod rest;
mod rows;
mod slow_start;
mod status;
mod tables;
mod triggers;
mod trouble;

pub use crate::plan::{HealthCheck, Scope};
pub use applied::Holds;
pub use audit::Step;
pub use counters::{Count, Operation};
pub use driver::{Driver, DriverSettings};
pub use histogram::{EventScale, Histogram, ProgrammingScale, Scale, SyncScale};
pub use programmed::{InForce, Programmed};
pub use question::{Expected, Question};
pub use reconcile::Reconciler;
pub use report::problems_begun;
pub use status::{Changes, NodeFate, Operations, Status, TableUse};

#[cfg(test)]
mod tests;
