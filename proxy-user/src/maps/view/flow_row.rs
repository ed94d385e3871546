//! A flow of the packet path, as shown to users.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use proxy_common::flow::{STATE_DIRECT, STATE_DSR, STATE_SNAT};
use serde::Serialize;

use super::Transport;
use proxy_cli::value::seconds;
use proxy_core::model::FlowState;

/// How the packets of a flow are forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
#[serde(rename_all = "lowercase")]
pub enum Forwarding {
    /// DNAT: packets keep their source.
    Dnat,
    /// DNAT and SNAT: packets also get an address of this node as source.
    Snat,
    /// Packets are sent encapsulated to the endpoint's node, or arrive so from another node; replies go directly to the
    /// client.
    Dsr,
    /// Packets go directly to an endpoint: only their source port is translated, if at all.
    Direct,
}

impl Forwarding {
    /// Returns the word used in tables and JSON.
    pub fn label(self) -> &'static str {
        self.into()
    }

    /// Returns the forwarding by the bits of an entry.
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

/// One flow. What is skipped in JSON is a part of the identity of its Service port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowRow {
    /// Protocol of the flow.
    #[serde(skip)]
    pub protocol: Transport,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Address and port of the original destination.
    pub frontend: SocketAddr,
    /// Address and port of the endpoint.
    pub backend: SocketAddr,
    /// Source that the backend sees; equal to `client` if address and port are kept.
    pub source: SocketAddr,
    /// Id of the Service port.
    #[serde(skip)]
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// State of the flow.
    pub state: FlowState,
    /// How the packets are forwarded.
    pub forwarding: Forwarding,
    /// Time since the first packet.
    #[serde(rename = "ageSeconds", serialize_with = "seconds")]
    pub age: Duration,
    /// Time since the last packet.
    #[serde(rename = "idleSeconds", serialize_with = "seconds")]
    pub idle: Duration,
    /// Time until the flow expires if no packet comes; zero if it has expired.
    #[serde(rename = "timeoutSeconds", serialize_with = "seconds")]
    pub timeout: Duration,
}

/// Numbers of flows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Entries of `flows` in use, including expired flows.
    pub v4: u32,
    /// Entries of `flows6` in use, including expired flows.
    pub v6: u32,
    /// Flows of both families by state; states without flows are left out.
    pub states: BTreeMap<FlowState, u64>,
}

impl FlowCounts {
    /// Returns the number of flows that have not expired.
    pub fn live(&self) -> u64 {
        self.states.iter().filter(|(state, _)| **state != FlowState::Expired).map(|(_, count)| count).sum()
    }
}
