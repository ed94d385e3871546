//! `ballast explain`: what would happen to a connection, by the rules that the programs apply
//! ([`proxy_common::decide`]) to the tables that they read.

mod choice;
mod client;
mod health;
mod path;
mod render;

use std::net::IpAddr;

use proxy_common::Address;
use proxy_common::backend::{BACKEND_LOCAL, BACKEND_TERMINATING};
use proxy_common::reason::Reason;
use proxy_common::select::Algorithm;
use proxy_common::service::{SCOPE_INTERNAL, ServiceKey};
use proxy_common::{V4, V6};
use serde::Serialize;

use super::args::eyes::ExplainArgs;
use super::question::{Client, Dialled};
use super::show::ShowError;
use crate::maps::view::{Rules, View};

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

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Who connects.
    pub client: Client,
    /// What it dials.
    pub dialled: Dialled,
    /// What the socket hooks do.
    pub socket: Path,
    /// What the packet hooks do.
    pub packet: Path,
}

/// Reads the maps, and answers.
pub fn answer(args: &ExplainArgs) -> Result<String, ShowError> {
    let view = View::open(&args.reader.bpffs)?;
    let explanation = match (args.dialled.to.ip(), args.client) {
        (IpAddr::V4(to), client @ (Client::Host | Client::Pod)) => {
            explain(&view.rules::<V4>()?, client, None, to.octets(), args.dialled)
        }
        (IpAddr::V6(to), client @ (Client::Host | Client::Pod)) => {
            explain(&view.rules::<V6>()?, client, None, to.octets(), args.dialled)
        }
        (IpAddr::V4(to), client @ Client::Address(IpAddr::V4(from))) => {
            explain(&view.rules::<V4>()?, client, Some(from.octets()), to.octets(), args.dialled)
        }
        (IpAddr::V6(to), client @ Client::Address(IpAddr::V6(from))) => {
            explain(&view.rules::<V6>()?, client, Some(from.octets()), to.octets(), args.dialled)
        }
        _ => return Err(ShowError::Families),
    };
    explanation.render(args.reader.output)
}

/// Asks the rules. `from` is the client's address, when it has one.
pub fn explain<A: Address + Into<IpAddr>>(
    rules: &Rules<A>,
    client: Client,
    from: Option<A>,
    to: A,
    dialled: Dialled,
) -> Explanation {
    let key = ServiceKey {
        addr: to,
        port: dialled.to.port(),
        proto: dialled.protocol.number(),
        scope: SCOPE_INTERNAL,
    };
    let socket = path::Walk::new(rules, key).socket(client, from);
    let is_left = socket.outcome == Outcome::Untouched;
    let packet = path::Walk::new(rules, key).packet(client, from, is_left);
    Explanation { client, dialled, socket, packet }
}

/// Flags of an endpoint, in the words of [`Candidate`].
fn flags(flags: u32) -> (bool, bool) {
    (flags & BACKEND_LOCAL != 0, flags & BACKEND_TERMINATING != 0)
}

/// How one of several endpoints is chosen, in words.
const fn manner(how: Algorithm) -> &'static str {
    match how {
        Algorithm::Random => "at random",
        Algorithm::RoundRobin | Algorithm::WeightedRoundRobin => "by turns",
        Algorithm::SourceHash => "by the client's address",
        Algorithm::DestinationHash => "by the address that is dialled",
        Algorithm::Maglev => "by a hash of addresses and ports (Maglev)",
        Algorithm::LeastConnections => "of two at random the one with fewer open connections",
        Algorithm::WeightedLeastConnections => {
            "of two at random the one with fewer open connections for its weight"
        }
        Algorithm::ShortestExpectedDelay => "of two at random the one with the shorter expected delay",
        Algorithm::NeverQueue => "of two at random an idle one, else the one with the shorter expected delay",
    }
}

#[cfg(test)]
mod tests;
