//! `ballast explain`: what would happen to a connection, by the rules that the programs apply
//! ([`proxy_common::decide`]) to the tables that they read.

mod choice;
mod client;
mod health;
mod outcome;
mod path;
mod render;
mod walk;

use std::net::IpAddr;

pub use outcome::{Candidate, Outcome, Path, Step};
use proxy_common::Address;
use proxy_common::service::{SCOPE_INTERNAL, ServiceKey};
use proxy_common::{V4, V6};

use super::args::observe::ExplainArgs;
use super::question::{Client, Destination};
use super::show::ShowError;
use crate::maps::view::{Rules, View};

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Who connects.
    pub client: Client,
    /// What it dials.
    pub destination: Destination,
    /// What the socket hooks do.
    pub socket: Path,
    /// What the packet hooks do.
    pub packet: Path,
}

/// Reads the maps, and answers.
pub fn answer(args: &ExplainArgs) -> Result<String, ShowError> {
    let view = View::open(&args.reader.maps.bpffs)?;
    let explanation = match (args.destination.to.ip(), args.client) {
        (IpAddr::V4(to), client @ (Client::Host | Client::Pod)) => {
            explain(&view.rules::<V4>()?, client, None, to.octets(), args.destination)
        }
        (IpAddr::V6(to), client @ (Client::Host | Client::Pod)) => {
            explain(&view.rules::<V6>()?, client, None, to.octets(), args.destination)
        }
        (IpAddr::V4(to), client @ Client::Address(IpAddr::V4(from))) => {
            explain(&view.rules::<V4>()?, client, Some(from.octets()), to.octets(), args.destination)
        }
        (IpAddr::V6(to), client @ Client::Address(IpAddr::V6(from))) => {
            explain(&view.rules::<V6>()?, client, Some(from.octets()), to.octets(), args.destination)
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
    destination: Destination,
) -> Explanation {
    let key = ServiceKey {
        addr: to,
        port: destination.to.port(),
        proto: destination.protocol.number(),
        scope: SCOPE_INTERNAL,
    };
    let socket = walk::Walk::new(rules, key).socket(client, from);
    let is_left = socket.outcome == Outcome::Untouched;
    let packet = walk::Walk::new(rules, key).packet(client, from, is_left);
    Explanation { client, destination, socket, packet }
}

#[cfg(test)]
mod tests;
