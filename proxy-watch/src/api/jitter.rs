//! Random pauses and orders, so that the agents of all nodes do not do the same at once.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

/// Returns a random time from 0 to `limit`.
pub fn jitter(limit: Duration) -> Duration {
    let part = (RandomState::new().hash_one(0) >> 32) as u32;
    limit.mul_f64(f64::from(part) / f64::from(u32::MAX))
}
