//! Packets that are sent directly to an endpoint while a flow has the client's port: their answers would be taken for the
//! flow's. As in netfilter, the second of two connections with one reply tuple gets another source port. The same holds for
//! packets that leave with the node's address, which netfilter may have masqueraded.

use std::net::SocketAddr;

use super::flow::{Flow, From, Kind, State, half};
use super::new_flow::{Keeps, choice};
use super::parse::Segment;
use super::rewrite::translated;
use super::{Met, Model, Must};
use crate::forge::{ACK, FIN, RST, SYN};
use crate::scenario::{TCP, UDP};

impl Model {
    /// Processes a packet to an address and port that are no frontend.
    pub(super) fn direct(&mut self, met: &mut Met<'_>, segment: &Segment) -> Result<Must, String> {
        if segment.l4.is_none() || !self.is_backend(segment.dst, segment.proto) {
            return Ok(Must::Pass);
        }
        if let Some(at) = self.of_client(segment) {
            if self.flows[at].kind.is_snat() {
                return Ok(Must::Pass);
            }
            if self.flows[at].continues(segment.flags, self.flows[at].service, &self.scenario, self.now) {
                self.note_packet(at, From::Client, segment);
                self.reach("a packet of a direct flow");
                let flow = &self.flows[at];
                return Ok(Must::Become(translated(met.input, segment, flow.source, flow.backend)));
            }
            self.expire(at);
        }
        if segment.proto != UDP && !segment.opens() {
            return Ok(Must::Pass);
        }
        let reply = Segment { src: segment.dst, dst: segment.src, ..segment.clone() };
        let Some(at) = self.of_backend(&reply) else { return Ok(Must::Pass) };
        if self.flows[at].kind.is_snat() {
            return Ok(Must::Pass);
        }
        if self.flows[at].kind == Kind::Direct {
            self.reach("a port that another direct connection has");
        }
        let other = &self.flows[at];
        if other.state.is_closed() && !other.is_in_time_wait(self.now) {
            self.reach("a direct packet that ends a closed flow");
            self.flows.remove(at);
            return Ok(Must::Pass);
        }
        let (service, backend_id) = (other.service, other.backend_id);
        let Some((backend, source)) = choice(met, segment) else {
            return Err("no direct flow has begun".into());
        };
        if backend != segment.dst {
            return Err(format!("a direct packet went to {backend}"));
        }
        self.may_be_source(segment, segment.dst, source, false)?;
        self.flows.push(Flow {
            proto: segment.proto,
            client: segment.src,
            frontend: segment.dst,
            backend: segment.dst,
            source,
            service,
            backend_id,
            kind: Kind::Direct,
            state: State::begin(segment),
            created: self.now,
            last_seen: self.now,
            is_watched: false,
            is_last: false,
            outside: false,
            is_tunnel: false,
            hops: 0,
            has_client: true,
        });
        self.reach("a direct flow");
        Ok(Must::Become(translated(met.input, segment, source, segment.dst)))
    }

    /// Processes an endpoint's segment that cannot be the answer to the SYN of the flow at `at`. It belongs to a direct connection
    /// of the client that is older than the flow, which is replaced. If the client has another direct connection from this port,
    /// the older one was to the Service, and its socket is in `TIME_WAIT`: the client answers it with a RST.
    pub(super) fn plan_older_connection(&mut self, met: &Met<'_>, segment: &Segment, at: usize) -> Must {
        if self.flows[at].kind.is_snat() {
            return Must::Pass;
        }
        let direct = Segment { src: segment.dst, dst: segment.src, ..segment.clone() };
        let has_direct = self.of_client(&direct).is_some();
        // An expired flow has ended, so the position may be another one.
        let Some(at) = self.of_backend(segment) else { return Must::Pass };
        if has_direct {
            self.reach("an answer of a socket in TIME_WAIT");
            let flow = &self.flows[at];
            return Must::Become(translated(met.input, segment, flow.frontend, flow.client));
        }
        let younger = self.flows.remove(at);
        // A bare ACK is the endpoint's answer to the SYN, so the client of the SYN gets it. A direct flow would not stop the client's RST.
        let is_answer = segment.is_bare_ack() && !younger.kind.is_direct();
        let must = if is_answer {
            self.reach("an answer of an older direct connection");
            Must::Become(translated(met.input, segment, younger.frontend, younger.client))
        } else {
            Must::Pass
        };
        self.flows.push(Flow {
            client: segment.dst,
            frontend: segment.src,
            source: segment.dst,
            kind: Kind::Direct,
            state: State { seq: [Some(half(segment.ack)), None], ..State::default() },
            created: self.now,
            last_seen: self.now,
            has_client: true,
            ..younger
        });
        self.reach("a direct connection that was there first");
        must
    }

    /// Processes a packet that leaves directly to an endpoint with the address and a port that are for SNAT: netfilter has
    /// chosen the source, or a process of the node.
    pub(super) fn direct_out(&mut self, met: &mut Met<'_>, segment: &Segment) -> Result<Must, String> {
        if segment.l4.is_none() {
            return Ok(Must::Pass);
        }
        if let Some(at) = self.of_client(segment) {
            if self.flows[at].continues(segment.flags, self.flows[at].service, &self.scenario, self.now) {
                self.note_packet(at, From::Client, segment);
                self.reach("a packet that leaves, of a direct flow");
                let source = self.flows[at].source;
                return Ok(shown(met, segment, source));
            }
            self.expire(at);
        }
        let opens = segment.proto == UDP || segment.opens();
        if !opens && !matches!(segment.flags & (SYN | ACK | FIN | RST), ACK) {
            return Ok(Must::Pass);
        }
        let reply = Segment { src: segment.dst, dst: segment.src, ..segment.clone() };
        if !opens && self.of_backend(&reply).is_some() {
            return Ok(Must::Pass);
        }
        let Some((_, source)) = choice(met, segment) else {
            return if self.is_exhausted(segment.proto, segment.dst, Keeps::Assured) {
                self.reach("a packet that leaves, without a port");
                Ok(Must::Pass)
            } else {
                Err("no direct flow has begun".into())
            };
        };
        let is_taken = self.of_backend(&reply).is_some();
        self.may_be_source(segment, segment.dst, source, true)?;
        if source != segment.src && !is_taken {
            return Err(format!("{source} instead of {}, which is free", segment.src));
        }
        self.flows.push(Flow {
            proto: segment.proto,
            client: segment.src,
            frontend: segment.dst,
            backend: segment.dst,
            source,
            service: 0,
            backend_id: 0,
            kind: Kind::DirectEgress,
            state: State::begin(segment),
            created: self.now,
            last_seen: self.now,
            is_watched: false,
            is_last: false,
            outside: false,
            is_tunnel: false,
            hops: 0,
            has_client: true,
        });
        let is_moved = source != segment.src;
        self.reach(if is_moved { "a port that netfilter took, too" } else { "a port of netfilter's" });
        Ok(shown(met, segment, source))
    }

    /// Notes a packet that leaves with the address and port of a frontend and is no endpoint's reply: it belongs to a
    /// connection of the node itself, so the answers are no client's packets to the Service.
    pub(super) fn note_own_frontend(&mut self, segment: &Segment) {
        if segment.l4.is_none() {
            return;
        }
        if let Some(at) = self.of_backend(segment) {
            let state = &self.flows[at].state;
            let is_over = state.is_closed() || state.fin != [false; 2];
            let opens_again = segment.proto != UDP && segment.opens() && is_over;
            if !opens_again {
                self.note_packet(at, From::Backend, segment);
                self.reach("a packet of the node's own");
                return;
            }
            self.flows.remove(at);
        }
        let begins = if segment.proto == UDP {
            !self.scenario.other_proxy
        } else {
            matches!(segment.flags & (SYN | ACK | FIN | RST), SYN | ACK)
        };
        let is_own = self.scenario.node_addresses().contains(&segment.src.ip());
        // The remote end may already be a client of the Service with the same ports.
        let is_client = self.flows.iter().any(|flow| {
            flow.has_client
                && (flow.proto, flow.client, flow.frontend) == (segment.proto, segment.dst, segment.src)
        });
        if !begins || !is_own || is_client {
            return;
        }
        let ack = (segment.proto == TCP).then(|| half(segment.ack));
        self.flows.push(Flow {
            proto: segment.proto,
            client: segment.dst,
            frontend: segment.src,
            backend: segment.src,
            source: segment.dst,
            service: 0,
            backend_id: 0,
            kind: Kind::Own,
            state: State { replied: true, seq: [ack, None], ..State::default() },
            created: self.now,
            last_seen: self.now,
            is_watched: false,
            is_last: false,
            outside: false,
            is_tunnel: false,
            hops: 0,
            has_client: true,
        });
        self.reach("a connection of the node's own");
    }
}

/// Returns the expected packet if it leaves with this source.
fn shown(met: &Met<'_>, segment: &Segment, source: SocketAddr) -> Must {
    if source == segment.src {
        return Must::Pass;
    }
    Must::Become(translated(met.input, segment, source, segment.dst))
}
