//! Passive ejection: the failures of endpoints, and whether a refusal reaches the client.

use std::net::IpAddr;

use proxy_common::reason::Reason;

use super::Model;
use super::flow::{From, half};
use super::parse::Segment;
use super::rules::timeout;
use crate::forge::{ACK, RST, SYN};
use crate::scenario::Service;

/// The failures of an endpoint since it last answered.
#[derive(Clone, Debug)]
pub struct Health {
    /// The clients of the consecutive failures: two clients eject the endpoint for all clients.
    clients: Vec<IpAddr>,
    /// Time of the last failure that counts.
    at: u64,
    /// Number of earlier ejections.
    ejections: u32,
    /// Number of times that the only client has failed again.
    again: u32,
}

impl Health {
    fn span(&self) -> u64 {
        let doublings =
            if self.clients.len() == 1 { self.ejections.max(2 * self.again) } else { self.ejections };
        timeout::EJECTION << doublings
    }
}

impl Model {
    /// Whether a client skips an endpoint, as long as there is another one.
    pub(super) fn is_ejected(&self, endpoint: u32, client: IpAddr) -> bool {
        self.health.get(&endpoint).is_some_and(|health| {
            let concerns = health.clients.len() > 1 || health.clients.contains(&client);
            concerns && self.now - health.at < health.span()
        })
    }

    /// Notes that a connection of the flow's client has failed.
    pub(super) fn has_failed(&mut self, at: usize) {
        let (now, flow) = (self.now, &self.flows[at]);
        let (client, service) = (flow.client.ip(), flow.service);
        let new = Health { clients: Vec::new(), at: now, ejections: 0, again: 0 };
        let health = self.health.entry(flow.backend_id).or_insert_with(|| new.clone());
        if now - health.at >= health.span() + timeout::TRIAL {
            *health = new;
        }
        let is_over = now - health.at >= health.span();
        match health.clients.as_slice() {
            [one] if *one != client => {
                health.clients.push(client);
                (health.at, health.again) = (now, 0);
                self.reach("an endpoint that two clients eject");
                self.count(Reason::EndpointEjected, service);
            }
            [_] | [_, _] if !is_over => {}
            [_] => {
                (health.at, health.again) = (now, (health.again + 1).min(3));
                self.reach("a client that fails again");
            }
            clients => {
                health.ejections = (health.ejections + u32::from(clients.len() == 2)).min(5);
                (health.clients, health.at) = (vec![client], now);
            }
        }
    }

    /// Processes the first answer to a flow. Returns whether it is a refusal that is dropped.
    pub(super) fn is_dropped_refusal(&mut self, at: usize, segment: &Segment) -> bool {
        let flow = &self.flows[at];
        if !flow.waits() {
            return false;
        }
        if segment.flags & (SYN | ACK) == SYN | ACK {
            self.health.remove(&flow.backend_id);
            return false;
        }
        let noted = flow.state.seq[From::Client as usize].unwrap_or_default();
        segment.flags & (RST | ACK | SYN) == RST | ACK
            && half(segment.ack).wrapping_sub(noted) <= 1
            && self.drops_refusal(at)
    }

    /// Notes that the endpoint refuses the flow's connection. Returns whether the refusal is dropped: only if another
    /// endpoint can get the connection.
    pub(super) fn drops_refusal(&mut self, at: usize) -> bool {
        self.has_failed(at);
        let flow = &self.flows[at];
        let (client, refuser, service) = (flow.client.ip(), flow.backend_id, flow.service);
        let is_local = |service: &Service| service.is_local(flow.outside);
        let found = self.service(flow.frontend, flow.proto).filter(|found| found.id == service);
        let others = found.filter(|service| service.ejects(is_local(service))).is_some_and(|service| {
            let mut others = service.extent(is_local(service));
            others.any(|e| e.serves && e.id != refuser && !self.is_ejected(e.id, client))
        });
        let flow = &mut self.flows[at];
        if others {
            flow.state.rst[From::Backend as usize] = true;
            self.count(Reason::RefusalDropped, service);
        } else {
            flow.is_watched = false;
            self.reach("a refusal that reaches the client");
        }
        others
    }
}
