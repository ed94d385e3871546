//! The context of the packet that a CPU processes: the state that one stage passes to the next. The layout is that of C
//! (`repr(C)`), since pointers to the context are arguments of functions that the verifier checks separately.

use proxy_common::Address;
use proxy_common::flow::{DIRECTION_FORWARD, FlowKey};
use proxy_common::service::ServiceEntry;

use crate::frame::Route;

/// A parsed TCP, UDP or SCTP packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<A> {
    /// Addresses, ports and protocol; the hook sets the direction.
    pub key: FlowKey<A>,
    /// Offset of the transport header from the first byte of the packet; 0: the packet is a later fragment, without a
    /// transport header.
    pub l4: u32,
    /// Length of the IP packet in bytes, by its header.
    pub length: u32,
    /// TCP sequence number; 0 for other protocols.
    pub seq: u32,
    /// TCP acknowledgement number; valid only with the ACK flag.
    pub ack: u32,
    /// IPv4 header checksum, in network byte order; 0 for IPv6.
    pub ip_check: u16,
    /// As [`Segment::tcp_flags`](proxy_common::conntrack::Segment::tcp_flags); 0 for UDP. For SCTP, the closest TCP flags (`net::sctp::flags`), which are set only after parsing.
    pub tcp_flags: u16,
}

impl<A: Address> Packet<A> {
    /// An empty packet, before parsing.
    pub const EMPTY: Self = Self {
        key: FlowKey {
            src: A::ZERO,
            dst: A::ZERO,
            src_port: 0,
            dst_port: 0,
            proto: 0,
            direction: DIRECTION_FORWARD,
            reserved: 0,
        },
        l4: 0,
        length: 0,
        seq: 0,
        ack: 0,
        ip_check: 0,
        tcp_flags: 0,
    };

    /// Returns the tuple of an answer to the packet.
    #[inline(always)]
    pub fn back(&self) -> Tuple<A> {
        let FlowKey { src, dst, src_port, dst_port, .. } = self.key;
        Tuple { src: dst, dst: src, src_port: dst_port, dst_port: src_port }
    }

    /// Whether the packet is a fragment other than the first.
    #[inline(always)]
    pub fn is_later_fragment(&self) -> bool {
        self.l4 == 0
    }
}

/// The addresses and ports that a translation writes into a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Source port, host byte order.
    pub src_port: u16,
    /// Destination port, host byte order.
    pub dst_port: u16,
}

impl<A: Address> Tuple<A> {
    /// No addresses, no ports.
    pub const EMPTY: Self = Self { src: A::ZERO, dst: A::ZERO, src_port: 0, dst_port: 0 };

    /// Returns the tuple of a translated client packet, given the key of its replies.
    #[inline(always)]
    pub fn to_backend(reply: &FlowKey<A>) -> Self {
        Self { src: reply.dst, dst: reply.src, src_port: reply.dst_port, dst_port: reply.src_port }
    }
}

/// The translation of a new flow, before the flow exists.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatPlan<A> {
    /// Reply key of the flow.
    pub reply: FlowKey<A>,
    /// Id of the backend; 0: none.
    pub backend_id: u32,
    /// `STATE_*` bits of the new flow.
    pub bits: u32,
    /// Hash of `reply`.
    pub reply_hash: u64,
}

/// Number of bytes in the quote of an ICMP error that does not quote the whole packet; a power of two, and enough for IP
/// options and the ports.
pub const QUOTE: usize = 128;

/// Value of [`PacketCtx::hash`] before the hash is computed.
pub const NO_HASH: u64 = 0;

/// In [`PacketCtx::tunnelled`]: the packet arrived encapsulated.
pub const TUNNELLED: u32 = 1 << 16;
/// In [`PacketCtx::tunnelled`]: the first node knows the connection from its first packet.
pub const TUNNELLED_SURE: u32 = 1 << 17;
/// In [`PacketCtx::tunnelled`], the lowest bit of [`encapsulated`].
pub const TUNNELLED_HOPS_SHIFT: u32 = 18;
/// A packet is encapsulated this often at most. A flow has two bits for the number before ([`tunnel_hops`]).
///
/// [`tunnel_hops`]: proxy_common::flow::tunnel_hops
pub const MAX_HOPS: u32 = 4;

/// Returns how often a packet was encapsulated, from [`PacketCtx::tunnelled`].
#[inline(always)]
pub const fn encapsulated(tunnelled: u32) -> u32 {
    tunnelled >> TUNNELLED_HOPS_SHIFT
}

/// Value of `scratch` and `scratch6`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PacketCtx<A> {
    /// The parsed packet.
    pub packet: Packet<A>,
    /// Hash of the packet's key (see [`FlowKey::hash`]), or [`NO_HASH`].
    pub hash: u64,
    /// The flow of a backend's packet, as the first program has found it, or that of a packet that an early hook encapsulates: its
    /// number, and the generation in the upper half.
    pub found: u64,
    /// The plan of the packet's new flow.
    pub plan: NatPlan<A>,
    /// Id of the Service port that the packet is for; 0 while it is unknown.
    pub service: u32,
    /// The stage with which the next program (tail call) continues: a [`StepCode`](crate::step::StepCode).
    pub step: u32,
    /// If the packet arrived encapsulated: [`TUNNELLED`], [`TUNNELLED_SURE`], [`encapsulated`], and in the low 16 bits the
    /// endpoint's tag that the other node has sent ([`tunnel_tag`](proxy_common::select::tunnel_tag)); else 0.
    pub tunnelled: u32,
    /// Not 0: the packet is a retransmitted SYN, and a refusal of its connection was hidden. A backend that has answered
    /// lately is selected, and its refusal reaches the client.
    pub retried: u32,
    /// Not 0: the backend is that of a previous Maglev table, not of the current one; with [`LAST`](crate::select::backend::LAST), no
    /// other node is asked after that of the backend.
    pub second_chance: u32,
    /// If the packet is a later fragment: the length of the first one.
    pub first_length: u32,
    /// The frontend that the packet is for, after the lookup; [`ServiceEntry::NONE`]: none.
    pub frontend: ServiceEntry,
    /// The route, if the packet is forwarded.
    pub route: Route,
    /// The addresses of another route that a stage looks up before it decides about the packet. They are here since the BPF
    /// stack of a new flow has no room for them.
    pub other: Tuple<A>,
    /// The part of the packet that an ICMP error quotes.
    pub quote: [u32; QUOTE / size_of::<u32>()],
}

impl<A: Address> PacketCtx<A> {
    /// An empty context.
    pub const EMPTY: Self = Self {
        packet: Packet::EMPTY,
        hash: NO_HASH,
        found: u64::MAX,
        plan: NatPlan { reply: Packet::EMPTY.key, backend_id: 0, bits: 0, reply_hash: 0 },
        service: 0,
        step: 0,
        tunnelled: 0,
        retried: 0,
        second_chance: 0,
        first_length: 0,
        frontend: ServiceEntry::NONE,
        route: Route { ifindex: 0, family: 0, next_hop: [0; 4], macs: [0; 3], mtu: 0, resolved: 0, fresh: 0 },
        other: Tuple::EMPTY,
        quote: [0; QUOTE / size_of::<u32>()],
    };
}
