//! From plans to maps: ids, extents, the difference to what is applied, ordered writes.
//!
//! [`Driver`] is the task that owns it all; [`Reconciler`] is what it does, without a clock or a channel.
//! `desired` is what the plans ask for, `applied` is what the maps hold.

mod addresses;
mod applied;
mod audit;
mod claims;
mod driver;
mod entries;
mod extents;
mod filter;
mod histogram;
mod ids;
mod index;
mod job;
mod node;
mod phases;
mod programmed;
mod question;
mod reconcile;
mod recover;
mod release;
mod removal;
mod resets;
mod rows;
mod services;
mod slow_start;
mod status;
mod tables;
mod triggers;
mod writer;

pub use applied::QuarantinePeriods;
pub use audit::Step;
pub use driver::{Driver, DriverSettings};
pub use histogram::{EventScale, Histogram, ProgrammingScale, Scale, SyncScale};
pub use programmed::{Programmed, ProgrammedService};
pub use question::{Expected, Question};
pub use reconcile::Reconciler;
pub use status::{Changes, NodeFate, Operations, Status, TableUse, problems_begun};
pub use writer::{Count, Operation};

#[cfg(test)]
mod tests;
