//! What a path does with a connection.

use proxy_common::reason::Reason;
use serde::Serialize;

/// A rule, and what it found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Its name, which stays.
    pub rule: &'static str,
    /// In words.
    pub found: String,
}

/// An endpoint that the connection may go to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Its id.
    pub id: u32,
    /// `10.244.1.7:8080`.
    pub address: String,
    /// It runs on this node.
    pub local: bool,
    /// It is terminating, and still serves.
    pub terminating: bool,
    /// It serves; one that does not is passed over.
    pub serves: bool,
    /// Packet path: `kept`; `dsr`, if its node gets the packet as it is; or why the endpoint sees an address of this node.
    pub source: Option<&'static str>,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At one of the endpoints.
    Forward,
    /// It is no business of this path.
    Untouched,
    /// For this reason it is not served.
    Refused(Reason),
}

impl Outcome {
    /// The word in JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Untouched => "untouched",
            Self::Refused(reason) => reason.verdict().label(),
        }
    }
}

/// What one path does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The rules in order, as far as they were asked.
    pub steps: Vec<Step>,
    /// `namespace/name:port`, when a frontend was found.
    pub service: Option<String>,
    /// Where it may go.
    pub candidates: Vec<Candidate>,
    /// How it ends.
    pub outcome: Outcome,
}
