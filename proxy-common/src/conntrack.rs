//! The connection state machine of the packet path: how the state of a flow changes with each packet, how long it may be
//! silent, and when a new flow may take its entry. Pure: the programs, the agent's commands and the tests share it.
//!
//! The yardstick is `nf_conntrack`; `docs/datapath.md` lists where this one differs, and why.

use crate::config::NodeConfig;
use crate::flow::{
    DIRECTION_FORWARD, FlowEntry, STATE_CLAIMED, STATE_COUNTS, STATE_SYN, STATE_WATCHED, bits_of, tunnel_of,
};
use crate::{PROTO_TCP, PROTO_UDP};

/// The backend has answered (`IPS_SEEN_REPLY`).
pub const SEEN_REPLY: u32 = 1 << 8;
/// The client has answered the answer; UDP: packets of both directions are more than [`UDP_STREAM_SECS`] apart
/// (`IPS_ASSURED`). Such a flow is never evicted.
pub const ASSURED: u32 = 1 << 9;
/// The client has sent FIN.
pub const FIN_CLIENT: u32 = 1 << 10;
/// The backend has sent FIN.
pub const FIN_BACKEND: u32 = 1 << 11;
/// The client has sent RST, and nothing since.
pub const RST_CLIENT: u32 = 1 << 12;
/// The backend has sent RST, and nothing since.
pub const RST_BACKEND: u32 = 1 << 13;
/// [`FlowEntry::seq`] holds a number of the client.
pub const SEQ_CLIENT: u32 = 1 << 14;
/// It holds one of the backend.
pub const SEQ_BACKEND: u32 = 1 << 15;
/// The last packet was a SYN on an assured flow, and the flow had been silent before: see [`SYN_ANSWER`].
pub const SYN_UNANSWERED: u32 = 1 << 16;

/// Parts of a second for which the backend of an assured flow may take its time to answer a SYN: Linux answers no more than
/// two such SYNs a second (`net.ipv4.tcp_invalid_ratelimit`), and clients send theirs again after one.
pub const SYN_ANSWER: u32 = 2;

const FINS: u32 = FIN_CLIENT | FIN_BACKEND;
const RSTS: u32 = RST_CLIENT | RST_BACKEND;

/// Seconds after which UDP that is answered is more than one exchange (`nf_conntrack_proto_udp.c`, `stream_ts`).
pub const UDP_STREAM_SECS: u32 = 2;

/// How far a sequence number may be from the last one that was noted, in units of 64 KiB: 16 MiB, the largest window that
/// TCP's own buffers reach (`net.ipv4.tcp_rmem`, `tcp_wmem`), and what passes in a tick of the clock.
const WINDOW: i16 = 256;

/// TCP flag bits, in the 14th byte of the header.
pub mod tcp {
    /// No more data from the sender.
    pub const FIN: u16 = 1 << 0;
    /// Begins a connection.
    pub const SYN: u16 = 1 << 1;
    /// Ends it at once.
    pub const RST: u16 = 1 << 2;
    /// The acknowledgement number counts.
    pub const ACK: u16 = 1 << 4;
}

/// The fields of a packet that the state machine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// [`DIRECTION_FORWARD`] or [`DIRECTION_REPLY`](crate::flow::DIRECTION_REPLY).
    pub direction: u8,
    /// TCP's flags; what comes closest for SCTP, 0 for UDP.
    pub tcp_flags: u16,
    /// Upper half of TCP's sequence number.
    pub seq: u16,
    /// Upper half of TCP's acknowledgement number; it counts where the flags say so.
    pub ack: u16,
}

/// What a segment of TCP means for its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The bits of the flow from now on.
    pub bits: u32,
    /// The segment is a RST or FIN out of the window, and does not count.
    pub out_of_window: bool,
}

/// The bits of a flow after a segment. `seq`: what was noted of both sides ([`FlowEntry::seq`]); `age`: jiffies since the
/// flow began.
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
        // The receiver decides (RFC 5961, 3.2). An answer it is, whatever it says.
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
    }
    Change { bits: next, out_of_window: false }
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

/// The bits of a flow whose packets are encapsulated (DSR), after a client's segment. Answers pass this node by, so the client's
/// own segments have to tell: an ACK acknowledges an answer, and a FIN is the last that this node is sure to see. Such a flow is
/// never assured, since a forged ACK looks the same: it may be evicted, and then the selection is repeated.
#[inline(always)]
pub const fn one_sided(bits: u32, tcp_flags: u16) -> u32 {
    let mut next = bits & !ASSURED;
    if tcp_flags & (tcp::ACK | tcp::SYN | tcp::RST) == tcp::ACK {
        next |= SEEN_REPLY;
    }
    if tcp_flags & tcp::FIN != 0 && bits & FIN_CLIENT != 0 {
        next |= FIN_BACKEND;
    }
    next
}

/// Whether it is a flow of connections whose packets are encapsulated, and the client has answered: see [`one_sided`].
#[inline(always)]
const fn is_one_sided(bits: u32) -> bool {
    tunnel_of(bits) != 0 && bits & SEEN_REPLY != 0
}

/// Whether a segment may begin a connection: as in `nf_conntrack`, which takes a SYN, or an ACK out of the middle of one
/// (`nf_conntrack_tcp_loose`).
#[inline(always)]
pub const fn may_begin(tcp_flags: u16) -> bool {
    let flags = tcp_flags & (tcp::SYN | tcp::ACK | tcp::FIN | tcp::RST);
    flags == tcp::SYN || flags == tcp::ACK
}

/// The bits of a flow after a packet, with [`SYN_UNANSWERED`] as it is then. `is_syn`: it is a client's SYN; `silent`: jiffies
/// since the packet before.
#[inline(always)]
pub const fn with_syn(bits: u32, is_syn: bool, silent: u32, hz: u32) -> u32 {
    if !is_syn {
        bits & !SYN_UNANSWERED
    } else if bits & ASSURED != 0 && silent > hz / SYN_ANSWER {
        bits | SYN_UNANSWERED
    } else {
        bits
    }
}

/// Whether a SYN ends an assured flow whose backend or Service has left: only if the SYN before it got no answer. The first
/// SYN may be forged. A backend that is alive answers a forged SYN with a challenge ACK (RFC 5961, 4), and the next segment of
/// either side clears the bit.
#[inline(always)]
pub const fn is_syn_unanswered(bits: u32, silent: u32, hz: u32) -> bool {
    bits & SYN_UNANSWERED != 0 && silent > hz / SYN_ANSWER
}

/// Whether passive ejection still waits for the first reply of the backend to this flow.
#[inline(always)]
pub const fn is_watched(bits: u32) -> bool {
    bits & (STATE_SYN | STATE_WATCHED | SEEN_REPLY | RST_BACKEND) == STATE_SYN | STATE_WATCHED
}

/// Whether the client's SYN has not been answered in the time after which clients send it again.
#[inline(always)]
pub const fn is_unanswered(bits: u32, silent: u32, hz: u32) -> bool {
    is_watched(bits) && silent > hz / SYN_ANSWER
}

/// Whether a reset is the answer to the SYN whose upper half of the sequence number is `syn`: it acknowledges the SYN (RFC 9293,
/// 3.10.7.1). Who does not see the SYN has to guess: a forged one passes with a chance of 2 in 65,536.
#[inline(always)]
pub const fn refuses_syn(tcp_flags: u16, ack: u16, syn: u16) -> bool {
    tcp_flags & (tcp::RST | tcp::ACK | tcp::SYN) == tcp::RST | tcp::ACK && ack.wrapping_sub(syn) <= 1
}

/// How far `number` is ahead of `noted`.
#[inline(always)]
fn ahead(number: u16, noted: u16) -> i16 {
    number.wrapping_sub(noted).cast_signed()
}

#[inline(always)]
fn is_near(number: u16, noted: u16) -> bool {
    let distance = ahead(number, noted);
    (-WINDOW..=WINDOW).contains(&distance)
}

/// Whether a segment can be its sender's: by its own sequence number, or, if none was noted, by what it acknowledges.
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

/// Whether a client that cannot see the backend's answer could not have sent this: with a forged source, it has to guess.
#[inline(always)]
fn acknowledges_reply(bits: u32, ack: u16, [_, backend]: [u16; 2]) -> bool {
    let distance = ahead(ack, backend);
    bits & SEQ_BACKEND == 0 || (0..=WINDOW).contains(&distance)
}

/// What is noted of both sides' sequence numbers after a segment of TCP that is not out of the window: the numbers, and the
/// bits of the flow.
///
/// A number moves only to one that is near it, or with an acknowledgement that is near the other side's: who cannot see the
/// connection cannot move it and then reset the connection. A backend's answer to a SYN tells both numbers of a connection
/// that takes the place of an older one.
#[inline(always)]
pub fn noted(bits: u32, segment: Segment, [client, backend]: [u16; 2]) -> ([u16; 2], u32) {
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

/// Whether both ends are done with the flow, or one has reset it: a new SYN may begin another one on the same ports.
#[inline(always)]
pub const fn is_closed(bits: u32) -> bool {
    bits & RSTS != 0 || bits & FINS == FINS
}

/// Whether the backend's number of open connections includes the flow. Only the CPU whose compare-and-exchange of the bits changes
/// this result changes the number.
#[inline(always)]
pub const fn is_counted(bits: u32) -> bool {
    bits & STATE_COUNTS != 0 && !is_closed(bits)
}

/// Whether one end is done with the flow.
#[inline(always)]
pub const fn is_half_closed(bits: u32) -> bool {
    bits & FINS != 0
}

/// How long a flow in this state may stay silent, in jiffies.
#[inline(always)]
pub fn timeout(proto: u8, bits: u32, config: &NodeConfig) -> u32 {
    if proto == PROTO_UDP {
        if bits & ASSURED != 0 { config.udp_stream } else { config.udp }
    } else if bits & RSTS != 0 {
        config.tcp_close
    } else if bits & FINS == FINS {
        config.tcp_time_wait
    } else if bits & ASSURED == 0 && !is_one_sided(bits) {
        if bits & SEEN_REPLY == 0 { config.tcp_syn_sent } else { config.tcp_syn_recv }
    } else if bits & FINS != 0 {
        config.tcp_close_wait
    } else {
        config.tcp_established
    }
}

/// Whether the flow was silent for longer than its state allows, at jiffies `now`. Another CPU may have seen it a moment
/// after `now` was read: that is no silence of 49 days.
#[inline(always)]
pub fn is_expired(proto: u8, bits: u32, last_seen: u32, now: u32, config: &NodeConfig) -> bool {
    let silent = now.wrapping_sub(last_seen);
    silent > timeout(proto, bits, config) && silent.wrapping_neg() > config.hz
}

/// How long the end that closed first keeps a connection's ports, in seconds: `TCP_TIMEWAIT_LEN` (60 s) of
/// `include/net/tcp.h`; the kernel's timers of that length may be late by 512 jiffies at 100 Hz, by 4096 at 1000 Hz
/// (`kernel/time/timer.c`); and clocks tick apart.
const TIME_WAIT_SECS: u32 = 60 + 6;

/// Whether the backend may still be in `TIME_WAIT`, after both ends have closed: it would answer a SYN from the same source
/// port with an ACK, unless it knows that the SYN is newer.
#[inline(always)]
pub fn in_time_wait(proto: u8, bits: u32, last_seen: u32, now: u32, hz: u32) -> bool {
    let silent = now.wrapping_sub(last_seen);
    proto == PROTO_TCP
        && bits & (FINS | RSTS) == FINS
        && (silent <= hz * TIME_WAIT_SECS || silent.wrapping_neg() <= hz)
}

/// The eviction priority of an entry that must not be taken.
pub const KEEP: u32 = 6;

/// The order in which a new flow takes entries, the lowest first; [`KEEP`]: never. Without branches at the end: each would
/// double what the verifier walks through. `opaque` hides a number from the compiler, which would make branches of it.
///
/// 0 free; 1 expired; 2 closed; then what is not assured: 3 answered, and silent for a second; 4 not answered, and silent
/// for a second; 5 seen in the last second, or encapsulated (DSR) and acknowledged. So a flood of new flows pushes out flows of the flood, the oldest first.
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
    // The sign of a difference.
    let silent = i64::from(now.wrapping_sub(last_seen).cast_signed()).cast_unsigned();
    let is_silent = (opaque(u64::from(config.hz).wrapping_sub(silent)) >> 63) as u32;
    let replied = bits >> SEEN_REPLY.trailing_zeros() & 1;
    let assured = bits >> ASSURED.trailing_zeros() & 1;
    // One that is encapsulated cannot be assured: it counts as seen just now.
    let is_silent = is_silent & !(opaque(u64::from(is_one_sided(bits))) as u32);
    assured * KEEP + (1 - assured) * (5 - is_silent * (1 + replied))
}

impl<A> FlowEntry<A> {
    /// [`is_expired`], of a copy of the entry.
    pub fn is_expired(&self, now: u32, config: &NodeConfig) -> bool {
        is_expired(self.proto, bits_of(self.state), self.last_seen, now, config)
    }
}

#[cfg(test)]
mod tests;
