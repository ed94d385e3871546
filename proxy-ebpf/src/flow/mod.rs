//! Connection tracking of the packet path. `proxy_common::flow` defines the layout of flows in the maps,
//! `proxy_common::conntrack` the changes of their state.

pub mod bucket;
pub mod evict;
pub mod index;
pub mod memory;
pub mod open;
pub mod track;

pub use track::{Tracked, find};

#[cfg(test)]
mod model;
