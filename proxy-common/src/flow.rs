//! `flows`, `flows6`, `flow_state`, `flow_state6`, `flow_hand`: connection tracking of the packet path.
//!
//! One flow is one entry of `flow_state`, which both directions share, and two keys in `flows` that point to
//! it: the packet a client sends to the frontend, and the reply of the backend. Entries are handed out by a
//! clock hand: a new flow looks at the next few entries and takes one that is free, over or expired; an
//! established flow is passed over, so that a flood of new flows cannot push it out.

use crate::Address;

/// Key of `flows`: a packet's addresses and ports as it arrives.
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

/// Value of `flows`: where the flow is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRef {
    /// Index into `flow_state`.
    pub flow: u32,
    /// The entry's generation when this key was written; another one means that the entry was reused.
    pub generation: u32,
}

/// Value of `flow_state`: one tracked flow.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Zero; fills the IPv4 entry to 64 bytes, one cache line.
    pub reserved2: [u32; 4],
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

impl<A: Address> Flow<A> {
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

/// Whether the flow was silent for longer than its state allows, at jiffies `now`.
#[inline(always)]
pub fn is_expired<A: Address>(flow: &Flow<A>, now: u32, config: &crate::config::NodeConfig) -> bool {
    now.wrapping_sub(flow.last_seen) > lifetime(flow.proto, flow.state, config)
}
