//! What the stages ask of their surroundings: maps, clock and random numbers. Each stage names the traits it needs. The
//! kernel's are in [`kernel`](crate::kernel); the host's, for tests and fuzzing, in `host`.
//!
//! A value of these traits is a handle that is copied around; that of the kernel has no size.

use proxy_common::Address;
use proxy_common::Family;
use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{BUCKET_SLOTS, FlowKey};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::node::{Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::prefilter::{Role, position};
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::stats::{RefusalKey, ServiceStats};

use crate::context::PacketCtx;
use crate::flow::bucket::BucketRef;
use crate::flow::memory::EntryRef;
use crate::frame::{Frame, Route};
use crate::shared::{Raw, Shared};

/// The words of the addresses of a handle's family.
pub type Words<M> = <<M as Node>::Family as Family>::Words;

/// The clock, and what goes by it.
#[derive(Clone, Copy)]
pub struct Time {
    /// Low 32 bits of jiffies.
    pub now: u32,
    /// Timeouts and sizes.
    pub config: &'static NodeConfig,
}

impl Time {
    /// The hash of a key.
    #[inline(always)]
    pub fn hash<A: Address>(self, key: &FlowKey<A>) -> u64 {
        key.hash(self.config.flow_seed)
    }
}

/// What the programs leave to those of another version that run behind them, while one version replaces the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// Nothing: there are no others.
    None,
    /// Every packet without a flow.
    LooksUp,
    /// Packets in the middle of a connection that has no flow: the others may know it.
    Opens,
    /// Replies to closed flows: the others may have given the source port to a new flow.
    Yields,
}

/// What the programs know of the node they run on.
pub trait Node: Copy + 'static {
    /// The address family.
    type Family: Family;
    /// `config`; `None` before the agent has written it.
    fn config(self) -> Option<&'static NodeConfig>;
    /// `node` or `node6`.
    fn node(self) -> Option<&'static NodeEntry<Words<Self>>>;
    /// `node_addrs` or `node_addrs6`; 0: the address is none of this node's.
    fn node_addr(self, addr: &Words<Self>) -> NodeAddr;
    /// `tunnels`: a node that packets are encapsulated to. Where there are no such nodes, none.
    #[inline(always)]
    fn tunnel(self, _number: u32) -> Option<*const Tunnel> {
        None
    }
    /// `devices`: bits of a device.
    fn device(self, ifindex: u32) -> Device;
    /// Low 32 bits of jiffies.
    fn jiffies(self) -> u32;
    /// A random number.
    fn random(self) -> u32;

    /// Which part of the work is theirs.
    #[inline(always)]
    fn transition(self) -> Transition {
        Transition::None
    }

    /// This moment; `None` before the agent has told anything.
    #[inline(always)]
    fn time(self) -> Option<Time> {
        Some(Time { now: self.jiffies(), config: self.config()? })
    }

    /// Whether the address is in a range of Service addresses.
    #[inline(always)]
    fn is_service_address(self, addr: &Words<Self>) -> bool {
        self.node().is_some_and(|node| node.is_service_address(addr))
    }
}

/// What connections have told of backends.
pub trait Health: Node {
    /// `health`: the word of a backend.
    fn health(self, id: u32) -> Option<Raw<u64>>;

    /// [`select::health::weigh`](crate::select::health::weigh).
    fn weigh(self, id: u32, client: u32, random: u32) -> u32;

    /// [`select::health::failed`](crate::select::health::failed).
    fn failed(self, id: u32, client: u32) -> u32;
}

/// Open connections of backends, which Services that spread by load go by.
pub trait OpenConnections: Node {
    /// A value of `connections`.
    fn open_connections(self, backend: u32) -> Option<*mut u64>;
}

/// Services and their backends.
pub trait Services: Health + OpenConnections {
    /// `services` or `services6`. The agent may replace the entry while it is read: see `ServiceEntry::tag`.
    fn service_entry(self, key: &ServiceKey<Words<Self>>) -> Option<*const ServiceEntry>;
    /// `slots`: the id of the backend in a slot.
    fn slot(self, index: u32) -> Option<u32>;
    /// `maglev_index`: where the table of a Service port begins; 0: it has none.
    fn maglev_base(self, index: u32) -> u32;
    /// `maglev_index`: where the table that the Service port had before begins; 0: none, or its drain period is over.
    fn maglev_previous(self, index: u32) -> u32;
    /// A word of `maglev`.
    fn maglev(self, index: u32) -> Option<u64>;
    /// A value of `turns`.
    fn turns(self, service: u32) -> Option<*mut u64>;
    /// `backends` or `backends6`.
    fn backend(self, id: u32) -> Option<&'static BackendEntry<Words<Self>>>;
    /// A word of `prefilter`.
    fn prefilter(self, word: u32) -> Option<u64>;
    /// `src_ranges` or `src_ranges6`: whether a Service admits a client.
    fn admits(self, service: u32, client: &Words<Self>) -> bool;

    /// [`select::lookup::packet_frontend`](crate::select::lookup::packet_frontend).
    fn packet_frontend(self, ctx: &mut PacketCtx<Words<Self>>, outside: bool);

    /// [`select::backend::first_id`](crate::select::backend::first_id).
    fn first_id(self, service: &ServiceEntry, selector: u32) -> u32;

    /// [`select::backend::rank`](crate::select::backend::rank).
    fn rank(self, service: &ServiceEntry, id: u32, client: u32, random: u32) -> u32;

    /// [`select::backend::has_tag`](crate::select::backend::has_tag).
    fn has_tag(self, service: &ServiceEntry, id: u32, tag: u32, of: u32) -> u32;

    /// [`select::backend::select_for`](crate::select::backend::select_for).
    fn select_for(self, ctx: &mut PacketCtx<Words<Self>>, random: u32) -> u32;

    /// [`select::backend::tagged`](crate::select::backend::tagged).
    fn tagged(self, ctx: &mut PacketCtx<Words<Self>>) -> u32;

    /// [`select::backend::second_chance`](crate::select::backend::second_chance).
    fn second_chance(self, ctx: &mut PacketCtx<Words<Self>>, id: u32) -> u32;

    /// The one cheap check: whether the tables have to be asked about this tuple at all.
    #[inline(always)]
    fn may_be(self, role: Role, addr: &Words<Self>, port: u16, proto: u8) -> bool {
        let (word, mask) = position(role, addr, port, proto);
        self.prefilter(word).is_some_and(|bits| bits & mask != 0)
    }
}

/// Which backend a client stays with.
pub trait Affinity: Services {
    /// `affinity` or `affinity6`.
    fn affinity(self, key: &AffinityKey<Words<Self>>) -> Option<*mut AffinityEntry>;
    /// Adds an entry.
    fn put_affinity(self, key: &AffinityKey<Words<Self>>, entry: &AffinityEntry) -> Result<(), i32>;
}

/// The entries of the flow table that a CPU looks at next; value of `clock_window`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockWindow {
    /// The next one.
    pub next: u32,
    /// How many there are.
    pub left: u32,
}

/// Connection tracking.
pub trait FlowTable: Services {
    /// An entry of `flows` or `flows6`.
    type Entry: EntryRef<Words<Self>>;
    /// A bucket of `flow_index` or `flow_index6`.
    type Bucket: BucketRef;
    /// Slots of a bucket: a model checker wants fewer.
    const SLOTS: u32 = BUCKET_SLOTS;
    /// The entry of that number.
    fn entry(self, index: u32) -> Option<Self::Entry>;
    /// The bucket of that number.
    fn bucket(self, number: u32) -> Option<Self::Bucket>;
    /// This CPU's value of `clock_window`.
    fn clock_window(self) -> Option<*mut ClockWindow>;
    /// Moves `clock_hand` on by so many entries, and gives where it stood.
    fn advance_clock_hand(self, by: u32) -> Option<u64>;
    /// This family's value of `direct_seen`.
    fn direct_seen(self) -> Option<impl Shared<Value = u32>>;

    /// Whether the time that backends take to answer a SYN is measured. The verifier knows the answer, and leaves out what is asked
    /// for only then: this comes before each comparison that has no other use.
    #[inline(always)]
    fn measures_latency(self) -> bool {
        false
    }

    /// A flow has begun with a SYN. Called where [`FlowTable::measures_latency`].
    #[inline(always)]
    fn syn_begun(self, _flow: u32) {}

    /// The SYN of a flow was answered; `refused`: by a reset. Called likewise.
    #[inline(always)]
    fn syn_answered(self, _flow: u32, _service: u32, _backend: u32, _refused: bool) {}

    /// A SYN to this backend came again before it was answered. Called likewise.
    #[inline(always)]
    fn syn_again(self, _service: u32, _backend: u32) {}

    /// [`flow::track::find_key`](crate::flow::track::find_key).
    fn find_key(self, key: &FlowKey<Words<Self>>, hash: u64) -> u64;

    /// [`flow::index::find_in`](crate::flow::index::find_in).
    fn find_in(self, bucket: u32, tag: u32, key: &FlowKey<Words<Self>>) -> u64;

    /// [`flow::index::add`](crate::flow::index::add).
    fn add_key(self, flow: u32, direction: u32, hash: u64) -> u32;

    /// [`flow::index::take_slot_in`](crate::flow::index::take_slot_in).
    fn take_slot_in(self, bucket: u32, pending: u32, stale: bool) -> u32;

    /// [`flow::index::conflicting_entry`](crate::flow::index::conflicting_entry).
    fn conflicting_entry(self, flow: u32, direction: u32, own: u32, bucket: u32) -> u32;

    /// [`flow::evict::scan`](crate::flow::evict::scan).
    fn scan(self, start: u32, room: u32, now: u32) -> u64;

    /// [`flow::evict::claim`](crate::flow::evict::claim).
    fn claim(self, now: u32) -> u32;

    /// [`flow::open::try_ports`](crate::flow::open::try_ports).
    fn try_ports(self, index: u32, tries: u32, snat: u32) -> u32;

    /// [`flow::open::try_port`](crate::flow::open::try_port).
    fn try_port(self, index: u32, tries: u32, snat: u32) -> u32;
}

/// The first fragments of packets that come in pieces.
pub trait Fragments: Node {
    /// `fragments` or `fragments6`.
    fn fragment(self, key: &FragmentKey<Words<Self>>) -> Option<FragmentEntry>;
    /// Adds an entry.
    fn put_fragment(self, key: &FragmentKey<Words<Self>>, entry: &FragmentEntry) -> Result<(), i32>;
}

/// A route that the CPU remembers for one tick of the clock; value of `fib_cache` and `fib_cache6`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FibEntry<A> {
    /// Source address; routes may depend on it.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// The device by which the packet came.
    pub from: u32,
    /// Low 32 bits of jiffies.
    pub at: u32,
    /// When a packet was last sent by the kernel's neighbour code, likewise; 0: not looked up yet.
    pub probed: u32,
    /// Zero.
    pub reserved: u32,
    /// The route; its device is 0 if nothing stands here.
    pub route: Route,
}

/// Entries of `fib_cache` and `fib_cache6`, a power of two.
pub const FIB_CACHE_ENTRIES: usize = 256;

/// Routes that a CPU remembers.
pub trait FibCache: Node {
    /// This CPU's entry of that number.
    fn fib_entry(self, number: u32) -> Option<*mut FibEntry<Words<Self>>>;
}

/// A token bucket: how many ICMP answers a CPU may send; value of `icmp_ratelimit`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenBucket {
    /// Answers left.
    pub tokens: u32,
    /// Low 32 bits of jiffies when some were last added.
    pub since: u32,
}

/// The limit of ICMP answers.
pub trait RateLimit: Node {
    /// This CPU's token bucket.
    fn icmp_ratelimit(self) -> Option<*mut TokenBucket>;
}

/// What happened, for those who listen (`ballast monitor`): a reason, or that a flow has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A connection to this backend has begun.
    NewFlow {
        /// Id of the backend.
        backend: u32,
    },
    /// Something was refused, dropped or passed by.
    Because(Reason),
}

/// What the programs count.
pub trait Counters: Node {
    /// This CPU's value of `service_stats`.
    fn service_stats(self, id: u32) -> Option<*mut ServiceStats>;
    /// A value of `backend_stats`: connections.
    fn backend_connections(self, id: u32) -> Option<*mut u64>;
    /// This CPU's count of a reason.
    fn reason(self, reason: Reason) -> Option<*mut u64>;
    /// `refusals`: the count of a Service's refusals for one reason.
    fn refusals(self, key: &RefusalKey) -> Option<*mut u64>;
    /// Adds that count.
    fn begin_refusals(self, key: &RefusalKey) -> Result<(), i32>;
    /// Tells listeners what happened to the packet. Service 0: none is known.
    fn tell<F: Frame>(self, frame: F, ctx: &PacketCtx<Words<Self>>, service: u32, what: Happening);
    /// Tells listeners a reason of which no more is known.
    fn tell_bare(self, service: u32, why: Reason);
}
