//! The interface of the stages and the socket calls to their environment: maps, clock and random numbers. Each names the traits
//! that it needs. [`kernel`](crate::kernel) implements the traits for the kernel, `host` for tests and fuzzing.
//!
//! A value of a type with these traits is a handle, which is passed by copy; the kernel's handle has size zero.

use proxy_common::Address;
use proxy_common::Family;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::config::{CONFIG_IPSEC, NodeConfig};
use proxy_common::flow::{BUCKET_SLOTS, DIRECT_ANY, FlowKey, direct_slot};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::latency::SocketExample;
use proxy_common::node::{Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::prefilter::{Role, position};
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::stats::{RefusalKey, ServiceStats};

use crate::calls::{declare, flow_calls, health_calls, node_calls, service_calls};
use crate::context::{Packet, PacketCtx, Tuple};
use crate::flow::bucket::BucketRef;
use crate::flow::memory::EntryRef;
use crate::frame::{Frame, Route};
use crate::shared::{Raw, Shared};
use crate::sock::Sockaddr;
use crate::step::Lookup;

/// An address of the handle's family, as 32-bit words.
pub type Words<M> = <<M as Node>::Family as Family>::Words;

/// The time, and the configuration with the timeouts.
#[derive(Clone, Copy)]
pub struct Time {
    /// Low 32 bits of jiffies.
    pub now: u32,
    /// Timeouts and sizes.
    pub config: &'static NodeConfig,
}

impl Time {
    /// Returns the hash of a key, with the seed of the configuration.
    #[inline(always)]
    pub fn hash<A: Address>(self, key: &FlowKey<A>) -> u64 {
        key.hash(self.config.flow_seed)
    }
}

/// The node on which the programs run.
pub trait Node: Copy + 'static {
    /// The address family.
    type Family: Family;
    /// Returns the value of `config`; `None` before the agent has written it.
    fn config(self) -> Option<&'static NodeConfig>;
    /// Returns the value of `node` or `node6`.
    fn node(self) -> Option<&'static NodeEntry<Words<Self>>>;
    /// Returns the bits of an address in `node_addrs` or `node_addrs6`; 0: the map does not have the address.
    fn node_addr(self, addr: &Words<Self>) -> NodeAddr;
    /// Returns a node in `tunnels`, to which packets are encapsulated. The default has no such nodes.
    #[inline(always)]
    fn tunnel(self, _number: u32) -> Option<*const Tunnel> {
        None
    }
    /// Returns the bits of a device in `devices`.
    fn device(self, ifindex: u32) -> Device;
    /// Whether the program of the early hook is attached to a device (`xdp_devices`).
    #[inline(always)]
    fn is_early_device(self, _ifindex: u32) -> bool {
        false
    }
    /// Returns the low 32 bits of jiffies.
    fn jiffies(self) -> u32;
    /// Returns a random number.
    fn random(self) -> u32;

    /// Whether the time that backends take to answer a SYN is measured. The verifier knows the value, and removes code that
    /// only runs with it; so callers test it before comparisons that have no other use.
    #[inline(always)]
    fn measures_latency(self) -> bool {
        false
    }

    /// Whether the programs begin flows. If not, they leave every packet without a flow to the rules behind them.
    #[inline(always)]
    fn opens_flows(self) -> bool {
        true
    }

    /// Returns the time; `None` before the agent has written `config`.
    #[inline(always)]
    fn time(self) -> Option<Time> {
        Some(Time { now: self.jiffies(), config: self.config()? })
    }

    /// Whether an `IPsec` policy of the kernel applies to packets with these addresses. Redirecting such a packet would send it
    /// in clear text.
    #[inline(always)]
    fn has_ipsec_policy(self, tuple: &Tuple<Words<Self>>) -> bool {
        self.has_ipsec() && self.matches_ipsec_policy(tuple)
    }

    /// Whether the kernel has `IPsec` policies.
    #[inline(always)]
    fn has_ipsec(self) -> bool {
        self.config().is_some_and(|config| config.flags & CONFIG_IPSEC != 0)
    }

    /// Whether the address is in a range of Service addresses.
    #[inline(always)]
    fn is_service_address(self, addr: &Words<Self>) -> bool {
        self.node().is_some_and(|node| node.is_service_address(addr))
    }

    node_calls!(declare!(), Words<Self>);
}

/// The health of backends, by the results of their connections.
pub trait Health: Node {
    /// Returns the word of a backend in `health`.
    fn health(self, id: u32) -> Option<Raw<u64>>;

    /// Returns the word at an index of `skips`.
    fn skip(self, index: u32) -> Option<Raw<u64>>;

    health_calls!(declare!());
}

/// Open connections of backends, for Services whose algorithm uses them.
pub trait OpenConnections: Node {
    /// Returns the word of a backend in `connections` ([`proxy_common::connections`]).
    fn open_connections(self, backend: u32) -> Option<*mut u64>;

    /// [`select::load::count`](crate::select::load::count).
    fn count_open(self, backend: u32, change: u64, created: u32);
}

/// Services and their backends.
pub trait Services: Health + OpenConnections {
    /// Returns an entry of `services` or `services6`. The agent may replace the entry while it is read: see
    /// `ServiceEntry::tag`.
    fn service_entry(self, key: &ServiceKey<Words<Self>>) -> Option<*const ServiceEntry>;
    /// Returns the id of the backend in a slot of `slots`.
    fn slot(self, index: u32) -> Option<u32>;
    /// Returns the first word in `maglev` of table `number` of a Service port (`maglev_index`); 0: no table.
    fn maglev_base(self, index: u32, number: u32) -> u32;
    /// Returns a word of `maglev`.
    fn maglev(self, index: u32) -> Option<u64>;
    /// Returns the counter of a Service port in `turns`.
    fn turns(self, service: u32) -> Option<*mut u64>;
    /// Returns a backend of `backends` or `backends6`.
    fn backend(self, id: u32) -> Option<&'static BackendEntry<Words<Self>>>;
    /// Returns a word of `prefilter`.
    fn prefilter(self, word: u32) -> Option<u64>;
    /// Whether a set of source ranges contains a client (`src_ranges` or `src_ranges6`).
    fn admits(self, set: u32, client: &Words<Self>) -> bool;

    service_calls!(declare!(), Words<Self>);

    /// Asks the prefilter for an address, port and protocol.
    #[inline(always)]
    fn may_be(self, role: Role, addr: &Words<Self>, port: u16, proto: u8) -> Prefilter {
        let (word, mask) = position(role, addr, port, proto);
        // Without a word, the bits are 0 and not undefined: the verifier refuses a shift of an undefined number.
        Prefilter(self.prefilter(word).unwrap_or(0) & mask != 0)
    }
}

/// An answer of `prefilter` or `direct_seen`. "No" is certain. "Maybe" is not, since two tuples may share a bit: it can only lead
/// to a lookup in the tables, and no verdict can be made of it. So the answer is no `bool`.
#[must_use]
#[derive(Clone, Copy)]
pub struct Prefilter(bool);

impl Prefilter {
    /// Whether certainly no table has the tuple.
    #[inline(always)]
    pub fn is_no(self) -> bool {
        !self.0
    }

    /// Returns the stage that looks the packet up, unless the answer is certain.
    #[inline(always)]
    pub fn leads_to(self, lookup: Lookup) -> Option<Lookup> {
        if self.0 { Some(lookup) } else { None }
    }
}

/// Session affinity: the backend of each client.
pub trait Affinity: Services {
    /// Returns an entry of `affinity` or `affinity6`.
    fn affinity(self, key: &AffinityKey<Words<Self>>) -> Option<*mut AffinityEntry>;
    /// Adds an entry.
    fn put_affinity(self, key: &AffinityKey<Words<Self>>, entry: &AffinityEntry) -> Result<(), i32>;
}

/// The entries of `flows` that a CPU checks next for eviction; value of `clock_window`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockWindow {
    /// Number of the next entry.
    pub next: u32,
    /// Number of entries left.
    pub left: u32,
}

/// Connection tracking.
pub trait FlowTable: Services {
    /// An entry of `flows` or `flows6`.
    type Entry: EntryRef<Words<Self>>;
    /// A bucket of `flow_index` or `flow_index6`.
    type Bucket: BucketRef;
    /// Number of slots of a bucket; a model checker needs fewer.
    const SLOTS: u32 = BUCKET_SLOTS;
    /// Returns the entry with this number.
    fn entry(self, index: u32) -> Option<Self::Entry>;
    /// Returns the bucket with this number.
    fn bucket(self, number: u32) -> Option<Self::Bucket>;
    /// Returns this CPU's value of `clock_window`.
    fn clock_window(self) -> Option<*mut ClockWindow>;
    /// Advances `clock_hand` by this number of entries; returns its previous position.
    fn advance_clock_hand(self, by: u32) -> Option<u64>;
    /// Returns a slot of this family's part of `direct_seen`.
    fn direct_seen(self, slot: u32) -> Option<impl Shared<Value = u32>>;

    /// Whether a client may have a direct flow, by its slot of `direct_seen`, which other clients share.
    #[inline(always)]
    fn may_have_direct_flow(self, client: &Words<Self>, port: u16, proto: u8) -> Prefilter {
        let is_set = |slot| self.direct_seen(slot).is_some_and(|seen| seen.load() != 0);
        Prefilter(is_set(DIRECT_ANY) && is_set(direct_slot(client, port, proto)))
    }

    /// Notes the start of a flow with a SYN. Called only if [`Node::measures_latency`].
    #[inline(always)]
    fn syn_begun(self, _flow: u32) {}

    /// Notes the answer to the SYN of a flow; `refused`: the backend refused the connection. Called only if
    /// [`Node::measures_latency`].
    #[inline(always)]
    fn syn_answered(self, _flow: u32, _service: u32, _backend: u32, _refused: bool) {}

    /// Notes a retransmission of a SYN that this backend has not answered. Called only if [`Node::measures_latency`].
    #[inline(always)]
    fn syn_again(self, _service: u32, _backend: u32) {}

    flow_calls!(declare!(), Words<Self>);
}

/// First fragments of fragmented packets.
pub trait Fragments: Node {
    /// Returns an entry of `fragments` or `fragments6`.
    fn fragment(self, key: &FragmentKey<Words<Self>>) -> Option<FragmentEntry>;
    /// Adds an entry.
    fn put_fragment(self, key: &FragmentKey<Words<Self>>, entry: &FragmentEntry) -> Result<(), i32>;
}

/// A route that a CPU caches for one tick; value of `fib_cache` and `fib_cache6`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FibEntry<A> {
    /// Source address; routes may depend on it.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Index of the device on which the packet arrived.
    pub from: u32,
    /// Time of the lookup, low 32 bits of jiffies.
    pub at: u32,
    /// Time at which a packet was last sent through the kernel's neighbour code, low 32 bits of jiffies; 0: not looked up
    /// yet.
    pub probed: u32,
    /// Zero.
    pub reserved: u32,
    /// The route; its `ifindex` is 0 if the entry is empty.
    pub route: Route,
}

/// Number of entries of `fib_cache` and `fib_cache6`, a power of two.
pub const FIB_CACHE_ENTRIES: usize = 256;

/// The routes that a CPU caches.
pub trait FibCache: Node {
    /// Returns this CPU's entry with this number.
    fn fib_entry(self, number: u32) -> Option<*mut FibEntry<Words<Self>>>;
}

/// A token bucket of a CPU; value of `rate_limits`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenBucket {
    /// Number of tokens left.
    pub tokens: u32,
    /// Time at which tokens were last added, low 32 bits of jiffies.
    pub since: u32,
}

/// Number of the token bucket for ICMP errors.
pub const ERRORS: u32 = 0;
/// Number of the token bucket for echo replies. They have their own, so that pings do not suppress errors.
pub const ECHO_REPLIES: u32 = 1;
/// Number of the token bucket for new flows to other nodes (DSR).
pub const NEW_FLOWS: u32 = 2;
/// Number of the token bucket for the stack's errors on the loopback device. Those of the node's own sockets count, too, and take no
/// token of [`ERRORS`].
pub const STACKS_ERRORS: u32 = 3;
/// Number of token buckets of a CPU.
pub const TOKEN_BUCKETS: u32 = 4;

/// What a CPU does at a limited rate.
pub trait RateLimit: Node {
    /// Returns this CPU's token bucket for [`ERRORS`], [`ECHO_REPLIES`], [`NEW_FLOWS`] or [`STACKS_ERRORS`].
    fn token_bucket(self, number: u32) -> Option<*mut TokenBucket>;
}

/// An event for the listeners (`ballast monitor`): a reason, or a new flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A connection to this backend has begun.
    NewFlow {
        /// Id of the backend.
        backend: u32,
    },
    /// A packet or call was refused, dropped or passed unchanged.
    Reason(Reason),
}

/// The counters of the programs, and the events for listeners.
pub trait Counters: Node {
    /// Returns this CPU's value of `service_stats`.
    fn service_stats(self, id: u32) -> Option<*mut ServiceStats>;
    /// Returns the number of connections to a backend (`backend_stats`).
    fn backend_connections(self, id: u32) -> Option<*mut u64>;
    /// Returns this CPU's count of a reason.
    fn reason(self, reason: Reason) -> Option<*mut u64>;
    /// Returns the count of a Service's refusals for one reason (`refusals`).
    fn refusals(self, key: &RefusalKey) -> Option<*mut u64>;
    /// Adds an element to `refusals`, with the count 0.
    fn begin_refusals(self, key: &RefusalKey) -> Result<(), i32>;
    /// Sends an event about the packet to the listeners. `service` 0: unknown.
    fn notify<F: Frame>(self, frame: F, ctx: &PacketCtx<Words<Self>>, service: u32, what: EventKind);
    /// Sends a reason to the listeners, without a packet. `service` 0: unknown.
    fn notify_reason(self, service: u32, why: Reason);
}

/// What shows whether a socket is a pod's.
pub trait Pods: Node {
    /// Whether `namespaces` has the network namespace.
    fn has_namespace(self, netns: u64) -> bool;
    /// Adds a network namespace to `namespaces`. If this fails, the next connection of the namespace shows it again.
    fn add_namespace(self, netns: u64);
    /// Returns the id of the cgroup of the current process, or of a cgroup above it, at this level; 0: there is none. The root
    /// has level 0.
    fn ancestor_cgroup(self, level: i32) -> u64;
}

/// What the calls on sockets need in addition to Services.
pub trait Sockets: Services + Counters + Pods {
    /// Returns an entry of `sockets` or `sockets6`: the translated address of a peer that no socket storage holds.
    fn peer(self, key: &SocketKey<Words<Self>>) -> Option<*mut SocketEntry<Words<Self>>>;
    /// Adds or replaces an entry.
    fn put_peer(self, key: &SocketKey<Words<Self>>, entry: &SocketEntry<Words<Self>>) -> Result<(), i32>;
    /// Removes an entry.
    fn remove_peer(self, key: &SocketKey<Words<Self>>);
    /// Returns the session affinity of a network namespace (`affinity_netns`).
    fn netns_affinity(self, key: &NetnsAffinityKey) -> Option<*mut AffinityEntry>;
    /// Adds or replaces an entry.
    fn put_netns_affinity(self, key: &NetnsAffinityKey, entry: &AffinityEntry) -> Result<(), i32>;
    /// Whether a program can choose the error with which a call fails. Otherwise every call that is denied fails with `EPERM`.
    fn can_set_errno(self) -> bool;
    /// Sets the error with which the call fails.
    fn set_errno(self, errno: i32);
    /// Sends an event about the call to the listeners. `service` 0: unknown.
    fn notify_call<S: Sockaddr<Family = Self::Family>>(self, call: &S, service: u32, what: EventKind);
}

/// The outcome of a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectOutcome {
    /// The SYN was answered after this number of nanoseconds.
    Answered(u64),
    /// The SYN was refused.
    Refused,
    /// The SYN was sent again.
    Retransmitted,
}

/// Connections of sockets, if [`Node::measures_latency`].
pub trait ConnectLatency: Node {
    /// Notes the outcome of a SYN for the backend and for its Service (`connect_latency`).
    fn note_outcome(self, service: u32, backend: u32, outcome: ConnectOutcome);
    /// Stores a connection as the example of its histogram bucket (`socket_examples`).
    fn keep_example(self, service: u32, example: &SocketExample);
}
