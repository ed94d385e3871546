//! Random pauses and orders, so that the agents of all nodes do not do the same at once.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

/// Returns a random time from 0 to `limit`.
pub fn jitter(limit: Duration) -> Duration {
    limit.mul_f64(RandomState::new().hash_one(0) as f64 / u64::MAX as f64)
}
