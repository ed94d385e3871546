//! Counting: connections, traffic, and every reason for which something was not translated. And telling those who
//! listen (`ballast monitor`): all [`Event`]s are made here.

use core::mem::size_of;
use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns};
use aya_ebpf::maps::ring_buf::RingBufEntry;
use proxy_common::Address as _;
use proxy_common::event::{
    EVENT_DROP, EVENT_NEW_FLOW, EVENT_PASS, EVENT_REJECT, Event, HOOK_PACKET, HOOK_SOCKET,
};
use proxy_common::reason::{Reason, Verdict, verdict_of};
use proxy_common::select::random_slot;
use proxy_common::stats::RefusalKey;

use crate::atomic;
use crate::maps::{self, Tables};
use crate::skb::Skb;
use crate::sockaddr::Sockaddr;

/// A packet has begun a connection to a backend.
#[inline(always)]
pub fn connection(service: u32, backend: u32) {
    if let Some(stats) = maps::service_stats(service) {
        // SAFETY: a map value of this CPU; system calls, which count there too, do not interrupt a packet.
        unsafe { (*stats).connections += 1 };
    }
    connection_of(backend);
}

#[inline(always)]
fn connection_of(backend: u32) {
    if let Some(count) = maps::backend_connections(backend) {
        // SAFETY: a map value.
        unsafe { atomic::add(count, 1) };
    }
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!((), "connection to backend {}", backend);
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

/// Something was refused, dropped or passed by for this reason, and no more is known of it.
#[inline(always)]
pub fn reason(why: Reason) {
    count(why);
    if is_heard() {
        bare(0, why as u32);
    }
}

/// The same, of a known Service.
#[inline(always)]
pub fn refusal(service: u32, why: Reason) {
    count_for(service, why);
    if is_heard() {
        bare(service, why as u32);
    }
}

/// A flow has begun with the packet in `scratch`.
#[inline(always)]
pub fn opened<F: Tables>(skb: Skb, service: u32, backend: u32) {
    if is_heard() {
        packet::<F>(skb, service, backend, NEW_FLOW);
    }
}

/// The packet in `scratch` was refused, dropped or passed by. Service 0: none is known.
#[inline(always)]
pub fn refused<F: Tables>(skb: Skb, service: u32, why: Reason) {
    count_for(service, why);
    if is_heard() {
        packet::<F>(skb, service, 0, why as u32);
    }
}

/// A socket has begun a connection to a backend; its call still has the address that was dialled.
#[inline(always)]
pub fn connected<S: Sockaddr>(call: &S, service: u32, backend: u32) {
    if let Some(stats) = maps::service_stats(service) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { atomic::add(&raw mut (*stats).connections, 1) };
    }
    connection_of(backend);
    if is_heard() {
        socket(call, service, backend, NEW_FLOW);
    }
}

/// A call was refused. Service 0: none is known.
#[inline(always)]
pub fn failed<S: Sockaddr>(call: &S, service: u32, why: Reason) {
    count_for(service, why);
    if is_heard() {
        socket(call, service, 0, why as u32);
    }
}

#[inline(always)]
fn count(why: Reason) {
    if let Some(count) = maps::reason(why) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { atomic::add(count, 1) };
    }
}

/// Counts a reason, in all and for a Service.
#[inline(always)]
fn count_for(service: u32, why: Reason) {
    count(why);
    if service == 0 {
        return;
    }
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

/// Stands where a [`Reason`] number would: there is none, a flow has begun.
const NEW_FLOW: u32 = u32::MAX;

/// The one cheap check: whether anybody may be listening.
#[inline(always)]
fn is_heard() -> bool {
    // SAFETY: a map value, aligned to eight bytes; listeners write it while we read.
    maps::monitor().is_some_and(|monitor| unsafe { read_volatile(&raw const (*monitor).until) } != 0)
}

/// Tells a reason, and the Service if it is not 0. Whoever tells has a frame of its own: few calls come here, and the
/// frames of the callers are full.
#[inline(never)]
fn bare(service: u32, what: u32) {
    if let Some(mut entry) = begin(what) {
        // SAFETY: `begin` has written all fields.
        unsafe { (*entry.as_mut_ptr()).service = service };
        entry.submit(NO_WAKEUP);
    }
}

/// Tells about the packet in `scratch`.
#[inline(never)]
fn packet<F: Tables>(skb: Skb, service: u32, backend: u32, what: u32) {
    // In this order: room that is taken has to be given back on every way out.
    let Some(scratch) = F::scratch() else { return };
    let Some(mut entry) = begin(what) else { return };
    let event = entry.as_mut_ptr();
    // SAFETY: `begin` has written all fields; the packet is a map value that is this CPU's own.
    unsafe {
        let key = &(*scratch).left.packet.key;
        (*event).hook = HOOK_PACKET;
        (*event).device = skb.ifindex();
        (*event).client = key.src.words();
        (*event).client_port = key.src_port;
        (*event).frontend = key.dst.words();
        (*event).frontend_port = key.dst_port;
        (*event).proto = key.proto;
        with::<F>(event, service, backend);
    }
    entry.submit(NO_WAKEUP);
}

/// Tells about a call on a socket.
#[inline(never)]
fn socket<S: Sockaddr>(call: &S, service: u32, backend: u32, what: u32) {
    let Some(mut entry) = begin(what) else { return };
    let event = entry.as_mut_ptr();
    let raw = call.raw();
    // SAFETY: `begin` has written all fields.
    unsafe {
        (*event).hook = HOOK_SOCKET;
        (*event).netns = raw.netns();
        (*event).pid = (bpf_get_current_pid_tgid() >> 32) as u32;
        (*event).frontend = call.addr().words();
        (*event).frontend_port = raw.port();
        (*event).proto = raw.proto();
        with::<S::Family>(event, service, backend);
    }
    entry.submit(NO_WAKEUP);
}

/// Adds family, Service and backend.
///
/// # Safety
/// `event` is valid.
#[inline(always)]
unsafe fn with<F: Tables>(event: *mut Event, service: u32, backend_id: u32) {
    // SAFETY: the caller vouches for it.
    unsafe {
        (*event).family = if F::INDEX == 0 { 4 } else { 6 };
        (*event).service = service;
        (*event).backend_id = backend_id;
        if backend_id != 0
            && let Some(backend) = F::backend(backend_id)
        {
            (*event).backend = backend.addr.words();
            (*event).backend_port = backend.port;
        }
    }
}

/// Nobody is woken by an event: listeners look now and then.
const NO_WAKEUP: u64 = BPF_RB_NO_WAKEUP as u64;

/// Room for an event, with kind, reason and time, if anybody wants it. Of flows that begin, that is one of so many.
#[inline(always)]
fn begin(what: u32) -> Option<RingBufEntry<Event>> {
    let monitor = maps::monitor()?;
    // SAFETY: a map value, aligned to eight bytes; listeners write it while we read.
    let (until, sample) = unsafe {
        (read_volatile(&raw const (*monitor).until), read_volatile(&raw const (*monitor).sample) as u32)
    };
    // SAFETY: the helper takes nothing and cannot fail.
    let time = unsafe { bpf_ktime_get_ns() };
    if time > until {
        // Whoever listened was killed. One that comes back at this moment writes another time.
        // SAFETY: as above.
        unsafe { atomic::compare_exchange(&raw mut (*monitor).until, until, 0) };
        return None;
    }
    let (kind, reason) = if what == NEW_FLOW {
        // SAFETY: the helper takes nothing and cannot fail.
        if sample == 0 || random_slot(unsafe { bpf_get_prandom_u32() }, sample) != 0 {
            return None;
        }
        (EVENT_NEW_FLOW, 0)
    } else {
        let kind = match verdict_of(what) {
            Verdict::Reject => EVENT_REJECT,
            Verdict::Drop => EVENT_DROP,
            Verdict::Pass => EVENT_PASS,
        };
        (kind, what)
    };
    let Some(mut entry) = maps::event() else {
        // SAFETY: as above.
        unsafe { atomic::add(&raw mut (*monitor).lost, 1) };
        return None;
    };
    let words = entry.as_mut_ptr().cast::<u64>();
    let mut word = 0;
    while word < size_of::<Event>() / size_of::<u64>() {
        // SAFETY: inside the event; volatile, since a program has no `memset`.
        unsafe { write_volatile(words.add(word), 0) };
        word += 1;
    }
    let event = entry.as_mut_ptr();
    // SAFETY: room for an event.
    unsafe {
        (*event).time = time;
        (*event).kind = kind;
        (*event).reason = reason;
    }
    Some(entry)
}
