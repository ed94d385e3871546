//! `ballast explain`: computes what would happen to a connection, with the rules of the programs ([`proxy_common::decide`]) and
//! the tables that the programs read.

mod choice;
mod client;
mod health;
mod outcome;
mod path;
mod render;
mod resolve;
mod walk;

use std::collections::BTreeSet;
use std::net::IpAddr;

pub use outcome::{Candidate, Decides, Path, PathOutcome, Step};
use proxy_common::Address;
use proxy_common::service::{SCOPE_INTERNAL, ServiceKey};
pub use resolve::AskPod;

use super::show::{ShowError, problems, with_problems};
use crate::config::run::node_name_or_host;
use crate::maps::view::{Rules, Transport, View};
use proxy_cli::args::observe::ExplainArgs;
use proxy_cli::question::{Client, ClientArg, Destination, DestinationArg};
use proxy_cli::selector::ServiceSelector;
use proxy_core::model::net::IpFamily;

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
    /// Which of the two decides.
    pub decides: Decides,
    /// The Services of the destination address, without ports.
    pub services: BTreeSet<String>,
    /// The ports that they have at the destination address, like `80/TCP (http)`.
    pub ports: BTreeSet<String>,
}

/// Adds the problems that the agent reports of a Service that is not programmed.
fn with_reported_problems(error: ShowError, args: &ExplainArgs) -> ShowError {
    let (ShowError::Selector(not_found), DestinationArg::Service(text, _)) = (&error, &args.destination)
    else {
        return error;
    };
    let Ok(filter) = resolve::filter(text, args.namespace.as_deref()) else { return error };
    let selector = ServiceSelector { services: vec![filter], ..ServiceSelector::default() };
    with_problems(not_found, &selector, &problems(args.agent.metrics_bind_address, &selector))
}

/// Reads the maps, and returns the rendered explanation.
pub fn answer(args: &ExplainArgs, ask: AskPod) -> Result<String, ShowError> {
    let view = View::open(&args.reader.maps.bpffs)?;
    let family = match &args.client {
        ClientArg::Known(client) => client.address().map(IpFamily::of),
        ClientArg::Pod { .. } => None,
    };
    let destination =
        resolve::destination(&args.destination, args.namespace.as_deref(), family, &view.service_names()?)
            .map_err(|error| with_reported_problems(error, args))?;
    let node = node_name_or_host(std::env::var("BALLAST_HOSTNAME_OVERRIDE").ok()).ok();
    let family = IpFamily::of(destination.to.ip());
    let client = resolve::client(
        &args.client,
        args.namespace.as_deref(),
        family,
        node.as_deref(),
        |namespace, name| ask(&args.api, namespace, name),
    )?;
    let explanation = match (destination.to.ip(), client.address()) {
        (IpAddr::V4(to), None) => explain(&view.rules::<[u8; 4]>()?, client, None, to.octets(), destination),
        (IpAddr::V6(to), None) => explain(&view.rules::<[u8; 16]>()?, client, None, to.octets(), destination),
        (IpAddr::V4(to), Some(IpAddr::V4(from))) => {
            explain(&view.rules::<[u8; 4]>()?, client, Some(from.octets()), to.octets(), destination)
        }
        (IpAddr::V6(to), Some(IpAddr::V6(from))) => {
            explain(&view.rules::<[u8; 16]>()?, client, Some(from.octets()), to.octets(), destination)
        }
        (_, Some(client)) => return Err(ShowError::Families { client, destination: destination.to }),
    };
    explanation.render(args.reader.format.output)
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
    let walk = || walk::Walk::new(rules, key, client);
    let is_here = client == Client::Host || walk().is_on_node(client, from);
    let socket = walk().socket(client, from);
    let is_left = socket.outcome == PathOutcome::Untouched;
    let packet = walk().packet(client, from, is_left);
    let decides = match (is_here, is_left) {
        (true, false) => Decides::Socket,
        (true, true) => Decides::PacketAfterSocket,
        (false, _) => Decides::Packet,
    };
    let of_address = rules.services.iter().filter(|(key, _)| key.addr == to && key.port != 0);
    let named = of_address.filter_map(|(key, entry)| Some((key, rules.common.names.get(&entry.id)?)));
    let (services, ports) = named
        .map(|(key, name)| {
            let port = if name.port.is_empty() { String::new() } else { format!(" ({})", name.port) };
            let service = format!("{}/{}", name.namespace, name.name);
            (service, format!("{}/{}{port}", key.port, Transport(key.proto)))
        })
        .unzip();
    Explanation { client, destination, socket, packet, decides, services, ports }
}

#[cfg(test)]
mod tests;
