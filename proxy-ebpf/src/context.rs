//! The packet that a CPU works on: what one stage leaves to the next. Laid out as in C, since pointers to it cross
//! functions that the verifier checks alone.

use proxy_common::Address;
use proxy_common::flow::{DIRECTION_FORWARD, FlowKey};
use proxy_common::service::ServiceEntry;

use crate::frame::Route;

/// A TCP, UDP or SCTP packet, parsed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<A> {
    /// Addresses, ports and protocol; the direction is the hook's to set.
    pub key: FlowKey<A>,
    /// Offset of the transport header from the first byte of the packet; 0: it is a later fragment, and has none.
    pub l4: u32,
    /// Length of the IP packet, as its header says.
    pub length: u32,
    /// TCP's sequence number; 0 for other protocols.
    pub seq: u32,
    /// TCP's acknowledgement number, which counts where the flags say so.
    pub ack: u32,
    /// IPv4's header checksum as it stands in the packet; 0 for IPv6.
    pub ip_check: u16,
    /// TCP's flags; what comes closest for SCTP (`net::sctp::flags`, not yet there when it is parsed), 0 for UDP.
    pub tcp_flags: u16,
}

impl<A: Address> Packet<A> {
    /// A packet of which nothing is known.
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

    /// Whether it is a fragment, and not the first.
    #[inline(always)]
    pub fn is_later_fragment(&self) -> bool {
        self.l4 == 0
    }
}

/// What a packet's addresses and ports become.
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

    /// What a client's packet becomes whose replies have this key.
    #[inline(always)]
    pub fn to_backend(reply: &FlowKey<A>) -> Self {
        Self { src: reply.dst, dst: reply.src, src_port: reply.dst_port, dst_port: reply.src_port }
    }
}

/// The flow that a packet would begin.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatPlan<A> {
    /// The key of its replies.
    pub reply: FlowKey<A>,
    /// Id of its backend; 0: there is none.
    pub backend_id: u32,
    /// `STATE_*` bits of the new flow.
    pub bits: u32,
    /// The hash of `reply`.
    pub reply_hash: u64,
}

/// Bytes of a packet that a refusal quotes in part; a power of two, and enough for IP options and the ports.
pub const QUOTE: usize = 128;

/// The hash of the packet's key is yet to be made.
pub const NO_HASH: u64 = 0;

/// In [`PacketCtx::tunnelled`]: the packet came encapsulated.
pub const TUNNELLED: u32 = 1 << 16;
/// In [`PacketCtx::tunnelled`]: it was encapsulated for the second time.
pub const TUNNELLED_AGAIN: u32 = 1 << 17;

/// Value of `scratch` and `scratch6`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PacketCtx<A> {
    /// The packet.
    pub packet: Packet<A>,
    /// The hash of its key, see [`FlowKey::hash`]; or [`NO_HASH`].
    pub hash: u64,
    /// The flow that it would begin.
    pub plan: NatPlan<A>,
    /// Id of the Service port that it is for, once that is known; else 0.
    pub service: u32,
    /// The stage that one program leaves to the next: a [`StepCode`](crate::step::StepCode).
    pub step: u32,
    /// [`TUNNELLED`], [`TUNNELLED_AGAIN`], and the number by which the other node knows the endpoint
    /// ([`tunnel_tag`](proxy_common::select::tunnel_tag)), if the packet came encapsulated; else 0.
    pub tunnelled: u32,
    /// Not 0: its backend is that of the previous Maglev table, not of the current one.
    pub second_chance: u32,
    /// The frontend that it is for, once it was looked up; [`ServiceEntry::NONE`]: it is for none.
    pub frontend: ServiceEntry,
    /// Where it goes, if it is to be forwarded.
    pub route: Route,
    /// The part of it that a refusal quotes.
    pub quote: [u32; QUOTE / size_of::<u32>()],
}

impl<A: Address> PacketCtx<A> {
    /// A context that no stage has written.
    pub const EMPTY: Self = Self {
        packet: Packet::EMPTY,
        hash: NO_HASH,
        plan: NatPlan { reply: Packet::EMPTY.key, backend_id: 0, bits: 0, reply_hash: 0 },
        service: 0,
        step: 0,
        tunnelled: 0,
        second_chance: 0,
        frontend: ServiceEntry::NONE,
        route: Route { ifindex: 0, family: 0, next_hop: [0; 4], macs: [0; 3], mtu: 0, resolved: 0, fresh: 0 },
        quote: [0; QUOTE / size_of::<u32>()],
    };
}
