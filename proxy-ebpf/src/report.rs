//! Counting: connections, traffic, and every reason for which something was not translated.

use proxy_common::reason::Reason;
use proxy_common::stats::RefusalKey;

use crate::{atomic, maps};

/// A connection to a backend has begun.
#[inline(always)]
pub fn connection(service: u32, backend: u32) {
    if let Some(stats) = maps::service_stats(service) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { atomic::add(&raw mut (*stats).connections, 1) };
    }
    if let Some(count) = maps::backend_connections(backend) {
        // SAFETY: a map value.
        unsafe { atomic::add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "connection of Service port {} to backend {}", service, backend);
}

/// A packet went to a backend.
#[inline(always)]
pub fn forwarded(service: u32, bytes: u32) {
    if let Some(stats) = maps::service_stats(service) {
        // SAFETY: a map value of this CPU, which only packets write, and they do not interrupt each other.
        unsafe {
            (*stats).packets += 1;
            (*stats).bytes += u64::from(bytes);
        }
    }
}

/// A packet went back to a client.
#[inline(always)]
pub fn replied(service: u32, bytes: u32) {
    if let Some(stats) = maps::service_stats(service) {
        // SAFETY: as in `forwarded`.
        unsafe {
            (*stats).reply_packets += 1;
            (*stats).reply_bytes += u64::from(bytes);
        }
    }
}

/// Something was refused, dropped or passed by for this reason.
#[inline(always)]
pub fn reason(reason: Reason) {
    if let Some(count) = maps::reason(reason) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { atomic::add(count, 1) };
    }
}

/// The same, of a known Service.
#[inline(always)]
pub fn refusal(service: u32, why: Reason) {
    reason(why);
    let key = RefusalKey { service, reason: why as u32 };
    if maps::refusals(&key).is_none() {
        // Two CPUs may both begin it: one of them wins, and both find it below.
        let _ = maps::begin_refusals(&key);
    }
    if let Some(count) = maps::refusals(&key) {
        // SAFETY: a map value; an LRU neighbour at worst counts one too many.
        unsafe { atomic::add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "Service port {}: {}", service, why.label());
}
