//! Uses the endpoints of the Service `kubernetes` as API servers, for an agent that was given no other address.
//!
//! A pod gets the Service's cluster address. An agent that connects to this address depends on itself: its own programs
//! translate the connection to an endpoint. While all endpoints in the maps are dead, it would never learn of new ones.
//! So the endpoints that the API server reports become servers to fail over to, in addition to the configured ones. An
//! endpoint's certificate has to be valid for the configured host, since every client of the Service connects to one of
//! the endpoints: TLS verifies that name, and not the endpoint's address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::Uri;
use tracing::warn;

use super::client::Connection;
use super::connect::Address;
use super::servers::Servers;
use proxy_core::model::net::Protocol;
use proxy_core::model::{EndpointSlice, Event, Key, Listing, Object, Service, ServiceName, SliceName};

/// The name of the port of the Service and of its endpoints.
const PORT: &str = "https";

/// Follows what the API server reports about the Service `kubernetes`.
pub struct EndpointFailover {
    servers: Arc<Servers>,
    configured: Vec<Address>,
    service: ServiceName,
    /// The cluster addresses of the Service.
    addresses: BTreeSet<IpAddr>,
    slices: BTreeMap<SliceName, BTreeSet<SocketAddr>>,
    has_warned: bool,
}

impl EndpointFailover {
    /// Creates a `EndpointFailover` for this connection.
    pub fn new(connection: &Connection) -> Self {
        Self {
            servers: Arc::clone(&connection.servers),
            configured: connection.servers.list(),
            service: ServiceName::new("default", "kubernetes"),
            addresses: BTreeSet::new(),
            slices: BTreeMap::new(),
            has_warned: false,
        }
    }

    /// Handles an event of the watches.
    pub fn note(&mut self, event: &Event) {
        let is_new = match event {
            Event::Apply(Object::Service(service)) => self.note_service(service),
            Event::Reset(Listing::Services(services)) => {
                let ours = services.iter().find(|service| service.name == self.service);
                ours.is_some_and(|service| self.note_service(service))
            }
            Event::Apply(Object::Slice(slice)) => self.note_slice(slice),
            Event::Delete(Key::Slice(name)) => self.slices.remove(name).is_some(),
            Event::Reset(Listing::Slices(slices)) => {
                let known = std::mem::take(&mut self.slices);
                for slice in slices {
                    self.note_slice(slice);
                }
                self.slices != known
            }
            _ => false,
        };
        if is_new {
            self.follow();
        }
    }

    fn note_service(&mut self, service: &Service) -> bool {
        let addresses = || service.cluster_ips.iter().copied().collect();
        service.name == self.service && {
            let known = std::mem::replace(&mut self.addresses, addresses());
            known != self.addresses
        }
    }

    fn note_slice(&mut self, slice: &EndpointSlice) -> bool {
        if slice.service != self.service {
            return self.slices.remove(&slice.name).is_some();
        }
        let ports = slice.ports.iter().filter(|port| port.name == PORT && port.protocol == Protocol::Tcp);
        let serving = || slice.endpoints.iter().filter(|endpoint| endpoint.is_serving());
        let all = ports.flat_map(|port| serving().map(|at| SocketAddr::new(at.address, port.port))).collect();
        let known = self.slices.insert(slice.name.clone(), all);
        known.as_ref() != self.slices.get(&slice.name)
    }

    /// Makes the endpoints servers to fail over to, if a configured server is the Service.
    fn follow(&mut self) {
        let through = self.configured.iter().find_map(|server| self.host_of_service(&server.url));
        let Some(host) = through else { return };
        if !std::mem::replace(&mut self.has_warned, true) {
            warn!(
                server = host,
                "the API server's address is that of the Service `kubernetes`, which this agent programs itself. If all its \
                 programmed endpoints are gone when the agent starts, the agent cannot reach the API server. Give the \
                 addresses of the API servers with --master (chart: apiServer.hosts)"
            );
        }
        let wanted: BTreeSet<SocketAddr> = self.slices.values().flatten().copied().collect();
        let endpoints = wanted.into_iter().filter_map(|at| {
            Some(Address { url: format!("https://{at}").parse().ok()?, name: Some(host.clone()) })
        });
        self.servers.replace(self.configured.iter().cloned().chain(endpoints).collect());
    }

    /// Returns the host of a URL, if it is an address or a name of the Service and the scheme is `https`.
    fn host_of_service(&self, uri: &Uri) -> Option<String> {
        let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
        let is_service = match host.parse() {
            Ok(address) => self.addresses.contains(&address),
            Err(_) => host.split('.').take(2).eq(["kubernetes", "default"]),
        };
        (is_service && uri.scheme_str() == Some("https")).then(|| host.to_owned())
    }
}

#[cfg(test)]
mod tests;
