//! `ballast explain`: computes what would happen to a connection, with the rules of the programs ([`proxy_common::decide`]) and
//! the tables that the programs read.

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

/// The result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The client of the connection.
    pub client: Client,
    /// The destination of the connection.
    pub destination: Destination,
    /// Result of the socket hooks.
    pub socket: Path,
    /// Result of the packet hooks.
    pub packet: Path,
}

/// Reads the maps, and returns the rendered explanation.
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

/// Applies the rules to a connection. `from` is the client's address, if it is known.
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
