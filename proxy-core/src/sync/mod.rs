//! Writes the plans into the maps: allocates ids and extents, compares with the applied state, and orders the writes.
//!
//! [`Reconciler`] has the logic of the task that owns the cluster state and the maps, without a clock or a channel. `desired` is the state that the plans ask for, `applied` is the state that the maps hold.

mod addresses;
mod applied;
mod audit;
mod claims;
mod entries;
mod extents;
mod ids;
mod index;
mod job;
mod node;
mod phases;
pub(crate) mod prefilter;
mod ranges;
mod reconcile;
mod recover;
mod release;
mod removal;
mod resets;
mod rows;
mod services;
mod shares;
mod tables;
mod writer;

pub use applied::QuarantinePeriods;
pub use audit::Step;
pub use reconcile::{Expected, Reconciler};
pub use writer::{Count, Operation};

#[cfg(test)]
mod tests;
