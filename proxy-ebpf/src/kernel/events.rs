//! Events for listeners (`ballast monitor`): this file creates all [`Event`]s.

use core::mem::size_of;
use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::{bpf_get_current_comm, bpf_get_prandom_u32, bpf_ktime_get_ns};
use aya_ebpf::maps::ring_buf::RingBufEntry;
use proxy_common::Address as _;
use proxy_common::Family;
use proxy_common::event::{
    EVENT_DROP, EVENT_NEW_FLOW, EVENT_PASS, EVENT_REJECT, Event, HOOK_PACKET, HOOK_SOCKET, Monitor,
};
use proxy_common::reason::{Verdict, verdict_of};
use proxy_common::select::random_slot;

use super::maps::{EVENTS, MONITOR};
use crate::context::PacketCtx;
use crate::env::{EventKind, Services, Words};
use crate::shared::{Exchange as _, Raw, add};
use crate::sock::Sockaddr;

/// Value in place of a reason's number for the event that a flow has begun.
const NEW_FLOW: u32 = u32::MAX;

/// Flag that an event wakes no listener: listeners poll.
const NO_WAKEUP: u64 = BPF_RB_NO_WAKEUP as u64;

#[inline(always)]
fn monitor() -> Option<*mut Monitor> {
    MONITOR.get_ptr_mut(0)
}

/// Whether a listener to such an event may be registered. A cheap check: the only cost of events while there is none.
#[inline(always)]
pub fn has_listeners(what: EventKind) -> bool {
    // SAFETY: a map value, aligned to eight bytes; listeners write it while it is read.
    monitor().is_some_and(|monitor| unsafe {
        match what {
            EventKind::NewFlow { .. } => read_volatile(&raw const (*monitor).sample) != 0,
            EventKind::Reason(_) => read_volatile(&raw const (*monitor).until) != 0,
        }
    })
}

/// Returns the reason's number or [`NEW_FLOW`], and the backend's id or 0.
#[inline(always)]
fn numbers(what: EventKind) -> (u32, u32) {
    match what {
        EventKind::NewFlow { backend } => (NEW_FLOW, backend),
        EventKind::Reason(why) => (why as u32, 0),
    }
}

/// Writes an event with a reason only, and the Service if `service` is not 0. Not inlined, to have its own stack frame: it
/// is seldom called, and the stack frames of the callers are full.
#[inline(never)]
pub fn reason_event(service: u32, what: u32) {
    if let Some(mut entry) = begin(what) {
        // SAFETY: `begin` has written all fields.
        unsafe { (*entry.as_mut_ptr()).service = service };
        entry.submit(NO_WAKEUP);
    }
}

/// Writes an event about a packet.
#[inline(always)]
pub fn packet<M: Services>(maps: M, ifindex: u32, ctx: &PacketCtx<Words<M>>, service: u32, what: EventKind) {
    let (what, backend) = numbers(what);
    packet_event(maps, ifindex, ctx, service, u64::from(what) << 32 | u64::from(backend));
}

#[inline(never)]
fn packet_event<M: Services>(maps: M, ifindex: u32, ctx: &PacketCtx<Words<M>>, service: u32, numbers: u64) {
    let Some(mut entry) = begin((numbers >> 32) as u32) else { return };
    let event = entry.as_mut_ptr();
    let key = &ctx.packet.key;
    // SAFETY: `begin` has written all fields.
    unsafe {
        (*event).hook = HOOK_PACKET;
        (*event).device = ifindex;
        (*event).client = key.src.words();
        (*event).client_port = key.src_port;
        (*event).frontend = key.dst.words();
        (*event).frontend_port = key.dst_port;
        (*event).proto = key.proto;
        fill(maps, event, service, numbers as u32);
    }
    entry.submit(NO_WAKEUP);
}

/// Writes an event about a call on a socket.
#[inline(always)]
pub fn socket<S: Sockaddr, M>(maps: M, call: &S, service: u32, what: EventKind)
where
    M: Services<Family = S::Family>,
{
    let (what, backend) = numbers(what);
    socket_event(maps, call, service, backend, what);
}

#[inline(never)]
fn socket_event<S: Sockaddr, M>(maps: M, call: &S, service: u32, backend: u32, what: u32)
where
    M: Services<Family = S::Family>,
{
    let Some(mut entry) = begin(what) else { return };
    let event = entry.as_mut_ptr();
    // SAFETY: `begin` has written all fields.
    unsafe {
        (*event).hook = HOOK_SOCKET;
        (*event).netns = call.netns();
        (*event).pid = (bpf_get_current_pid_tgid() >> 32) as u32;
        // A process may end before a listener reads its name in /proc, which may also be that of another PID namespace.
        bpf_get_current_comm((&raw mut (*event).client).cast(), size_of::<[u32; 4]>() as u32);
        (*event).frontend = call.addr().words();
        (*event).frontend_port = call.port();
        (*event).proto = call.proto();
        fill(maps, event, service, backend);
    }
    entry.submit(NO_WAKEUP);
}

/// Writes family, Service and backend to an event.
///
/// # Safety
/// `event` must be valid for writes.
#[inline(always)]
unsafe fn fill<M: Services>(maps: M, event: *mut Event, service: u32, backend_id: u32) {
    // SAFETY: the caller guarantees that `event` is valid.
    unsafe {
        (*event).family = if M::Family::INDEX == 0 { 4 } else { 6 };
        (*event).service = service;
        (*event).backend_id = backend_id;
        if backend_id != 0
            && let Some(backend) = maps.backend(backend_id)
        {
            (*event).backend = backend.addr.words();
            (*event).backend_port = backend.port;
        }
    }
}

/// Reserves an event in the ring, and writes kind, reason and time; all other fields are zero. Returns `None` if no
/// listener is registered, if the ring is full, or if the event is a new flow that the sample leaves out.
#[inline(always)]
fn begin(what: u32) -> Option<RingBufEntry<Event>> {
    let monitor = monitor()?;
    // SAFETY: a map value, aligned to eight bytes; listeners write it while it is read.
    let (until, sample) = unsafe {
        (read_volatile(&raw const (*monitor).until), read_volatile(&raw const (*monitor).sample) as u32)
    };
    // SAFETY: the helper takes nothing and cannot fail.
    let time = unsafe { bpf_ktime_get_ns() };
    if time > until {
        // The lease has run out: the listener was killed. If a listener renews its lease at this moment, it writes another
        // time, and the exchange fails.
        // SAFETY: as above.
        unsafe {
            Raw::new(&raw mut (*monitor).until).compare_exchange(until, 0);
            // A listener that begins now writes it again at its next renewal.
            write_volatile(&raw mut (*monitor).sample, 0);
        }
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
    let Some(mut entry) = EVENTS.reserve_untyped::<Event>(0) else {
        // SAFETY: as above.
        unsafe {
            add(&raw mut (*monitor).lost, 1);
            if time > read_volatile(&raw const (*monitor).live_until) {
                Raw::new(&raw mut (*monitor).until).compare_exchange(until, 0);
            }
        }
        return None;
    };
    let words = entry.as_mut_ptr().cast::<u64>();
    let mut word = 0;
    while word < size_of::<Event>() / size_of::<u64>() {
        // SAFETY: inside the event; volatile, since a program has no `memset` that the compiler could call.
        unsafe { write_volatile(words.add(word), 0) };
        word += 1;
    }
    let event = entry.as_mut_ptr();
    // SAFETY: `entry` has the size of an event.
    unsafe {
        (*event).time = time;
        (*event).kind = kind;
        (*event).reason = reason;
    }
    Some(entry)
}
