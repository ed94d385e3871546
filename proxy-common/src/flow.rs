//! `flows`, `flows6`, `flow_index`, `flow_index6`: connection tracking of the packet path, as it lies in the maps.
//!
//! One flow is one entry of `flows`, which both directions share. `flow_index` leads to it from the packet that a
//! client sends to the frontend and from the reply of the backend: it is a hash table of our own in an array,
//! since a lookup in an array is no call of the kernel, and an insertion into the kernel's hash costs more than
//! all else that a new flow needs. [`conntrack`](crate::conntrack) says how the state of a flow changes.

use crate::Address;

/// A packet's addresses and ports as it arrives: what a flow is found by.
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

/// Slots of a [`Bucket`].
pub const BUCKET_SLOTS: u32 = 15;
/// Words of a [`Bucket`]. A position in the index is so many times the number of the bucket, plus the number of the slot.
pub const BUCKET_WORDS: u32 = 16;

/// Value of `flow_index` and `flow_index6`: a bucket of a set-associative hash table, one cache line. (The map is an
/// array that can be mapped, so its values begin at a page. It has as many buckets as [`NodeConfig::flow_buckets`] says.)
///
/// A slot is 0 (free) or holds [`SLOT_PENDING`], the [`tag`] of a key in [`SLOT_TAG`], and the number of a flow plus one in
/// [`SLOT_FLOW`]. Each key has two buckets where it may stand; the second counts only once the first was full.
/// A CPU that adds a key writes it as pending, looks for the same key in all slots where it may stand, and then makes it
/// valid; see `proxy-ebpf/src/flow/index.rs`.
///
/// [`NodeConfig::flow_buckets`]: crate::config::NodeConfig::flow_buckets
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The slots.
    pub slots: [u32; BUCKET_SLOTS as usize],
    /// Not 0: keys that have this bucket first may stand in their second one.
    pub overflow: u16,
    /// Zero.
    pub reserved: u16,
}

impl Bucket {
    /// A bucket without keys.
    pub const EMPTY: Self = Self { slots: [0; BUCKET_SLOTS as usize], overflow: 0, reserved: 0 };
}

/// Another slot may turn out to hold the same key: this one does not count yet.
pub const SLOT_PENDING: u32 = 1 << 31;
/// The part of the hash.
pub const SLOT_TAG: u32 = 0x7f << TAG_SHIFT;
/// The number of the flow, plus one.
pub const SLOT_FLOW: u32 = (1 << TAG_SHIFT) - 1;
/// Where the tag begins in a slot.
pub const TAG_SHIFT: u32 = 24;

/// The most flows that slots can tell apart.
pub const MAX_FLOWS: u32 = SLOT_FLOW;

/// The slot of a key that leads to a flow; `tag` as [`tag`] gives it.
#[inline(always)]
pub const fn slot_of(tag: u32, flow: u32) -> u32 {
    tag | (flow + 1) & SLOT_FLOW
}

/// The flow that a slot leads to; no flow's number if the slot is free.
#[inline(always)]
pub const fn flow_of(slot: u32) -> u32 {
    (slot & SLOT_FLOW).wrapping_sub(1)
}

/// The part of a hash that stands in a slot, in its place. Never 0, so that a free slot is like no key's.
#[inline(always)]
pub const fn tag(hash: u64) -> u32 {
    const TAGS: u64 = (SLOT_TAG >> TAG_SHIFT) as u64;
    ((((hash >> 32) * TAGS) >> 32) as u32 + 1) << TAG_SHIFT
}

/// Buckets for so many flows. With four keys to a bucket in the mean, one bucket of 200,000 is ever full, and a key
/// has two chances.
pub const fn buckets_for(flows: u32) -> u32 {
    if flows <= 4 { 2 } else { flows.div_ceil(2).next_power_of_two() }
}

/// No position in the index.
pub const NO_POSITION: u32 = u32::MAX;

/// The two buckets of a hash among `buckets`, a power of two.
#[inline(always)]
pub fn buckets_of(hash: u64, buckets: u32) -> [u32; 2] {
    let first = hash as u32;
    // The tag takes part, so that keys which share the first bucket part in the second; the odd number makes the
    // two differ.
    let second = first ^ (((hash >> 32) as u32).wrapping_mul(0x5bd1_e995) | 1);
    [first & (buckets - 1), second & (buckets - 1)]
}

impl<A: Address> FlowKey<A> {
    /// A hash that cannot be predicted without `seed`. The lower half chooses the bucket, the upper half is for the
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
        // The low bits of a product know only the low bits of its factors.
        hash ^ hash >> 29
    }
}

/// Folds another word in.
#[inline(always)]
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
    product ^ product >> 32
}

/// Value of `flows` and `flows6`: one tracked flow (64 bytes for IPv4, one cache line; 112 for IPv6).
///
/// Several CPUs read and write an entry at once. [`FlowEntry::state`] is changed by compare-and-exchange only, and says
/// which CPU owns the rest: the one that sets [`STATE_CLAIMED`] is the only one to write the tuple, the positions and the tags, until
/// it takes the bit away again. `last_seen` and `seq` are written by every CPU that sees a packet; the last write wins.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowEntry<A> {
    /// The generation in the upper half, which is raised by one with each new flow in this entry; `STATE_*` and
    /// connection bits of [`conntrack`](crate::conntrack) in the lower one. A lower half of 0: the entry is free.
    pub state: u64,
    /// Address of the client.
    pub client: A,
    /// Address that the client dialled.
    pub frontend: A,
    /// Address of the backend.
    pub backend: A,
    /// Source address that the backend sees; the client's own where it is kept.
    pub source: A,
    /// Port of the client, host byte order; so are the others.
    pub client_port: u16,
    /// Port that the client dialled.
    pub frontend_port: u16,
    /// Port of the backend.
    pub backend_port: u16,
    /// Source port that the backend sees; it differs from the client's with SNAT and after a collision.
    pub source_port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub reserved: u8,
    /// The tags of its two keys, by direction, without [`TAG_SHIFT`].
    pub tags: [u8; 2],
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// Low 32 bits of the kernel's jiffies when the flow began.
    pub created: u32,
    /// The same when its last packet passed.
    pub last_seen: u32,
    /// Where its keys stand in the index, by direction: [`BUCKET_WORDS`] times the bucket, plus the slot;
    /// [`NO_POSITION`]: nowhere.
    pub positions: [u32; 2],
    /// Upper halves of TCP sequence numbers, by direction, as of the last packet that moved them.
    pub seq: [u16; 2],
}

/// The entry is in use.
pub const STATE_USED: u32 = 1 << 0;
/// One CPU owns the entry: it is being filled, or its keys are being removed.
pub const STATE_CLAIMED: u32 = 1 << 1;
/// The backend sees an address of this node (SNAT): packets of both directions are forwarded from where they come in.
pub const STATE_SNAT: u32 = 1 << 2;
/// With [`STATE_SNAT`]: the client is a process of this node, and replies go up the stack. With [`STATE_DIRECT`] alone: it is a connection of
/// this node's own from the address and port of a frontend, and its "client" is the other end.
pub const STATE_LOCAL: u32 = 1 << 3;
/// A flow straight to an endpoint, whose replies would have been another flow's: only its source port is translated.
pub const STATE_DIRECT: u32 = 1 << 4;
/// The flow began with a SYN: its first answer is a SYN or a reset.
pub const STATE_SYN: u32 = 1 << 5;
/// The first answer to the flow tells of its backend's health ([`SERVICE_EJECTS`](crate::service::SERVICE_EJECTS)).
pub const STATE_WATCHED: u32 = 1 << 17;
/// It began by the frontend's entry for clients outside.
pub const STATE_OUTSIDE: u32 = 1 << 18;
/// The flow is of a Service that spreads by load: it is one of the open connections of its backend until it is closed
/// ([`conntrack::is_counted`](crate::conntrack::is_counted)).
pub const STATE_COUNTS: u32 = 1 << 6;
/// The endpoint left the Service, and the connection is to be reset (removal policy `reset`): the client's next segment is
/// answered with a TCP reset, unless the endpoint serves the Service again. The agent sets it. TCP only.
pub const STATE_RESET: u32 = 1 << 7;

/// Its packets come encapsulated from another node, or go so to one (DSR); in the latter case [`tunnel_of`] names the node.
pub const STATE_DSR: u32 = 1 << 19;
/// Where the number of the node in `tunnels` begins in the bits of a flow whose packets are encapsulated.
pub const STATE_TUNNEL_SHIFT: u32 = 20;

/// The number in `tunnels` of the node to which packets of a flow with these bits are encapsulated; 0: they are not.
#[inline(always)]
pub const fn tunnel_of(bits: u32) -> u32 {
    bits >> STATE_TUNNEL_SHIFT
}

/// The `STATE_*` and connection bits of a state word.
#[inline(always)]
pub const fn bits_of(state: u64) -> u32 {
    state as u32
}

/// The generation of a state word.
#[inline(always)]
pub const fn generation_of(state: u64) -> u32 {
    (state >> 32) as u32
}

/// A state word of the same generation with other bits.
#[inline(always)]
pub const fn with_bits(state: u64, bits: u32) -> u64 {
    state >> 32 << 32 | bits as u64
}

/// The word by which a CPU takes an entry for a new flow: the next generation, claimed.
#[inline(always)]
pub const fn claimed(state: u64) -> u64 {
    with_bits(state.wrapping_add(1 << 32), STATE_USED | STATE_CLAIMED)
}

impl<A: Address> FlowEntry<A> {
    /// The `STATE_*` and connection bits.
    #[inline(always)]
    pub fn bits(&self) -> u32 {
        bits_of(self.state)
    }

    /// The key of a direction.
    #[inline(always)]
    pub fn key(&self, direction: u8) -> FlowKey<A> {
        if direction == DIRECTION_FORWARD { self.forward_key() } else { self.reply_key() }
    }

    /// The key under which the client's packets find the flow.
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

    /// The key under which the backend's replies find it.
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
