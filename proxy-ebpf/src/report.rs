//! Counting: connections, traffic, and every reason for which something was not translated.

use proxy_common::reason::Reason;
use proxy_common::select::is_by_turns;
use proxy_common::stats::RefusalKey;

use crate::context::PacketCtx;
use crate::env::{Counters, Happening, Services, Words};
use crate::frame::Frame;
use crate::shared::add;

/// A packet has begun a connection to a backend.
#[inline(always)]
pub fn new_flow<M: Counters + Services, F: Frame>(
    maps: M,
    frame: F,
    ctx: &PacketCtx<Words<M>>,
    service: u32,
    backend: u32,
) {
    if let Some(stats) = maps.service_stats(service) {
        // SAFETY: a map value of this CPU; system calls, which count there too, do not interrupt a packet.
        unsafe { (*stats).connections += 1 };
    }
    connection(maps, backend);
    if is_by_turns(ctx.frontend.algorithm) {
        next_turn(maps, service);
    }
    maps.tell(frame, ctx, service, Happening::NewFlow { backend });
}

/// A connection to a backend has begun.
#[inline(always)]
pub fn connection<M: Counters>(maps: M, backend: u32) {
    if let Some(count) = maps.backend_connections(backend) {
        // SAFETY: a map value.
        unsafe { add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "connection to backend {}", backend);
}

/// A connection to a Service that is spread by turns has begun: the next one goes to the next endpoint. Not where the endpoint
/// is selected: a packet may be left to the next hook, which selects again.
#[inline(always)]
pub fn next_turn<M: Services>(maps: M, service: u32) {
    if let Some(turns) = maps.turns(service) {
        // SAFETY: a map value.
        unsafe { add(turns, 1) };
    }
}

/// A packet went to a backend.
#[inline(always)]
pub fn forwarded<M: Counters>(maps: M, service: u32, bytes: u32) {
    if let Some(stats) = maps.service_stats(service) {
        // SAFETY: a map value of this CPU, which only packets write, and they do not interrupt each other.
        unsafe {
            (*stats).packets += 1;
            (*stats).bytes += u64::from(bytes);
        }
    }
}

/// A packet went back to a client.
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

/// Something was refused, dropped or passed by for this reason, and no more is known of it.
#[inline(always)]
pub fn reason<M: Counters>(maps: M, why: Reason) {
    count(maps, why);
    maps.tell_bare(0, why);
}

/// The same, of a known Service.
#[inline(always)]
pub fn refusal<M: Counters>(maps: M, service: u32, why: Reason) {
    count_for(maps, service, why);
    maps.tell_bare(service, why);
}

/// The packet was refused, dropped or passed by. Service 0: none is known.
#[inline(always)]
pub fn refused<M: Counters, F: Frame>(
    maps: M,
    frame: F,
    ctx: &PacketCtx<Words<M>>,
    service: u32,
    why: Reason,
) {
    count_for(maps, service, why);
    maps.tell(frame, ctx, service, Happening::Because(why));
}

#[inline(always)]
fn count<M: Counters>(maps: M, why: Reason) {
    if let Some(count) = maps.reason(why) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { add(count, 1) };
    }
}

/// Counts a reason, in all and for a Service.
#[inline(always)]
pub fn count_for<M: Counters>(maps: M, service: u32, why: Reason) {
    count(maps, why);
    if service == 0 {
        return;
    }
    let key = RefusalKey { service, reason: why as u32 };
    if maps.refusals(&key).is_none() {
        // Two CPUs may both begin it: one of them wins, and both find it below.
        let _ = maps.begin_refusals(&key);
    }
    if let Some(count) = maps.refusals(&key) {
        // SAFETY: a map value; an LRU neighbour at worst counts one too many.
        unsafe { add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "Service port {}: {}", service, why.label());
}
