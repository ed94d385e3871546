//! `events` and `monitor`: the live events that `ballast monitor` shows.
//!
//! `events` is a ring buffer (`BPF_MAP_TYPE_RINGBUF`) that the programs write while a listener is registered in `monitor`.
//! Each listener holds a lease there and renews it. A lease expires by itself, so a killed listener soon causes no more
//! cost. Several listeners read the ring: each keeps its own position, and each may advance the position that the kernel
//! knows (`proxy-user/src/maps/view/ring.rs`), but never over the last quarter of the ring: this is the history. The agent
//! holds a lease for it, so that the history has the refusals, drops and passes of the time without listeners.

/// One element of `events`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds of the monotonic clock (`bpf_ktime_get_ns`).
    pub time: u64,
    /// At a socket hook: cookie of the socket's network namespace. Else 0.
    pub netns: u64,
    /// At a packet hook: address of the client as words in memory order; an IPv4 address is in the first word, the rest is
    /// zero. At a socket hook, where the socket has no address yet: name of the calling thread (`bpf_get_current_comm`).
    pub client: [u32; 4],
    /// Original destination address, in the same form.
    pub frontend: [u32; 4],
    /// Address of the backend, in the same form; zero if there is none.
    pub backend: [u32; 4],
    /// Id of the Service port; 0: none is known.
    pub service: u32,
    /// Id of the backend; 0: none.
    pub backend_id: u32,
    /// A [`Reason`](crate::reason::Reason) number; for [`EVENT_NEW_FLOW`] always 0, without a meaning.
    pub reason: u32,
    /// At a socket hook: id of the calling process. Else 0.
    pub pid: u32,
    /// At a packet hook: index of the device. Else 0.
    pub device: u32,
    /// Port of the client, host byte order; 0 at a socket hook.
    pub client_port: u16,
    /// Original destination port, host byte order.
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
/// A packet or call was rejected: the client got an error.
pub const EVENT_REJECT: u8 = 2;
/// A packet was dropped without an answer.
pub const EVENT_DROP: u8 = 3;
/// A packet or call passed untranslated, for a reason.
pub const EVENT_PASS: u8 = 4;

/// The event is about a socket call.
pub const HOOK_SOCKET: u8 = 1;
/// The event is about a packet.
pub const HOOK_PACKET: u8 = 2;

/// Maximum number of listeners at a time.
pub const LEASES: usize = 16;

/// The only value of `monitor` (array, memory-mapped by listeners). The programs read [`Monitor::until`] and
/// [`Monitor::sample`], which the listeners compute from all leases.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Monitor {
    /// End of the longest lease, in nanoseconds of the monotonic clock; 0: there is no listener. The first program that
    /// runs after this time sets it to 0.
    pub until: u64,
    /// End of the longest lease of a listener, the history excluded, in the same unit; 0: there is none. A program that finds
    /// the ring full after this time sets [`Monitor::until`] to 0: a flood of events ends until the history's next renewal.
    pub live_until: u64,
    /// Number of events that were lost because the ring was full.
    pub lost: u64,
    /// One in this many new flows becomes an event; 1: all of them; 0: none. Rejects, drops and passes always become events.
    pub sample: u64,
    /// End of the history's lease, in the same unit; 0: no agent holds it.
    pub history_until: u64,
    /// The leases of the listeners.
    pub leases: [Lease; LEASES],
}

/// The lease of one listener in [`Monitor`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lease {
    /// End of the lease, in the unit of [`Monitor::until`]; 0: the lease is free.
    pub until: u64,
    /// The [`Monitor::sample`] that the listener wants.
    pub sample: u64,
}

/// Time after which a lease expires if it is not renewed, in nanoseconds.
pub const LEASE_NANOSECONDS: u64 = 3_000_000_000;
