//! `flows`, `flows6`, `flow_index`, `flow_index6`, `flow_hand`: connection tracking of the packet path.
//!
//! One flow is one entry of `flows`, which both directions share. `flow_index` leads to it from the packet that a
//! client sends to the frontend and from the reply of the backend: it is a hash table of our own in an array,
//! since a lookup in an array is no call of the kernel, and an insertion into the kernel's hash costs more than
//! all else that a new flow needs. Entries are handed out by a clock hand: a new flow looks at the next few
//! entries and takes one that is free, over or expired, or that has had no more than one exchange; an established flow
//! is passed over, so that a flood of new flows cannot push it out.

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

/// Ways of a [`Bucket`].
pub const WAYS: u32 = 15;
/// Words of a [`Bucket`]: the number of a place is so many times the bucket, and the way.
pub const PLACES: u32 = 16;

/// Value of `flow_index` and `flow_index6` (arrays that can be mapped, and so begin at a page: a bucket is one cache line; as many as
/// [`NodeConfig::flow_buckets`] says).
///
/// A way is 0, free, or: [`WAY_PENDING`], the [`tag`] of the key in [`WAY_TAG`], and the flow's number plus one in
/// [`WAY_FLOW`]. Each key has two buckets where it may stand: the second counts only once the first was full.
/// Whoever adds a key writes it as pending, looks for the same key in all ways where it may stand, and then makes
/// it valid; see `proxy-ebpf/src/flow/index.rs`.
///
/// [`NodeConfig::flow_buckets`]: crate::config::NodeConfig::flow_buckets
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The ways.
    pub ways: [u32; WAYS as usize],
    /// Not 0: keys that have this bucket first may stand in their second one.
    pub overflow: u16,
    /// Zero.
    pub reserved: u16,
}

/// Another way may turn out to hold the same key: this one does not count yet.
pub const WAY_PENDING: u32 = 1 << 31;
/// The part of the hash.
pub const WAY_TAG: u32 = 0x7f << 24;
/// The number of the flow, plus one.
pub const WAY_FLOW: u32 = (1 << 24) - 1;

/// The most flows that ways can tell apart.
pub const MAX_FLOWS: u32 = WAY_FLOW;

/// The way of a key that leads to a flow.
#[inline(always)]
pub const fn way_of(tag: u32, flow: u32) -> u32 {
    tag | (flow + 1) & WAY_FLOW
}

/// The flow that a way leads to; no flow's number if the way is free.
#[inline(always)]
pub const fn flow_of(way: u32) -> u32 {
    (way & WAY_FLOW).wrapping_sub(1)
}

/// The part of a hash that stands in a way, in its place. Never 0, so that a free way is like no key's.
#[inline(always)]
pub const fn tag(hash: u64) -> u32 {
    let [.., tags] = WAY_TAG.to_le_bytes();
    ((((hash >> 32) * tags as u64) >> 32) as u32 + 1) << WAY_TAG.trailing_zeros()
}

/// Buckets for so many flows. With four keys to a bucket in the mean, one bucket of 200,000 is ever full, and a key
/// has two chances.
pub const fn buckets_for(flows: u32) -> u32 {
    if flows <= 4 { 2 } else { flows.div_ceil(2).next_power_of_two() }
}

/// No place in the index.
pub const NO_PLACE: u32 = u32::MAX;

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
    /// A hash that nobody can predict without `seed`. The lower half chooses the bucket, the upper half is for the
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
fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
    product ^ product >> 32
}

/// Value of `flows` and `flows6`: one tracked flow.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow<A> {
    /// Address of the client.
    pub client: A,
    /// Address the client dialled.
    pub frontend: A,
    /// Address of the backend.
    pub backend: A,
    /// Source address that the backend sees; the client's own where it is kept.
    pub source: A,
    /// Port of the client.
    pub client_port: u16,
    /// Port the client dialled.
    pub frontend_port: u16,
    /// Port of the backend.
    pub backend_port: u16,
    /// Source port that the backend sees; differs from the client's after a collision.
    pub source_port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// `FLOW_*` bits; 0: the entry is free.
    pub state: u8,
    /// Zero.
    pub reserved: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// Low 32 bits of the kernel's jiffies when the flow began.
    pub created: u32,
    /// The same when its last packet passed.
    pub last_seen: u32,
    /// Raised by one with each new flow in this entry.
    pub generation: u32,
    /// Where its keys stand in the index, by direction: [`PLACES`] times the bucket, and the way; [`NO_PLACE`]:
    /// nowhere.
    pub places: [u32; 2],
    /// Their tags, as in a way.
    pub tags: [u32; 2],
}

/// The entry is in use.
pub const FLOW_USED: u8 = 1 << 0;
/// The backend has answered.
pub const FLOW_REPLIED: u8 = 1 << 1;
/// The client has sent FIN.
pub const FLOW_FIN_CLIENT: u8 = 1 << 2;
/// The backend has sent FIN.
pub const FLOW_FIN_BACKEND: u8 = 1 << 3;
/// Either has sent RST.
pub const FLOW_RESET: u8 = 1 << 4;
/// The entry is being filled: its keys are not all there yet.
pub const FLOW_CLAIMED: u8 = 1 << 5;
/// The backend sees an address of this node (SNAT): packets of both directions are sent on from where they come in.
pub const FLOW_SNAT: u8 = 1 << 6;
/// With [`FLOW_SNAT`]: the client is a process of this node, and replies go up the stack instead of on.
pub const FLOW_OWN: u8 = 1 << 7;

impl<A: Address> Flow<A> {
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

/// How long a flow in this state may stay silent, in jiffies.
#[inline(always)]
pub fn lifetime(proto: u8, state: u8, config: &crate::config::NodeConfig) -> u32 {
    if proto == crate::PROTO_TCP || proto == crate::PROTO_SCTP {
        let fins = state & (FLOW_FIN_CLIENT | FLOW_FIN_BACKEND);
        if state & FLOW_RESET != 0 || fins == FLOW_FIN_CLIENT | FLOW_FIN_BACKEND {
            config.tcp_closed
        } else if fins != 0 {
            config.tcp_closing
        } else if state & FLOW_REPLIED != 0 {
            config.tcp_established
        } else {
            config.tcp_opening
        }
    } else if state & FLOW_REPLIED != 0 {
        config.udp_replied
    } else {
        config.udp_unreplied
    }
}

/// Whether both ends are done with the flow: a new SYN may begin another one on the same ports.
#[inline(always)]
pub fn is_over(state: u8) -> bool {
    let fins = FLOW_FIN_CLIENT | FLOW_FIN_BACKEND;
    state & FLOW_RESET != 0 || state & fins == fins
}

/// Whether the flow was silent for longer than its state allows, at jiffies `now`. Another CPU may have seen it a
/// moment after `now` was read: that is no silence of 49 days.
#[inline(always)]
pub fn is_expired<A: Address>(flow: &Flow<A>, now: u32, config: &crate::config::NodeConfig) -> bool {
    let silent = now.wrapping_sub(flow.last_seen);
    silent > lifetime(flow.proto, flow.state, config) && silent.wrapping_neg() > config.hz
}

/// How long the end that closed first keeps a connection's ports, in seconds: `TCP_TIMEWAIT_LEN` (60 s) of
/// `include/net/tcp.h`; the kernel's timers of that length may be late by 512 jiffies at 100 Hz, by 4096 at 1000 Hz
/// (`kernel/time/timer.c`); and clocks tick apart.
const TIME_WAIT: u32 = 60 + 6;

/// Whether the backend may still keep the ports of this flow, which both ends have closed: a SYN from the same source
/// port would then be answered with an ACK, unless it is known to be newer.
#[inline(always)]
pub fn lingers<A: Address>(flow: &Flow<A>, now: u32, hz: u32) -> bool {
    let fins = FLOW_FIN_CLIENT | FLOW_FIN_BACKEND;
    let silent = now.wrapping_sub(flow.last_seen);
    flow.proto == crate::PROTO_TCP
        && flow.state & (fins | FLOW_RESET) == fins
        && (silent <= hz * TIME_WAIT || silent.wrapping_neg() <= hz)
}

#[cfg(test)]
mod tests;
