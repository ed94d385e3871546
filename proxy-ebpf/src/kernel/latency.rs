//! `connect_latency`: how long endpoints take to answer a SYN. Off by default: the agent loads the programs with
//! `CONNECT_LATENCY` 1 to switch it on, and otherwise the verifier removes all of this code.

use core::mem::offset_of;

use aya_ebpf::bindings::{BPF_NOEXIST, BPF_SK_STORAGE_GET_F_CREATE, bpf_sock};
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_sk_storage_get};
use proxy_common::latency::{
    ANSWERED, ExampleKey, LATENCY_BUCKETS, LatencyEntry, LatencyKey, SocketExample, bucket,
};

use super::handle::Kernel;
use super::maps::{CONNECT_LATENCY as ENTRIES, CONNECT_TIMES, Elements as _, SOCKET_EXAMPLES, SYN_TIMES};
use crate::env::{ConnectLatency, ConnectOutcome, Node};
use crate::shared::{add, opaque};

/// Size of a counter in bytes.
const WORD: usize = size_of::<u64>();

/// Whether the measurement is on; see [`is_measured`]. 64 bits wide for the reason given at `LINK_HEADER`.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static CONNECT_LATENCY: aya_ebpf::Global<u64> = aya_ebpf::Global::new(0);

/// Initial value of an entry; a static, since it is too large for the stack.
static NOTHING: LatencyEntry =
    LatencyEntry { buckets: [0; LATENCY_BUCKETS], sum_us: 0, refused: 0, retransmits: 0 };

/// Whether the measurement is on.
#[inline(always)]
pub fn is_measured() -> bool {
    #[cfg(target_arch = "bpf")]
    {
        CONNECT_LATENCY.load() != 0
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        false
    }
}

impl<F> ConnectLatency for Kernel<F>
where
    Self: Node,
{
    #[inline(always)]
    fn note_outcome(self, service: u32, backend: u32, outcome: ConnectOutcome) {
        note(service, backend, outcome);
    }

    #[inline(always)]
    fn keep_example(self, service: u32, example: &SocketExample) {
        keep_example(service, example);
    }
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// Notes the time of the SYN that has begun a flow. `place` is the index of the flow in `syn_times`.
#[inline(always)]
pub fn flow_begun(place: u32) {
    if let Some(time) = SYN_TIMES.at(place) {
        // SAFETY: a map value, aligned to eight bytes; the CPU that begins the flow is the only one to write it.
        unsafe { time.write_volatile(now()) };
    }
}

/// Notes that the SYN of a flow was answered; `refused` is not 0 if the answer is a RST.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn syn_answered(place: u32, service: u32, backend: u32, refused: u32) -> u32 {
    let Some(time) = SYN_TIMES.at(place) else { return 0 };
    // SAFETY: as in `flow_begun`.
    let begun = unsafe { time.read_volatile() };
    let took = now().wrapping_sub(begun) & !ANSWERED;
    let outcome = if refused != 0 { ConnectOutcome::Refused } else { ConnectOutcome::Answered(took) };
    // 0: the flow began before its time was noted, or was created by programs of another version.
    if begun != 0 {
        if refused == 0 {
            // SAFETY: as in `flow_begun`; only the CPU whose exchange of the state succeeded calls this function.
            unsafe { time.write_volatile(ANSWERED | took) };
        }
        note(service, backend, outcome);
    }
    0
}

/// Notes that a SYN was repeated before it was answered.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn syn_again(service: u32, backend: u32) -> u32 {
    note(service, backend, ConnectOutcome::Retransmitted);
    0
}

/// Notes the time at which a socket sends its first SYN.
#[inline(always)]
pub fn socket_connects(socket: *mut bpf_sock) {
    if let Some(time) = connect_time(socket, true) {
        // SAFETY: the socket's own storage.
        unsafe { time.write(now()) };
    }
}

/// Returns the time at which a socket sent its first SYN, and the nanoseconds since then.
#[inline(always)]
pub fn since_connect(socket: *mut bpf_sock) -> Option<(u64, u64)> {
    let time = connect_time(socket, false)?;
    // SAFETY: the socket's own storage.
    let begun = unsafe { time.read() };
    Some((begun, now().wrapping_sub(begun)))
}

/// Stores a connection of a socket as the example of its histogram bucket.
#[expect(clippy::needless_borrows_for_generic_args, reason = "by value it would be copied to the stack")]
#[inline(always)]
fn keep_example(service: u32, example: &SocketExample) {
    let bucket = bucket(example.took / 1_000) as u32;
    if service != 0 {
        // The insertion fails if another CPU writes an example at the same time.
        let _ = SOCKET_EXAMPLES.insert(&ExampleKey { service, bucket }, example, 0);
    }
}

#[inline(always)]
fn connect_time(socket: *mut bpf_sock, create: bool) -> Option<*mut u64> {
    if socket.is_null() {
        return None;
    }
    let map = core::ptr::from_ref(&CONNECT_TIMES).cast_mut().cast();
    let flags = if create { u64::from(BPF_SK_STORAGE_GET_F_CREATE) } else { 0 };
    // SAFETY: a map, and a socket that the kernel has handed to the program.
    let time = unsafe { bpf_sk_storage_get(map, socket.cast(), core::ptr::null_mut(), flags) };
    (!time.is_null()).then_some(time.cast())
}

/// Counts the outcome of a SYN for the backend and for its Service.
#[inline(always)]
fn note(service: u32, backend: u32, outcome: ConnectOutcome) {
    if service == 0 {
        return;
    }
    let (word, us) = match outcome {
        ConnectOutcome::Answered(ns) => (bucket(ns / 1_000), ns / 1_000),
        ConnectOutcome::Refused => (offset_of!(LatencyEntry, refused) / WORD, 0),
        ConnectOutcome::Retransmitted => (offset_of!(LatencyEntry, retransmits) / WORD, 0),
    };
    count(&LatencyKey { service, backend }, word, us);
    count(&LatencyKey { service, backend: 0 }, word, us);
}

/// Adds 1 to the counter at index `word` of an entry, and `us` to the sum of microseconds.
#[expect(clippy::needless_borrows_for_generic_args, reason = "by value it would be copied to the stack")]
#[inline(always)]
fn count(key: &LatencyKey, word: usize, us: u64) {
    if ENTRIES.get_ptr_mut(key).is_none() {
        // Another CPU may have created the entry first.
        let _ = ENTRIES.insert(key, &NOTHING, u64::from(BPF_NOEXIST));
    }
    // The verifier requires the comparison next to the access; `opaque` keeps the compiler from moving it.
    let word = opaque(word as u64) as usize;
    let Some(entry) = ENTRIES.get_ptr_mut(key) else { return };
    if word < size_of::<LatencyEntry>() / WORD {
        // SAFETY: a word of a map value that consists of counters of eight bytes; all CPUs add to them atomically.
        unsafe {
            add(entry.cast::<u64>().add(word), 1);
            add(&raw mut (*entry).sum_us, us);
        }
    }
}
