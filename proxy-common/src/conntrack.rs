//! The connection tracking state machine of the packet path: how each packet changes the state of a flow, the timeouts, and
//! when a new flow may take an entry. Its functions are pure: the programs, the agent's commands and the tests share them.
//!
//! The reference is `nf_conntrack`; `docs/datapath.md` lists the differences and their reasons.

use crate::config::NodeConfig;
use crate::flow::{
    DIRECTION_FORWARD, FlowEntry, STATE_BITS, STATE_CLAIMED, STATE_COUNTS, STATE_RESET, STATE_SYN,
    STATE_TUNNEL_SHIFT, STATE_WATCH, WATCH_LAST, bits_of, is_encapsulated,
};
use crate::{PROTO_TCP, PROTO_UDP};

flags! {
    /// All connection bits of [`FlowEntry::state`].
    CONNECTION_BITS {
        /// The backend has answered (`IPS_SEEN_REPLY`).
        pub const SEEN_REPLY: u32 = 1 << 8;
        /// The client has acknowledged the backend's answer; UDP: the backend has answered, and a packet passed more than
        /// [`UDP_STREAM_SECS`] after the flow began (`IPS_ASSURED`). Such a flow is never evicted.
        pub const ASSURED: u32 = 1 << 9;
        /// The client has sent FIN.
        pub const FIN_CLIENT: u32 = 1 << 10;
        /// The backend has sent FIN.
        pub const FIN_BACKEND: u32 = 1 << 11;
        /// The client has sent RST, and no other segment since.
        pub const RST_CLIENT: u32 = 1 << 12;
        /// The backend has sent RST, and no other segment since.
        pub const RST_BACKEND: u32 = 1 << 13;
        /// [`FlowEntry::seq`] holds a sequence number of the client.
        pub const SEQ_CLIENT: u32 = 1 << 14;
        /// [`FlowEntry::seq`] holds a sequence number of the backend.
        pub const SEQ_BACKEND: u32 = 1 << 15;
        /// The last packet was a client's SYN, on a half-closed flow, or on an assured flow that had been silent before: see
        /// [`SYN_ANSWERS_PER_SEC`]. On an unreplied flow: the answer to the SYN was hidden from the client ([`is_hidden`]).
        pub const SYN_UNANSWERED: u32 = 1 << 16;
    }
}

const _: () = {
    assert!(CONNECTION_BITS & STATE_BITS == 0, "a flag of the flow and one of its connection share a bit");
    assert!(CONNECTION_BITS < 1 << STATE_TUNNEL_SHIFT, "a flag is in the place of the tunnel's number");
};

/// Divisor of a second: the backend of an assured flow has half a second to answer a SYN. Linux answers at most two such
/// SYNs a second (`net.ipv4.tcp_invalid_ratelimit`), and clients retransmit a SYN after one second.
pub const SYN_ANSWERS_PER_SEC: u32 = 2;

const FINS: u32 = FIN_CLIENT | FIN_BACKEND;
const RSTS: u32 = RST_CLIENT | RST_BACKEND;
/// The bits of segments that close a flow, or a half of it.
pub const CLOSES: u32 = FINS | RSTS;

/// Seconds after which an answered UDP flow is more than one exchange (`nf_conntrack_proto_udp.c`, `stream_ts`).
pub const UDP_STREAM_SECS: u32 = 2;

/// How far a sequence number may be from the last one that was noted, in units of 64 KiB: 16 MiB, which is the largest
/// window that TCP's own buffers reach (`net.ipv4.tcp_rmem`, `tcp_wmem`), and covers the data that passes in a tick.
const WINDOW: i16 = 256;

/// TCP flag bits, in the 14th byte of the header.
pub mod tcp {
    /// The sender has no more data.
    pub const FIN: u16 = 1 << 0;
    /// Opens a connection.
    pub const SYN: u16 = 1 << 1;
    /// Resets a connection.
    pub const RST: u16 = 1 << 2;
    /// The sender has no more data for now: set on the last segment of what an application writes.
    pub const PSH: u16 = 1 << 3;
    /// The acknowledgement number is valid.
    pub const ACK: u16 = 1 << 4;

    /// Whether a header with these flags has options.
    #[inline(always)]
    pub const fn has_options(flags: u16) -> bool {
        flags >> 12 > 5
    }
}

/// The fields of a packet that the state machine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// [`DIRECTION_FORWARD`] or [`DIRECTION_REPLY`](crate::flow::DIRECTION_REPLY).
    pub direction: u8,
    /// TCP flags and, in the upper four bits, the length of the header in words (RFC 9293, 3.1); the closest equivalents of the flags
    /// for SCTP, 0 for UDP.
    pub tcp_flags: u16,
    /// Upper half of TCP's sequence number.
    pub seq: u16,
    /// Upper half of TCP's acknowledgement number; valid if the flags include [`tcp::ACK`].
    pub ack: u16,
}

/// Effect of a TCP segment on its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The new bits of the flow.
    pub bits: u32,
    /// The segment is a RST or FIN out of the window, and does not close the flow.
    pub out_of_window: bool,
}

/// Returns the bits of a flow after a segment. `seq`: the noted sequence numbers of both sides ([`FlowEntry::seq`]); `age`:
/// jiffies since the flow began.
#[inline(always)]
pub fn next(proto: u8, bits: u32, segment: Segment, seq: [u16; 2], age: u32, config: &NodeConfig) -> Change {
    if proto == PROTO_UDP {
        return Change { bits: next_udp(bits, segment.direction, age, config.hz), out_of_window: false };
    }
    let Segment { direction, tcp_flags, .. } = segment;
    let forward = direction == DIRECTION_FORWARD;
    let (fin, rst) = if forward { (FIN_CLIENT, RST_CLIENT) } else { (FIN_BACKEND, RST_BACKEND) };
    let mut next = bits;
    if tcp_flags & (tcp::RST | tcp::FIN) != 0 && proto == PROTO_TCP && !in_window(bits, segment, seq) {
        // The receiver decides about the segment (RFC 5961, 3.2). From the backend, it counts as an answer in any case.
        return Change { bits: if forward { bits } else { bits | SEEN_REPLY }, out_of_window: true };
    }
    if tcp_flags & tcp::RST != 0 {
        next |= rst;
    } else {
        // A sender that continues has not reset the connection.
        next &= !rst;
        if tcp_flags & tcp::FIN != 0 {
            next |= fin;
        }
        let acknowledges = forward
            && bits & SEEN_REPLY != 0
            && tcp_flags & (tcp::ACK | tcp::SYN) == tcp::ACK
            && (proto != PROTO_TCP || acknowledges_reply(bits, segment.ack, seq));
        if acknowledges {
            next |= ASSURED;
        }
    }
    if !forward {
        next |= SEEN_REPLY;
        if begins_again(bits, tcp_flags) {
            next &= !(FINS | RSTS);
        }
    }
    Change { bits: next, out_of_window: false }
}

/// Whether a backend's segment accepts a new connection on the ports of a flow that was not closed: a SYN-ACK, directly
/// after the client's SYN (`nf_conntrack_proto_tcp.c`, the SYN that was ignored). FIN and RST of the old connection do not
/// count for the new one.
#[inline(always)]
const fn begins_again(bits: u32, tcp_flags: u16) -> bool {
    bits & SYN_UNANSWERED != 0 && tcp_flags & (tcp::SYN | tcp::ACK | tcp::RST) == tcp::SYN | tcp::ACK
}

#[inline(always)]
fn next_udp(bits: u32, direction: u8, age: u32, hz: u32) -> u32 {
    let mut next = bits;
    if direction != DIRECTION_FORWARD {
        next |= SEEN_REPLY;
    }
    if next & SEEN_REPLY != 0 && age > hz * UDP_STREAM_SECS && age.cast_signed() > 0 {
        next |= ASSURED;
    }
    next
}

/// Returns the bits of a flow whose packets are encapsulated (DSR), after a client's segment. Replies do not pass this
/// node, so only the client's segments tell the state: an ACK acknowledges a reply, and a FIN counts for both sides, since
/// it is the last segment that this node is sure to see. Such a flow is never assured, since a forged ACK looks the same:
/// it may be evicted, and then the selection is repeated.
#[inline(always)]
pub const fn next_dsr(bits: u32, tcp_flags: u16) -> u32 {
    let mut next = bits & !ASSURED;
    if tcp_flags & (tcp::ACK | tcp::SYN | tcp::RST) == tcp::ACK {
        next |= SEEN_REPLY;
    }
    if tcp_flags & tcp::FIN != 0 && bits & FIN_CLIENT != 0 {
        next |= FIN_BACKEND;
    }
    next
}

/// Whether the flow's packets are encapsulated, and the client has acknowledged a reply: see [`next_dsr`].
#[inline(always)]
const fn is_dsr_replied(bits: u32) -> bool {
    is_encapsulated(bits) && bits & SEEN_REPLY != 0
}

/// Whether a segment may create a flow. As in `nf_conntrack`, that is a SYN, or an ACK in the middle of a connection
/// (`nf_conntrack_tcp_loose`).
#[inline(always)]
pub const fn may_begin(tcp_flags: u16) -> bool {
    let flags = tcp_flags & (tcp::SYN | tcp::ACK | tcp::FIN | tcp::RST);
    flags == tcp::SYN || flags == tcp::ACK
}

/// Returns the bits of a flow after a packet, with [`SYN_UNANSWERED`] updated. `is_syn`: the packet is a client's SYN;
/// `silent`: jiffies since the previous packet.
#[inline(always)]
pub const fn with_syn(bits: u32, is_syn: bool, silent: u32, hz: u32) -> u32 {
    if !is_syn {
        bits & !SYN_UNANSWERED
    } else if is_half_closed(bits) || bits & ASSURED != 0 && silent > hz / SYN_ANSWERS_PER_SEC {
        bits | SYN_UNANSWERED
    } else {
        bits
    }
}

/// Whether a SYN ends an assured flow whose backend or Service was removed: only if the SYN before it was not answered,
/// since a single SYN may be forged. A live backend answers a forged SYN with a challenge ACK (RFC 5961, 4), and the next
/// segment of either side clears the bit.
#[inline(always)]
pub const fn is_syn_unanswered(bits: u32, silent: u32, hz: u32) -> bool {
    bits & SYN_UNANSWERED != 0 && silent > hz / SYN_ANSWERS_PER_SEC
}

/// Whether passive ejection still waits for the first reply of the backend to this flow.
#[inline(always)]
pub const fn is_watched(bits: u32) -> bool {
    bits & (STATE_SYN | SEEN_REPLY | RST_BACKEND | SYN_UNANSWERED) == STATE_SYN && bits & STATE_WATCH != 0
}

/// Whether the backend has refused the flow's connection, and the refusal was hidden from the client. The flow is not closed:
/// otherwise the retransmitted SYN might begin a flow on the same ports without meeting this one.
#[inline(always)]
pub const fn is_hidden(bits: u32) -> bool {
    let is_refused = bits & (STATE_SYN | SEEN_REPLY | SYN_UNANSWERED) == STATE_SYN | SYN_UNANSWERED;
    is_refused && bits & STATE_WATCH != 0
}

/// Seconds in which a backend to which the connection has moved may answer: a client that retransmits each second (Linux 6.5,
/// `tcp_syn_linear_timeouts`) would otherwise leave each backend whose answer takes longer, and get that of the previous one.
const MOVED_ANSWERS_SECS: u32 = 3;

/// Whether the SYN of a watched flow has been unanswered for so long that the next SYN, a retransmission, selects another backend.
/// `silent` and `age`: ticks since the last packet, and since the flow began.
#[inline(always)]
pub const fn is_unanswered(bits: u32, silent: u32, age: u32, hz: u32) -> bool {
    let has_moved = bits & STATE_WATCH == WATCH_LAST;
    is_watched(bits) && silent > hz / SYN_ANSWERS_PER_SEC && (!has_moved || age > MOVED_ANSWERS_SECS * hz)
}

/// Returns how many ticks ago `then` was; 0 if it is up to a minute ahead, since a reader outside of the kernel estimates `now`. Ages
/// are less than 2^32 ticks: 49 days at 1,000 a second.
pub const fn age(now: u32, then: u32, hz: u32) -> u32 {
    if then.wrapping_sub(now) <= 60 * hz { 0 } else { now.wrapping_sub(then) }
}

/// Whether a RST answers the SYN whose sequence number has the upper half `syn`: it acknowledges the SYN (RFC 9293,
/// 3.10.7.1). An attacker that does not see the SYN has to guess: a forged RST is accepted with a probability of 2 in
/// 65,536.
///
/// A closed port sends no options. A RST with options is the answer of a server that works: with MPTCP's option, it does not know
/// the connection that the client wants to join (`net/mptcp/subflow.c`, `subflow_check_req`).
#[inline(always)]
pub const fn refuses_syn(tcp_flags: u16, ack: u16, syn: u16) -> bool {
    tcp_flags & (tcp::RST | tcp::ACK | tcp::SYN) == tcp::RST | tcp::ACK
        && !tcp::has_options(tcp_flags)
        && ack.wrapping_sub(syn) <= 1
}

/// Returns how far `number` is ahead of `noted`, in units of 64 KiB.
#[inline(always)]
fn ahead(number: u16, noted: u16) -> i16 {
    number.wrapping_sub(noted).cast_signed()
}

#[inline(always)]
fn is_near(number: u16, noted: u16) -> bool {
    let distance = ahead(number, noted);
    (-WINDOW..=WINDOW).contains(&distance)
}

/// Whether a segment is in its sender's window: by its sequence number or, if none was noted, by its acknowledgement
/// number.
#[inline(always)]
fn in_window(bits: u32, segment: Segment, [client, backend]: [u16; 2]) -> bool {
    let forward = segment.direction == DIRECTION_FORWARD;
    let (own, own_known) = if forward { (client, bits & SEQ_CLIENT) } else { (backend, bits & SEQ_BACKEND) };
    let (other, other_known) =
        if forward { (backend, bits & SEQ_BACKEND) } else { (client, bits & SEQ_CLIENT) };
    if own_known != 0 {
        is_near(segment.seq, own)
    } else if other_known != 0 && segment.tcp_flags & tcp::ACK != 0 {
        is_near(segment.ack, other)
    } else {
        true
    }
}

/// Whether both numbers of a TCP segment are near those of the flow. If not, the segment belongs to another connection, which
/// has the ports of this flow since this one was closed.
#[inline(always)]
pub fn has_numbers_of(bits: u32, segment: Segment, [client, backend]: [u16; 2]) -> bool {
    let forward = segment.direction == DIRECTION_FORWARD;
    let (own, own_bit) = if forward { (client, SEQ_CLIENT) } else { (backend, SEQ_BACKEND) };
    let (other, other_bit) = if forward { (backend, SEQ_BACKEND) } else { (client, SEQ_CLIENT) };
    let has_ack = segment.tcp_flags & tcp::ACK != 0;
    (bits & own_bit == 0 || is_near(segment.seq, own))
        && (!has_ack || bits & other_bit == 0 || is_near(segment.ack, other))
}

/// Whether the acknowledgement number shows that the client has seen the backend's answer: a client with a forged source
/// would have to guess it.
#[inline(always)]
fn acknowledges_reply(bits: u32, ack: u16, [_, backend]: [u16; 2]) -> bool {
    let distance = ahead(ack, backend);
    bits & SEQ_BACKEND == 0 || (0..=WINDOW).contains(&distance)
}

/// Whether the connection of a flow ends at the client's next request, although its backend serves (annotation
/// `ballast.io/rebalance`). After the first reply, [`STATE_WATCH`] has no other meaning.
#[inline(always)]
pub const fn is_moving(bits: u32) -> bool {
    bits & MOVES == MOVES
}

/// The bits of a flow with [`is_moving`].
pub const MOVES: u32 = STATE_RESET | STATE_WATCH | SEEN_REPLY;

/// Returns the noted sequence numbers of both sides and the bits of the flow, after a TCP segment that is not out of the
/// window.
///
/// A noted number changes only to one that is near it, or by a segment whose acknowledgement number is near the other
/// side's number: an attacker that does not see the connection cannot move the number and then reset the connection. A
/// backend's SYN-ACK sets both numbers, for a connection that replaces an older one.
#[inline(always)]
pub fn next_seq(bits: u32, segment: Segment, [client, backend]: [u16; 2]) -> ([u16; 2], u32) {
    let Segment { direction, tcp_flags, seq, ack } = segment;
    let forward = direction == DIRECTION_FORWARD;
    let has_ack = tcp_flags & tcp::ACK != 0;
    let (own, own_bit) = if forward { (client, SEQ_CLIENT) } else { (backend, SEQ_BACKEND) };
    let (other, other_bit) = if forward { (backend, SEQ_BACKEND) } else { (client, SEQ_CLIENT) };
    let is_syn = tcp_flags & tcp::SYN != 0;
    if is_syn && !forward && has_ack {
        return ([ack, seq], bits | SEQ_CLIENT | SEQ_BACKEND);
    }
    let may_move = if is_syn {
        bits & ASSURED == 0
    } else {
        bits & own_bit == 0 || is_near(seq, own) || has_ack && bits & other_bit != 0 && is_near(ack, other)
    };
    if !may_move {
        ([client, backend], bits)
    } else if forward {
        ([seq, backend], bits | SEQ_CLIENT)
    } else {
        ([client, seq], bits | SEQ_BACKEND)
    }
}

/// Whether both ends have closed the flow, or one has reset it: a new SYN may begin another flow on the same ports.
#[inline(always)]
pub const fn is_closed(bits: u32) -> bool {
    closed(bits) != 0
}

/// [`is_closed`] as 0 or 1, without branches: the verifier would walk through all that follows for each.
#[inline(always)]
const fn closed(bits: u32) -> u32 {
    (is(bits, RST_CLIENT) | is(bits, RST_BACKEND) | is(bits, FIN_CLIENT) & is(bits, FIN_BACKEND)) & 1
}

/// Returns a number whose lowest bit is the flag's; the other bits have no meaning.
#[inline(always)]
const fn is(bits: u32, flag: u32) -> u32 {
    bits >> flag.trailing_zeros()
}

/// Whether a reset of the client alone has closed an assured flow. It may be forged, and the backend then has ignored it (RFC 5961,
/// 3.2).
#[inline(always)]
pub const fn is_reset_by_client(bits: u32) -> bool {
    bits & (RSTS | ASSURED) == RST_CLIENT | ASSURED && bits & FINS != FINS
}

/// Whether the backend's number of open connections includes the flow. Only the CPU whose compare-and-exchange of the bits
/// changes this result updates the number.
#[inline(always)]
pub fn is_counted(bits: u32) -> bool {
    counted(bits) != 0
}

/// [`is_counted`] as 0 or 1, without branches.
#[inline(always)]
pub fn counted(bits: u32) -> u32 {
    is(bits, STATE_COUNTS) & !closed(bits) & 1
}

/// Not 0 if a change of the bits of a counted flow is its backend's first answer.
#[inline(always)]
pub fn first_answer(before: u32, after: u32) -> u32 {
    (after & !before) >> SEEN_REPLY.trailing_zeros() & counted(after)
}

/// Whether at least one end has closed the flow.
#[inline(always)]
pub const fn is_half_closed(bits: u32) -> bool {
    bits & FINS != 0
}

/// Returns the timeout of a flow in this state, in jiffies.
#[inline(always)]
pub fn timeout(proto: u8, bits: u32, config: &NodeConfig) -> u32 {
    if proto == PROTO_UDP {
        if bits & ASSURED != 0 { config.udp_stream } else { config.udp }
    } else if bits & RSTS != 0 {
        config.tcp_close
    } else if bits & FINS == FINS {
        config.tcp_time_wait
    } else if bits & ASSURED == 0 && !is_dsr_replied(bits) {
        if bits & SEEN_REPLY == 0 { config.tcp_syn_sent } else { config.tcp_syn_recv }
    } else if bits & FINS != 0 {
        config.tcp_close_wait
    } else {
        config.tcp_established
    }
}

/// Whether the flow was silent for longer than its timeout, at jiffies `now`. Another CPU may have updated `last_seen` just
/// after `now` was read: the negative difference must not be taken for a silence of 49 days.
#[inline(always)]
pub fn is_expired(proto: u8, bits: u32, last_seen: u32, now: u32, config: &NodeConfig) -> bool {
    let silent = now.wrapping_sub(last_seen);
    silent > timeout(proto, bits, config) && silent.wrapping_neg() > config.hz
}

/// Seconds for which the end that closed first keeps a connection's ports: `TCP_TIMEWAIT_LEN` (60 s) of
/// `include/net/tcp.h`, and a margin, since the kernel's timers of that length may be late by 512 jiffies at 100 Hz or 4096
/// at 1000 Hz (`kernel/time/timer.c`), and clocks differ.
const TIME_WAIT_SECS: u32 = 60 + 6;

/// Whether a closed flow keeps its ports from other connections. After both ends have closed, the backend may still be in
/// `TIME_WAIT`: it would answer a SYN from the same source port with an ACK, unless it knows that the SYN is newer. A RST of
/// the client may be forged ([`is_reset_by_client`]); the connection is then still open.
#[inline(always)]
pub fn keeps_ports(proto: u8, bits: u32, last_seen: u32, now: u32, hz: u32) -> bool {
    let silent = now.wrapping_sub(last_seen);
    let may_wait = proto == PROTO_TCP && bits & (FINS | RSTS) == FINS;
    (may_wait || is_reset_by_client(bits)) && (silent <= hz * TIME_WAIT_SECS || silent.wrapping_neg() <= hz)
}

/// Seconds of silence after which a half-closed flow may be evicted.
const HALF_CLOSED_SECS: u32 = 60;

/// Whether a flow was half-closed, and silent for a minute, at `silent` jiffies after its last packet: the end that has not
/// closed may be gone. Such a flow may be evicted although it is assured (`tcp_can_early_drop` of `nf_conntrack`).
#[inline(always)]
pub const fn is_abandoned(bits: u32, silent: u32, hz: u32) -> bool {
    is_half_closed(bits) && silent > hz * HALF_CLOSED_SECS && silent.wrapping_neg() > hz
}

/// Eviction priority of an entry that must not be evicted.
pub const KEEP: u32 = 7;

/// The eviction priority of a flow that is not assured and was seen in the last second.
pub const RECENT: u32 = 5;

/// Returns the eviction priority of an entry: a new flow takes the entry with the lowest one; [`KEEP`]: never. The last
/// lines have no branches, since each would double the paths that the verifier walks through. `opaque` hides a number from
/// the compiler, which would create branches otherwise.
///
/// 0 free; 1 expired; 2 closed. Of the flows that are not assured: 3 replied and silent for a second; 4 unreplied and
/// silent for a second; 5 ([`RECENT`]) seen in the last second, or encapsulated (DSR) and acknowledged by the client. So a flood of
/// new flows evicts flows of the flood, the oldest first. 6 assured, half-closed, and silent for a minute ([`is_abandoned`]).
#[inline(always)]
pub fn eviction_priority(
    proto: u8,
    state: u64,
    last_seen: u32,
    now: u32,
    config: &NodeConfig,
    opaque: impl Fn(u64) -> u64,
) -> u32 {
    let bits = bits_of(state);
    if bits == 0 {
        return 0;
    }
    if bits & STATE_CLAIMED != 0 {
        return KEEP;
    }
    if is_expired(proto, bits, last_seen, now, config) {
        return 1;
    }
    if is_closed(bits) {
        return 2;
    }
    // The sign of the difference is set if the flow was silent for a second.
    let silent = i64::from(now.wrapping_sub(last_seen).cast_signed()).cast_unsigned();
    let is_silent = (opaque(u64::from(config.hz).wrapping_sub(silent)) >> 63) as u32;
    let replied = bits >> SEEN_REPLY.trailing_zeros() & 1;
    let assured = bits >> ASSURED.trailing_zeros() & 1;
    // A flow with encapsulated packets cannot be assured: it counts as seen in the last second.
    let is_silent = is_silent & !(opaque(u64::from(is_dsr_replied(bits))) as u32);
    let half_closed = (opaque(u64::from(bits & FINS)).wrapping_neg() >> 63) as u32;
    let limit = u64::from(config.hz * HALF_CLOSED_SECS);
    let is_abandoned = half_closed & (opaque(limit.wrapping_sub(silent)) >> 63) as u32;
    assured * (KEEP - is_abandoned) + (1 - assured) * (RECENT - is_silent * (1 + replied))
}

impl<A> FlowEntry<A> {
    /// [`is_expired`] for a copy of the entry.
    pub fn is_expired(&self, now: u32, config: &NodeConfig) -> bool {
        is_expired(self.proto, bits_of(self.state), self.last_seen, now, config)
    }
}

#[cfg(test)]
mod tests;
