//! `events` and `monitor`: what `ballast monitor` shows, live.
//!
//! `events` is a ring (`BPF_MAP_TYPE_RINGBUF`) that the programs write while a listener is registered. `monitor` says who
//! does: each listener holds a lease there, which it renews and which ends by itself, so that one that was killed
//! costs nothing for long. Listeners are readers of the ring beside each other: each keeps its own place, and any of
//! them may move the kernel's forward (`proxy-user/src/maps/view/ring.rs`).

/// One element of `events`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds of the monotonic clock (`bpf_ktime_get_ns`).
    pub time: u64,
    /// At a socket hook: cookie of the socket's network namespace. Else 0.
    pub netns: u64,
    /// At a packet hook: address of the client as words in memory order; IPv4 in the first, the rest zero. Else zero.
    pub client: [u32; 4],
    /// Address that was dialled, likewise.
    pub frontend: [u32; 4],
    /// Address of the backend, likewise; zero when there is none.
    pub backend: [u32; 4],
    /// Id of the Service port; 0: none is known.
    pub service: u32,
    /// Id of the backend; 0: none.
    pub backend_id: u32,
    /// A [`Reason`](crate::reason::Reason) number; of [`EVENT_NEW_FLOW`] 0, which means nothing there.
    pub reason: u32,
    /// At a socket hook: the process that called. Else 0.
    pub pid: u32,
    /// At a packet hook: index of the device. Else 0.
    pub device: u32,
    /// Port of the client, host byte order; 0 at a socket hook.
    pub client_port: u16,
    /// Port that was dialled, host byte order.
    pub frontend_port: u16,
    /// Port of the backend, host byte order.
    pub backend_port: u16,
    /// One of `EVENT_*`.
    pub kind: u8,
    /// [`HOOK_SOCKET`] or [`HOOK_PACKET`]; 0: not known.
    pub hook: u8,
    /// 4 or 6; 0: no address is known.
    pub family: u8,
    /// IP protocol number; 0: not known.
    pub proto: u8,
    /// Zero.
    pub reserved: u16,
}

/// A connection to a backend has begun.
pub const EVENT_NEW_FLOW: u8 = 1;
/// The client was told that it will not be served.
pub const EVENT_REJECT: u8 = 2;
/// Silence.
pub const EVENT_DROP: u8 = 3;
/// It went on untranslated, for a reason.
pub const EVENT_PASS: u8 = 4;

/// A call on a socket.
pub const HOOK_SOCKET: u8 = 1;
/// A packet.
pub const HOOK_PACKET: u8 = 2;

/// Listeners at once.
pub const LEASES: usize = 16;

/// The one value of `monitor` (array, memory-mapped by listeners). The programs read [`Monitor::until`] and
/// [`Monitor::sample`]; listeners agree on both by means of the leases.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Monitor {
    /// Until when a reader listens, in nanoseconds of the monotonic clock; 0: none does. The first program that
    /// comes later makes it 0.
    pub until: u64,
    /// Events that found the ring full.
    pub lost: u64,
    /// One of so many new flows becomes an event, and 1 is all of them; 0: none. Refusals, drops and passes always
    /// do.
    pub sample: u64,
    /// What each listener holds.
    pub leases: [Lease; LEASES],
}

/// A listener's part of [`Monitor`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lease {
    /// Until when, as [`Monitor::until`]; 0: the lease is free.
    pub until: u64,
    /// The [`Monitor::sample`] that it wants.
    pub sample: u64,
}

/// How long a lease holds without being renewed, in nanoseconds.
pub const LEASE_NANOSECONDS: u64 = 3_000_000_000;
