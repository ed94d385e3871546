//! Writes the plans into the maps: allocates ids and extents, compares with the applied state, and orders the writes.
//!
//! [`Driver`] is the task that owns the cluster state and the maps; [`Reconciler`] has its logic, without a clock or a
//! channel. `desired` is the state that the plans ask for, `applied` is the state that the maps hold.

mod addresses;
mod applied;
mod audit;
mod claims;
mod driver;
mod dsr_use;
mod entries;
mod extents;
mod histogram;
mod ids;
mod index;
mod job;
mod node;
mod phases;
mod prefilter;
mod programmed;
mod question;
mod ranges;
mod reconcile;
mod recover;
mod release;
mod removal;
mod resets;
mod rows;
mod services;
mod shares;
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
