//! The result of a path.

use proxy_common::reason::Reason;
use serde::Serialize;

/// A rule, and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Stable name of the rule.
    pub rule: &'static str,
    /// Description of the result.
    pub found: String,
}

/// An endpoint that the connection may go to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Id of the endpoint.
    pub id: u32,
    /// `10.244.1.7:8080`.
    pub address: String,
    /// The endpoint runs on this node.
    pub local: bool,
    /// The endpoint's share of new connections.
    pub weight: u32,
    /// The endpoint is terminating, and still serves.
    pub terminating: bool,
    /// The endpoint serves; an endpoint that does not serve is skipped.
    pub serves: bool,
    /// Packet path: `kept`; `netfilter` if a rule of netfilter masquerades the client; `dsr` if its node gets the packet
    /// unchanged; `own-endpoint` if the connection is refused because both ends are processes of this node; or why the endpoint
    /// sees an address of this node.
    pub source: Option<&'static str>,
}

/// The outcome of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathOutcome {
    /// The connection goes to one of the endpoints.
    Forward,
    /// The path does not concern the connection.
    Untouched,
    /// The connection is not served, for this reason.
    Refused(Reason),
}

impl PathOutcome {
    /// Returns the word in JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Untouched => "untouched",
            Self::Refused(reason) => reason.verdict().label(),
        }
    }
}

/// Which path decides about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decides {
    /// The socket hooks: the client is a process on this node, and its socket is translated or refused.
    Socket,
    /// The packet hooks, because the socket hooks leave the call of a process on this node unchanged.
    PacketAfterSocket,
    /// The packet hooks: no process on this node is known to be the client.
    Packet,
}

/// The result of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The rules that were applied, in order.
    pub steps: Vec<Step>,
    /// `namespace/name:port`, if a frontend was found.
    pub service: Option<String>,
    /// Endpoints that the connection may go to.
    pub candidates: Vec<Candidate>,
    /// The outcome.
    pub outcome: PathOutcome,
}
