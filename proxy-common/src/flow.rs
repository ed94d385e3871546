//! `flows`, `flows6`, `flow_index`, `flow_index6`: connection tracking of the packet path, as stored in the maps.
//!
//! One flow is one entry of `flows`, which both directions share. `flow_index` maps two keys to this entry: the tuple that
//! a client sends to the frontend, and the tuple of the backend's reply. `flow_index` is a hash table of our own in an
//! array, because a lookup in an array needs no helper call, and an insertion into the kernel's hash map costs more than
//! everything else that a new flow needs. [`conntrack`](crate::conntrack) defines how the state of a flow changes.

use crate::Address;
use crate::PROTO_TCP;
use crate::map_names::TUNNEL_COUNT;
use crate::prefilter;

/// Key of a flow in the index: the tuple of a packet as it arrives, with its direction.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowKey<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Source port, host byte order.
    pub src_port: u16,
    /// Destination port, host byte order.
    pub dst_port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// [`DIRECTION_FORWARD`] or [`DIRECTION_REPLY`].
    pub direction: u8,
    /// Zero.
    pub reserved: u16,
}

/// Client to frontend.
pub const DIRECTION_FORWARD: u8 = 0;
/// Backend to client.
pub const DIRECTION_REPLY: u8 = 1;

/// Returns the number of the window of 256 jiffies in which the frontend of a UDP flow is looked up once. Replies also change
/// [`FlowEntry::last_seen`], so the flow notes it in the first number of [`FlowEntry::seq`].
#[inline(always)]
pub const fn frontend_window(now: u32) -> u16 {
    (now >> 8) as u16
}

/// Number of slots of a [`Bucket`].
pub const BUCKET_SLOTS: u32 = 15;
/// Number of 32-bit words of a [`Bucket`]. A position in the index is the number of the bucket times this, plus the number
/// of the slot.
pub const BUCKET_WORDS: u32 = 16;

/// Value of `flow_index` and `flow_index6`: a bucket of a set-associative hash table, one cache line. (The map is an array
/// that can be memory-mapped, so its values begin at a page boundary. [`FlowSize::buckets`] is the number of
/// buckets.)
///
/// A slot is 0 (free) or holds [`SLOT_PENDING`], the [`tag`] of a key in [`SLOT_TAG`], and the number of a flow plus one in
/// [`SLOT_FLOW`]. Each key can be in one of two buckets; the second is used only if the first was full once. A CPU that
/// adds a key writes a pending slot, searches all possible slots for the same key, and then makes its slot valid; see
/// `proxy-ebpf/src/flow/index.rs`.
///
/// [`FlowSize::buckets`]: crate::config::FlowSize::buckets
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The slots.
    pub slots: [u32; BUCKET_SLOTS as usize],
    /// Not 0: keys whose first bucket is this one may be in their second bucket.
    pub overflow: u16,
    /// Zero.
    pub reserved: u16,
}

impl Bucket {
    /// A bucket without keys.
    pub const EMPTY: Self = Self { slots: [0; BUCKET_SLOTS as usize], overflow: 0, reserved: 0 };
}

/// The slot is not valid yet: its CPU still checks whether another slot holds the same key.
pub const SLOT_PENDING: u32 = 1 << 31;
/// Bits of a slot that hold the tag, a part of the key's hash.
pub const SLOT_TAG: u32 = 0x7f << TAG_SHIFT;
/// Bits of a slot that hold the number of the flow, plus one.
pub const SLOT_FLOW: u32 = (1 << TAG_SHIFT) - 1;
/// Lowest bit of the tag in a slot.
pub const TAG_SHIFT: u32 = 24;

/// Maximum number of flows to which slots can refer.
pub const MAX_FLOWS: u32 = SLOT_FLOW;

/// Returns the valid slot of a key that refers to a flow; `tag` is a result of [`tag`].
#[inline(always)]
pub const fn slot_of(tag: u32, flow: u32) -> u32 {
    tag | (flow + 1) & SLOT_FLOW
}

/// Returns the number of the flow to which a slot refers; `u32::MAX`, which is no flow's number, if the slot is free.
#[inline(always)]
pub const fn flow_of(slot: u32) -> u32 {
    (slot & SLOT_FLOW).wrapping_sub(1)
}

/// Returns the tag of a hash, shifted to its place in a slot. Never 0, so that a free slot matches no key.
#[inline(always)]
pub const fn tag(hash: u64) -> u32 {
    const TAGS: u64 = (SLOT_TAG >> TAG_SHIFT) as u64;
    ((((hash >> 32) * TAGS) >> 32) as u32 + 1) << TAG_SHIFT
}

/// Returns the number of buckets for this many flows. With four keys per bucket on average, one bucket in 200,000 is ever
/// full, and a key has two buckets.
pub const fn buckets_for(flows: u32) -> u32 {
    if flows <= 4 { 2 } else { flows.div_ceil(2).next_power_of_two() }
}

/// Number of slots of `direct_seen` for the clients of a family; one more, [`DIRECT_ANY`], is for all clients.
pub const DIRECT_SLOTS: u32 = 1 << DIRECT_BITS;
const DIRECT_BITS: u32 = 10;
/// Number of slots of `direct_seen` for a family.
pub const DIRECT_WORDS: u32 = DIRECT_SLOTS + 1;
/// Number of the slot for all clients.
pub const DIRECT_ANY: u32 = DIRECT_SLOTS;

/// Returns the number of the slot of a client's address, port and protocol.
#[inline(always)]
pub fn direct_slot<A: Address>(client: &A, port: u16, proto: u8) -> u32 {
    prefilter::hash(client, port, proto) >> (u32::BITS - DIRECT_BITS)
}

/// Position of a key that is not in the index.
pub const NO_POSITION: u32 = u32::MAX;

/// Returns the numbers of the two buckets of a hash; `buckets` is a power of two.
#[inline(always)]
pub fn buckets_of(hash: u64, buckets: u32) -> [u32; 2] {
    let first = hash as u32;
    // The upper half of the hash, which gives the tag, is mixed in, so that keys with the same first bucket have different
    // second buckets. The mixed-in number is odd, so the two buckets differ.
    let second = first ^ (((hash >> 32) as u32).wrapping_mul(0x5bd1_e995) | 1);
    [first & (buckets - 1), second & (buckets - 1)]
}

impl<A: Address> FlowKey<A> {
    /// Returns the key of a packet in the opposite direction, to which nothing was translated.
    #[inline(always)]
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            src: self.dst,
            dst: self.src,
            src_port: self.dst_port,
            dst_port: self.src_port,
            proto: self.proto,
            direction: self.direction ^ DIRECTION_REPLY,
            reserved: 0,
        }
    }

    /// Returns a hash that cannot be predicted without `seed`. The lower half selects the bucket, the upper half gives the
    /// [`tag`].
    #[inline(always)]
    pub fn hash(&self, seed: u32) -> u64 {
        let (src, dst) = (self.src.words(), self.dst.words());
        let ports = u64::from(self.src_port) << 16 | u64::from(self.dst_port);
        let rest = u64::from(self.proto) << 8 | u64::from(self.direction);
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut hash = mix(pair(seed, !seed), pair(src[0], dst[0]));
        if size_of::<A>() > size_of::<u32>() {
            hash = mix(hash, pair(src[1], dst[1]));
            hash = mix(hash, pair(src[2], dst[2]));
            hash = mix(hash, pair(src[3], dst[3]));
        }
        hash = mix(hash, ports | rest << 32);
        // The low bits of a product depend only on the low bits of its factors.
        hash ^ hash >> 29
    }
}

/// Mixes another word into the hash.
#[inline(always)]
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
    product ^ product >> 32
}

/// Value of `flows` and `flows6`: one tracked flow (64 bytes for IPv4, one cache line; 112 for IPv6).
///
/// Several CPUs read and write an entry concurrently. [`FlowEntry::state`] is changed by compare-and-exchange only. The CPU
/// that sets [`STATE_CLAIMED`] is the only one that writes the tuple, the positions and the tags, until it clears the bit.
/// Every CPU that sees a packet writes `last_seen` and `seq`; the last write wins.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowEntry<A> {
    /// The state word: the generation in the upper half, which increases by one with each new flow in this entry; `STATE_*`
    /// and connection bits of [`conntrack`](crate::conntrack) in the lower half. If the lower half is 0, the entry is free.
    pub state: u64,
    /// Address of the client.
    pub client: A,
    /// Original destination address.
    pub frontend: A,
    /// Address of the backend.
    pub backend: A,
    /// Source address that the backend sees; without SNAT the client's address.
    pub source: A,
    /// Port of the client. All ports of the entry are in host byte order.
    pub client_port: u16,
    /// Original destination port.
    pub frontend_port: u16,
    /// Port of the backend.
    pub backend_port: u16,
    /// Source port that the backend sees; it differs from the client's port with SNAT, and after a collision of tuples.
    pub source_port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub reserved: u8,
    /// The tags of the flow's two keys, by direction, not shifted by [`TAG_SHIFT`].
    pub tags: [u8; 2],
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// Low 32 bits of the kernel's jiffies when the flow began.
    pub created: u32,
    /// Low 32 bits of jiffies when the flow's last packet passed.
    pub last_seen: u32,
    /// Positions of the flow's two keys in the index, by direction: [`BUCKET_WORDS`] times the bucket, plus the slot;
    /// [`NO_POSITION`]: the key is not in the index.
    pub positions: [u32; 2],
    /// Upper halves of TCP sequence numbers, by direction, as of the last packet that changed them. Of a UDP flow, the first is the time
    /// at which its frontend was looked up last, in units of 256 jiffies.
    pub seq: [u16; 2],
}

flags! {
    /// All `STATE_*` bits of [`FlowEntry::state`].
    STATE_BITS {
        /// The entry is in use.
        pub const STATE_USED: u32 = 1 << 0;
        /// One CPU has exclusive write access to the entry: it fills the entry, or removes the keys.
        pub const STATE_CLAIMED: u32 = 1 << 1;
        /// SNAT: the backend sees an address of this node. Packets of both directions are forwarded at the hook where they
        /// arrive.
        pub const STATE_SNAT: u32 = 1 << 2;
        /// With [`STATE_SNAT`]: the client is a process of this node, and replies go up the stack. With [`STATE_DIRECT`] and
        /// without [`STATE_SNAT`]: the flow is a connection of this node's own, whose source is the address and port of a
        /// frontend; the flow's "client" is the other end.
        pub const STATE_LOCAL: u32 = 1 << 3;
        /// A direct flow: a connection directly to an endpoint, whose replies could be confused with another flow's. Only its
        /// source port is translated.
        pub const STATE_DIRECT: u32 = 1 << 4;
        /// The flow began with a SYN, so the backend's first answer is a SYN-ACK or a RST.
        pub const STATE_SYN: u32 = 1 << 5;
        /// The algorithm of the Service uses open connections: the flow counts as one of its backend until it is closed
        /// ([`conntrack::is_counted`](crate::conntrack::is_counted)).
        pub const STATE_COUNTS: u32 = 1 << 6;
        /// The endpoint was removed from the Service with removal policy `reset`: the program answers the client's next segment
        /// with a TCP reset, unless the endpoint serves the Service again. Or the connection moves to another endpoint
        /// ([`conntrack::is_moving`](crate::conntrack::is_moving)). The agent sets this bit. TCP only.
        pub const STATE_RESET: u32 = 1 << 7;
        /// If not 0, the backend's first reply, or the lack of one, updates its entry in `health`
        /// ([`SERVICE_EJECTS`](crate::service::SERVICE_EJECTS)): [`WATCH_INSIDE`], [`WATCH_OUTSIDE`] or [`WATCH_LAST`].
        pub const STATE_WATCH: u32 = 3 << 17;
        /// Without [`STATE_DSR`] and [`STATE_SNAT`]: the stack forwards the flow's packets, and netfilter masquerades them
        /// ([`CONFIG_MASQUERADE_EXTERNAL`](crate::config::CONFIG_MASQUERADE_EXTERNAL)).
        pub const STATE_MASQUERADE: u32 = 1 << 19;
        /// Without [`STATE_DSR`] and [`STATE_SNAT`]: by its own address, the backend's reply would leave by another device than
        /// the client's packets arrive on. The reply takes the route of its new source, the frontend's address.
        pub const STATE_REROUTE: u32 = 1 << 20;
        /// The flow's packets arrive encapsulated from another node, or are encapsulated to another node (DSR); in the second
        /// case [`tunnel_of`] returns that node's number.
        pub const STATE_DSR: u32 = 1 << 31;
    }
}

/// A refusal may be hidden; the frontend's entry for clients inside applies.
pub const WATCH_INSIDE: u32 = 1 << 17;
/// A refusal may be hidden; the frontend's entry for clients outside applies.
pub const WATCH_OUTSIDE: u32 = 2 << 17;
/// A refusal of the same connection was hidden before: the next one reaches the client.
pub const WATCH_LAST: u32 = 3 << 17;
/// Lowest bit of the number in `tunnels` of the node to which a flow's packets are encapsulated, in the bits of a flow with
/// [`STATE_DSR`]. A flow without it has [`STATE_MASQUERADE`] and [`STATE_REROUTE`] there: `new_flow` decides on one or the
/// other, and nothing changes these bits later.
pub const STATE_TUNNEL_SHIFT: u32 = 19;
const STATE_TUNNEL: u32 = STATE_DSR - (1 << STATE_TUNNEL_SHIFT);

const _: () = {
    assert!(1 << STATE_ARRIVAL_SHIFT == STATE_REROUTE << 1, "a device's index is in the place of a flag");
    let with_dsr = STATE_BITS & !(STATE_MASQUERADE | STATE_REROUTE);
    assert!(with_dsr & STATE_TUNNEL == 0, "a flag is in the place of the tunnel's number");
    assert!(TUNNEL_COUNT - 1 <= STATE_TUNNEL >> STATE_TUNNEL_SHIFT, "a tunnel's number has no room");
    assert!(
        (WATCH_INSIDE | WATCH_OUTSIDE | WATCH_LAST) & !STATE_WATCH == 0,
        "a value of STATE_WATCH has no room"
    );
};

/// Whether packets of a flow with these bits are encapsulated to another node. One comparison: for each packet.
#[inline(always)]
pub const fn is_encapsulated(bits: u32) -> bool {
    bits >= STATE_DSR | 1 << STATE_TUNNEL_SHIFT
}

/// Whether the index has a reply key of a flow with these bits. Replies to packets that this node encapsulates do not pass it: such a
/// flow has its forward key only, and the source port of its client.
#[inline(always)]
pub const fn has_reply_key(bits: u32) -> bool {
    !is_encapsulated(bits)
}

/// Returns how often packets of a flow that is encapsulated to another node were encapsulated before, 0 to 3. A flow of a
/// connection that began with a SYN has 0; [`STATE_WATCH`] has no other meaning without [`STATE_SYN`].
#[inline(always)]
pub const fn tunnel_hops(bits: u32) -> u32 {
    bits >> TUNNEL_HOPS_SHIFT & 3
}

/// Whether a flow did not begin with the first packet of its connection, so that its backend may be another than the
/// connection's.
#[inline(always)]
pub const fn is_guess(proto: u8, bits: u32) -> bool {
    proto == PROTO_TCP && bits & STATE_SYN == 0
}

/// Lowest bit of [`tunnel_hops`].
pub const TUNNEL_HOPS_SHIFT: u32 = STATE_WATCH.trailing_zeros();

/// Returns the number in `tunnels` of the node to which packets of a flow with these bits are encapsulated; 0 if they are
/// not encapsulated.
#[inline(always)]
pub const fn tunnel_of(bits: u32) -> u32 {
    if is_encapsulated(bits) { (bits & STATE_TUNNEL) >> STATE_TUNNEL_SHIFT } else { 0 }
}

/// Whether netfilter masquerades the packets of a flow with these bits.
#[inline(always)]
pub const fn is_masqueraded(bits: u32) -> bool {
    bits & (STATE_DSR | STATE_MASQUERADE) == STATE_MASQUERADE
}

/// Lowest bit of the index of the device on which packets of a flow with [`STATE_REROUTE`] arrive, in the place of the tunnel's
/// number. An index that has no room is 0: no device has this one.
const STATE_ARRIVAL_SHIFT: u32 = 21;

/// Returns the bits of a flow whose packets arrive on this device, and whose replies have a route by another one.
#[inline(always)]
pub const fn rerouted(ifindex: u32) -> u32 {
    let has_room = ifindex < STATE_DSR >> STATE_ARRIVAL_SHIFT;
    STATE_REROUTE | if has_room { ifindex << STATE_ARRIVAL_SHIFT } else { 0 }
}

/// Whether replies of a flow with these bits that leave by this device take the route of their new source. Replies that leave by
/// the device of the requests are right: the stack knows more than their addresses, such as the mark of their connection.
#[inline(always)]
pub const fn is_rerouted(bits: u32, ifindex: u32) -> bool {
    bits & (STATE_DSR | STATE_REROUTE) == STATE_REROUTE && bits >> STATE_ARRIVAL_SHIFT != ifindex
}

/// Returns the `STATE_*` and connection bits of a state word.
#[inline(always)]
pub const fn bits_of(state: u64) -> u32 {
    state as u32
}

/// Returns the generation of a state word.
#[inline(always)]
pub const fn generation_of(state: u64) -> u32 {
    (state >> 32) as u32
}

/// Returns a state word of the same generation with other bits.
#[inline(always)]
pub const fn with_bits(state: u64, bits: u32) -> u64 {
    state >> 32 << 32 | bits as u64
}

/// Whether an entry with this state word holds a flow: it is in use, and no CPU has claimed it.
#[inline(always)]
pub const fn holds_flow(state: u64) -> bool {
    bits_of(state) & (STATE_USED | STATE_CLAIMED) == STATE_USED
}

/// Returns the state word with which a CPU claims an entry for a new flow: the next generation, with [`STATE_USED`] and
/// [`STATE_CLAIMED`].
#[inline(always)]
pub const fn claimed(state: u64) -> u64 {
    with_bits(state.wrapping_add(1 << 32), STATE_USED | STATE_CLAIMED)
}

impl<A: Address> FlowEntry<A> {
    /// Returns the `STATE_*` and connection bits.
    #[inline(always)]
    pub fn bits(&self) -> u32 {
        bits_of(self.state)
    }

    /// Returns the key of a direction.
    #[inline(always)]
    pub fn key(&self, direction: u8) -> FlowKey<A> {
        if direction == DIRECTION_FORWARD { self.forward_key() } else { self.reply_key() }
    }

    /// Returns the key by which the client's packets look up the flow.
    #[inline(always)]
    pub fn forward_key(&self) -> FlowKey<A> {
        FlowKey {
            src: self.client,
            dst: self.frontend,
            src_port: self.client_port,
            dst_port: self.frontend_port,
            proto: self.proto,
            direction: DIRECTION_FORWARD,
            reserved: 0,
        }
    }

    /// Returns the key by which the backend's replies look up the flow.
    #[inline(always)]
    pub fn reply_key(&self) -> FlowKey<A> {
        FlowKey {
            src: self.backend,
            dst: self.source,
            src_port: self.backend_port,
            dst_port: self.source_port,
            proto: self.proto,
            direction: DIRECTION_REPLY,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests;
