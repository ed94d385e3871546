//! A connection of the packet path, as it is shown.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::flow::{STATE_DIRECT, STATE_DSR, STATE_SNAT};

use super::Transport;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlowState {
    /// The backend has not answered yet.
    Unreplied,
    /// The backend has answered, and the client has not answered that; or UDP with one exchange.
    HalfOpen,
    /// Packets went both ways.
    Established,
    /// One end has closed.
    Closing,
    /// Both ends have, or one has reset.
    Closed,
    /// Silent for longer than its state allows; its entry is free to be taken.
    Expired,
}

impl FlowState {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Unreplied, Self::HalfOpen, Self::Established, Self::Closing, Self::Closed, Self::Expired];

    /// The word in tables and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unreplied => "unreplied",
            Self::HalfOpen => "half-open",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
            Self::Expired => "expired",
        }
    }
}

/// How packets of a connection are forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// Their destination is translated, and they keep their source.
    Dnat,
    /// They leave with an address of this node as source, too.
    Snat,
    /// They go encapsulated to the endpoint's node, or come so from another node; replies go directly to the client.
    Dsr,
    /// They go straight to an endpoint: only their source port is translated, if at all.
    Direct,
}

impl Forwarding {
    /// The word in tables and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Dnat => "dnat",
            Self::Snat => "snat",
            Self::Dsr => "dsr",
            Self::Direct => "direct",
        }
    }

    /// By the bits of its entry.
    pub(super) const fn of(bits: u32) -> Self {
        if bits & STATE_DIRECT != 0 {
            Self::Direct
        } else if bits & STATE_DSR != 0 {
            Self::Dsr
        } else if bits & STATE_SNAT != 0 {
            Self::Snat
        } else {
            Self::Dnat
        }
    }
}

/// One connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRow {
    /// Its protocol.
    pub protocol: Transport,
    /// Who dialled.
    pub client: SocketAddr,
    /// What was dialled.
    pub frontend: SocketAddr,
    /// Who answers.
    pub backend: SocketAddr,
    /// Whom the backend sees; the client itself where its address and port are kept.
    pub source: SocketAddr,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// How far it has come.
    pub state: FlowState,
    /// How its packets are forwarded.
    pub forwarding: Forwarding,
    /// Since its first packet.
    pub age: Duration,
    /// Since its last packet.
    pub idle: Duration,
    /// Until it expires, if no packet comes; zero when it has.
    pub timeout: Duration,
}

/// How many connections there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Entries of `flows` in use, expired ones too.
    pub v4: u32,
    /// Those of `flows6`.
    pub v6: u32,
    /// Of both, by state; those that do not occur are left out.
    pub states: BTreeMap<FlowState, u64>,
}

impl FlowCounts {
    /// Connections that are not expired.
    pub fn live(&self) -> u64 {
        self.states.iter().filter(|(state, _)| **state != FlowState::Expired).map(|(_, count)| count).sum()
    }
}
