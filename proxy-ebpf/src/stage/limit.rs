//! Rates that a CPU keeps to, by token buckets.

use crate::env::{RateLimit, Time};

/// Takes a token from the bucket `number` of this CPU; returns `false` if it is empty. The bucket gets `rate` tokens a second, at most
/// [`MAX_RATE`](proxy_common::config::MAX_RATE), and holds `burst`.
#[inline(always)]
pub fn take<M: RateLimit>(maps: M, number: u32, rate: u32, burst: u32, time: Time) -> bool {
    let Some(bucket) = maps.token_bucket(number) else { return false };
    // SAFETY: this CPU's own value, which nothing else refers to.
    let bucket = unsafe { &mut *bucket };
    let passed = time.now.wrapping_sub(bucket.since);
    let hz = time.config.hz;
    let gained = if passed < hz { passed.wrapping_mul(rate).checked_div(hz).unwrap_or(burst) } else { burst };
    if gained != 0 {
        let tokens = bucket.tokens.wrapping_add(gained);
        bucket.tokens = if tokens > burst { burst } else { tokens };
        bucket.since = time.now;
    }
    if bucket.tokens == 0 {
        return false;
    }
    bucket.tokens -= 1;
    true
}
