//! How long something that left the maps stays untouched.

use std::time::{Duration, Instant};

/// When something began to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rest {
    /// At this time.
    pub since: Instant,
    /// In the sync of this number.
    pub sync: u64,
}

impl Rest {
    /// Whether it is over: never in the sync that began it, so that no reader is left from before.
    pub fn is_over(self, now: Instant, sync: u64, hold: Duration) -> bool {
        sync > self.sync && now >= self.since + hold
    }
}
