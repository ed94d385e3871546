//! Connection tracking of the packet path. `proxy_common::flow` defines the layout of flows in the maps,
//! `proxy_common::conntrack` the changes of their state.

pub mod bucket;
pub mod evict;
pub mod index;
pub mod memory;
pub mod open;
pub mod track;

pub use track::{Tracked, find};

use crate::env::FlowTable;

/// Prefetches what a new flow with these hashes needs, and is seldom in a cache: a bucket for each key, and the entry that is
/// examined first.
#[inline(always)]
pub fn prefetch<M: FlowTable>(maps: M, hash: u64, reply_hash: u64) {
    let Some(time) = maps.time() else { return };
    index::prefetch(maps, hash, time.config);
    index::prefetch(maps, reply_hash, time.config);
    evict::prefetch(maps, time);
}

#[cfg(test)]
mod model;
