//! Counters: connections, traffic, and every reason for which a packet or call was not translated.

use proxy_common::reason::Reason;
use proxy_common::select::is_round_robin;
use proxy_common::stats::RefusalKey;

use crate::context::PacketCtx;
use crate::env::{Counters, EventKind, Services, Words};
use crate::frame::Frame;
use crate::shared::add;

/// Counts a connection that a packet has begun, and tells the listeners.
#[inline(always)]
pub fn new_flow<M: Counters + Services, F: Frame>(
    maps: M,
    frame: F,
    ctx: &PacketCtx<Words<M>>,
    service: u32,
    backend: u32,
) {
    if let Some(stats) = maps.service_stats(service) {
        // SAFETY: a map value of this CPU. System calls count here, too, but they do not interrupt a packet program.
        unsafe { (*stats).connections += 1 };
    }
    connection(maps, backend);
    if is_round_robin(ctx.frontend.algorithm) {
        next_turn(maps, service);
    }
    maps.notify(frame, ctx, service, EventKind::NewFlow { backend });
}

/// Counts a connection to a backend.
#[inline(always)]
pub fn connection<M: Counters>(maps: M, backend: u32) {
    if let Some(count) = maps.backend_connections(backend) {
        // SAFETY: a map value.
        unsafe { add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "connection to backend {}", backend);
}

/// Advances the turn of a Service with a round-robin algorithm, after a connection has begun. Not done at the selection,
/// since a packet may be left to the next hook, which selects again.
#[inline(always)]
pub fn next_turn<M: Services>(maps: M, service: u32) {
    if let Some(turns) = maps.turns(service) {
        // SAFETY: a map value.
        unsafe { add(turns, 1) };
    }
}

/// Counts a packet to a backend, of this length in bytes.
#[inline(always)]
pub fn forwarded<M: Counters>(maps: M, service: u32, bytes: u32) {
    if let Some(stats) = maps.service_stats(service) {
        // SAFETY: a map value of this CPU. Only packet programs write it, and they do not interrupt each other.
        unsafe {
            (*stats).packets += 1;
            (*stats).bytes += u64::from(bytes);
        }
    }
}

/// Counts a reply to a client, of this length in bytes.
#[inline(always)]
pub fn replied<M: Counters>(maps: M, service: u32, bytes: u32) {
    if let Some(stats) = maps.service_stats(service) {
        // SAFETY: as in `forwarded`.
        unsafe {
            (*stats).reply_packets += 1;
            (*stats).reply_bytes += u64::from(bytes);
        }
    }
}

/// Counts a reason and tells the listeners, without a Service or a packet.
#[inline(always)]
pub fn reason<M: Counters>(maps: M, why: Reason) {
    count(maps, why);
    maps.notify_reason(0, why);
}

/// Counts a reason for a known Service and tells the listeners, without a packet.
#[inline(always)]
pub fn refusal<M: Counters>(maps: M, service: u32, why: Reason) {
    count_for(maps, service, why);
    maps.notify_reason(service, why);
}

/// Counts the reason for which the packet was refused, dropped or passed unchanged, and tells the listeners. `service` 0:
/// unknown.
#[inline(always)]
pub fn refused<M: Counters, F: Frame>(
    maps: M,
    frame: F,
    ctx: &PacketCtx<Words<M>>,
    service: u32,
    why: Reason,
) {
    count_for(maps, service, why);
    maps.notify(frame, ctx, service, EventKind::Reason(why));
}

#[inline(always)]
fn count<M: Counters>(maps: M, why: Reason) {
    if let Some(count) = maps.reason(why) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { add(count, 1) };
    }
}

/// Counts a reason, in total and for a Service. `service` 0: only in total.
#[inline(always)]
pub fn count_for<M: Counters>(maps: M, service: u32, why: Reason) {
    count(maps, why);
    if service == 0 {
        return;
    }
    let key = RefusalKey { service, reason: why as u32 };
    if maps.refusals(&key).is_none() {
        // Two CPUs may add the element at the same time: one of them succeeds, and both find the element below.
        let _ = maps.begin_refusals(&key);
    }
    if let Some(count) = maps.refusals(&key) {
        // SAFETY: a map value. If the LRU map reuses the element meanwhile, another count becomes one too high.
        unsafe { add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "Service port {}: {}", service, why.label());
}
