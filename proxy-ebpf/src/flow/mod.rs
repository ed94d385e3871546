//! Connection tracking of the packet path. `proxy_common::flow` says how flows lie in the maps, `proxy_common::conntrack` how
//! their state changes.

pub mod bucket;
pub mod evict;
pub mod index;
pub mod memory;
pub mod open;
pub mod track;

pub use track::{Tracked, find};

#[cfg(test)]
mod model;
