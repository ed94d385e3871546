//! Passive ejection: the failures of endpoints, and whether a refusal reaches the client.

use std::net::IpAddr;

use proxy_common::health::Failure;
use proxy_common::reason::Reason;

use super::Model;
use super::flow::{From, half};
use super::parse::Segment;
use super::rules::timeout;
use crate::forge::{ACK, RST, SYN};
use crate::scenario::Service;

/// What connections have shown about an endpoint for all clients.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// The client of the first refusal in a row.
    first: Option<IpAddr>,
    /// Whether two clients in a row were refused.
    is_ejected: bool,
    /// Number of earlier ejections.
    ejections: u32,
    /// Time of the last refusal that counts.
    at: u64,
    /// Time of an answer after which there was no refusal.
    answered: Option<u64>,
}

/// A failure of one client's connections to an endpoint.
#[derive(Clone, Debug)]
pub struct Skip {
    at: u64,
    failure: Failure,
    /// Number of times that the client has failed again.
    again: u32,
}

impl Health {
    fn span(&self) -> u64 {
        timeout::EJECTION << self.ejections
    }
}

impl Skip {
    fn span(&self) -> u64 {
        timeout::EJECTION << (1 + 2 * self.again).min(6)
    }
}

impl Model {
    /// Whether an endpoint is out of use for all clients.
    fn is_out(&self, endpoint: u32) -> bool {
        self.health
            .get(&endpoint)
            .is_some_and(|health| health.is_ejected && self.now - health.at < health.span())
    }

    /// Whether a client skips an endpoint because of a failure that counts.
    fn is_skipped(&self, endpoint: u32, client: IpAddr, counts: impl Fn(Failure) -> bool) -> bool {
        let has_answered = self.health.get(&endpoint).is_some_and(|health| health.answered.is_some());
        self.skips.get(&(endpoint, client)).is_some_and(|skip| {
            let is_void = skip.failure == Failure::Refusal && has_answered;
            !is_void && counts(skip.failure) && self.now - skip.at < skip.span()
        })
    }

    /// Whether a client skips an endpoint, as long as there is another one.
    pub(super) fn is_ejected(&self, endpoint: u32, client: IpAddr) -> bool {
        self.is_out(endpoint) || self.is_skipped(endpoint, client, |_| true)
    }

    /// Whether session affinity may leave an endpoint: silence is no reason.
    pub(super) fn refuses(&self, endpoint: u32, client: IpAddr) -> bool {
        self.is_out(endpoint) || self.is_skipped(endpoint, client, |failure| failure != Failure::Silence)
    }

    /// Whether an endpoint has answered lately, and the client does not skip it.
    pub(super) fn works(&self, endpoint: u32, client: IpAddr) -> bool {
        let answered = self.health.get(&endpoint).and_then(|health| health.answered);
        answered.is_some_and(|at| self.now - at < timeout::ANSWER)
            && !self.is_skipped(endpoint, client, |_| true)
    }

    /// Notes that a connection of the flow's client has failed.
    pub(super) fn has_failed(&mut self, at: usize, failure: Failure) {
        let (now, flow) = (self.now, &self.flows[at]);
        let (client, service, endpoint) = (flow.client.ip(), flow.service, flow.backend_id);
        let new = Skip { at: now, failure, again: 0 };
        match self.skips.get_mut(&(endpoint, client)) {
            Some(skip) if now - skip.at >= skip.span() + timeout::TRIAL => *skip = new,
            Some(skip) if now - skip.at < skip.span() => {
                if failure as u32 > skip.failure as u32 {
                    (skip.at, skip.failure) = (now, failure);
                }
            }
            Some(skip) => {
                *skip = Skip { again: (skip.again + 1).min(3), ..new };
                self.reach("a client that fails again");
            }
            None => {
                self.skips.insert((endpoint, client), new);
            }
        }
        if failure == Failure::Refusal {
            self.has_refused(endpoint, client, service);
        }
    }

    fn has_refused(&mut self, endpoint: u32, client: IpAddr, service: u32) {
        let now = self.now;
        let health = self.health.entry(endpoint).or_default();
        health.answered = None;
        if now - health.at >= health.span() + timeout::TRIAL {
            *health = Health::default();
        }
        if health.is_ejected {
            if now - health.at >= health.span() {
                let ejections = (health.ejections + 1).min(5);
                *health = Health { first: Some(client), ejections, at: now, ..Health::default() };
            }
            return;
        }
        health.at = now;
        if *health.first.get_or_insert(client) != client {
            health.is_ejected = true;
            self.reach("an endpoint that two clients eject");
            self.count(Reason::EndpointEjected, service);
        }
    }

    /// Notes that an endpoint has answered. The time is noted once a second.
    fn has_answered(&mut self, endpoint: u32) {
        let health = self.health.entry(endpoint).or_default();
        let known = health.answered.filter(|at| self.now - at < timeout::ANSWER_NOTED);
        *health = Health { answered: Some(known.unwrap_or(self.now)), ..Health::default() };
    }

    /// Processes the first answer to a flow. Returns whether it is a refusal that is dropped.
    pub(super) fn is_dropped_refusal(&mut self, at: usize, segment: &Segment) -> bool {
        let flow = &self.flows[at];
        if !flow.waits() {
            return false;
        }
        if segment.flags & (SYN | ACK) == SYN | ACK {
            let (endpoint, client) = (flow.backend_id, flow.client.ip());
            self.has_answered(endpoint);
            // The next failure is the first one again, unless the connection began before the last one.
            let now = self.now;
            self.skips.retain(|pair, skip| *pair != (endpoint, client) || now - skip.at < skip.span());
            return false;
        }
        let noted = flow.state.seq[From::Client as usize].unwrap_or_default();
        segment.flags & (RST | ACK | SYN) == RST | ACK
            && !segment.has_options
            && half(segment.ack).wrapping_sub(noted) <= 1
            && self.drops_refusal(at, Failure::Refusal)
    }

    /// Notes that the endpoint refuses the flow's connection. Returns whether the refusal is dropped: once for a connection,
    /// and only if another endpoint has answered lately.
    pub(super) fn drops_refusal(&mut self, at: usize, failure: Failure) -> bool {
        self.has_failed(at, failure);
        let flow = &self.flows[at];
        let (client, refuser, service) = (flow.client.ip(), flow.backend_id, flow.service);
        let is_local = |service: &Service| service.is_local(flow.outside);
        let found = self.service(flow.frontend, flow.proto).filter(|found| found.id == service);
        let others = found.filter(|service| service.ejects()).is_some_and(|service| {
            let mut others = service.extent(is_local(service));
            others.any(|e| e.serves && e.id != refuser && self.works(e.id, client))
        });
        let drops = others && !self.flows[at].is_last;
        let flow = &mut self.flows[at];
        if drops {
            flow.state.has_unanswered_syn = true;
            self.count(Reason::RefusalDropped, service);
        } else {
            flow.is_watched = false;
            self.reach("a refusal that reaches the client");
            if others {
                self.reach("the second refusal of a connection");
            }
        }
        drops
    }
}
