//! Endpoints that fail are skipped: what clients have met, and whether a refusal reaches them.

use std::net::IpAddr;

use proxy_common::reason::Reason;

use super::Model;
use super::flow::{From, half};
use super::parse::Segment;
use super::rules::timeout;
use crate::forge::{ACK, RST, SYN};
use crate::scenario::Service;

/// What has failed of an endpoint since it answered last.
#[derive(Clone, Debug)]
pub struct Health {
    /// The clients of the failures in a row: two eject it for all.
    clients: Vec<IpAddr>,
    /// When the last one that counts was.
    at: u64,
    /// How often it was ejected before.
    ejections: u32,
    /// How often the only client has failed again.
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

    /// A connection of the flow's client has failed.
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

    /// The first answer to a flow. Gives whether it is a refusal that is dropped.
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

    /// An endpoint refuses the flow's connection: that is dropped while another one can have it.
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
