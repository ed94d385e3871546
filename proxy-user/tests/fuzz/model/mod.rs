//! A model of the data path, as `docs/datapath.md` describes it, over parsed packets. It is slow and shares no code with
//! the programs. Only random selections are open: the endpoint of a connection, and the source port. The model takes them
//! from the result, if they could have been selected.

pub mod answer;
mod control;
mod direct;
mod established;
pub mod flow;
mod fragment;
mod health;
mod new_flow;
pub mod parse;
pub mod rewrite;
pub mod route;
pub mod rules;
mod tunnel;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proxy_common::reason::{Reason, Verdict};

use crate::forge::{ACK, MACS, RST, SYN};
use crate::scenario::{Kind, SCTP, Scenario, Service, TCP, UDP};
use crate::target::{Context, Counters, Device, Hook, Outcome, Seen, Target};
use answer::Message;
use flow::{Flow, From};
use parse::{Parsed, Segment};
use rewrite::Expected;
use rules::timeout;

/// The expected result of a packet.
#[derive(Clone, Debug)]
pub enum Must {
    /// The packet passes unchanged.
    Pass,
    Drop,
    /// The packet passes with these bytes.
    Become(Expected),
    /// The program sends the packet with these bytes.
    Leave(Expected),
}

/// The model of the data path.
pub struct Model {
    pub scenario: Scenario,
    now: u64,
    flows: Vec<Flow>,
    fragments: BTreeMap<fragment::Key, fragment::Entry>,
    /// By client and Service: the endpoint, if it is known, and the time of its last use.
    affinity: BTreeMap<(IpAddr, u32), (Option<u32>, u64)>,
    /// Endpoints that have failed, by id.
    health: BTreeMap<u32, health::Health>,
    /// Failures of clients, by endpoint and client.
    skips: BTreeMap<(u32, IpAddr), health::Skip>,
    /// Whether a refusal of the connection that the packet opens was hidden.
    is_retried: bool,
    pub counters: Counters,
    /// Branches of the model that packets have reached.
    pub reached: BTreeSet<&'static str>,
}

/// A packet at a hook, and what the target made of it.
pub struct Met<'a> {
    pub hook: Hook,
    pub context: Context,
    pub input: &'a [u8],
    pub seen: &'a Seen,
    pub target: &'a mut dyn Target,
}

impl Model {
    pub fn new(scenario: &Scenario) -> Self {
        Self {
            scenario: scenario.clone(),
            now: 0,
            flows: Vec::new(),
            fragments: BTreeMap::new(),
            affinity: BTreeMap::new(),
            health: BTreeMap::new(),
            skips: BTreeMap::new(),
            is_retried: false,
            counters: Counters::default(),
            reached: BTreeSet::new(),
        }
    }

    pub fn pause(&mut self, milliseconds: u32) {
        self.now += u64::from(milliseconds);
    }

    /// Lets an endpoint leave its Service, or come back.
    pub fn turn(&mut self, service: usize, endpoint: usize) {
        let endpoints = self.scenario.services.get_mut(service).map(|service| &mut service.endpoints);
        if let Some(endpoint) = endpoints.and_then(|endpoints| endpoints.get_mut(endpoint)) {
            endpoint.serves = !endpoint.serves;
        }
    }

    /// Replaces a Service by another one with the same address and endpoints.
    pub fn replace(&mut self, service: usize) {
        if let Some(service) = self.scenario.services.get_mut(service) {
            service.renumber();
        }
    }

    /// Swaps the addresses of a Service and the next one, if they have the same protocol.
    pub fn swap(&mut self, service: usize) {
        if let Some([one, other]) = self.scenario.services.get_mut(service..service + 2)
            && one.proto == other.proto
        {
            std::mem::swap(&mut one.frontend, &mut other.frontend);
            std::mem::swap(&mut one.kind, &mut other.kind);
        }
    }

    /// Compares the target's result for a packet with the model's.
    pub fn check(&mut self, mut met: Met<'_>) -> Result<(), String> {
        let must = self.packet(&mut met)?;
        let (outcome, expected) = match must {
            Must::Pass => (Outcome::Next, Some(Expected::new(met.input.to_vec()))),
            Must::Drop => (Outcome::Drop, None),
            Must::Become(expected) => (Outcome::Next, Some(expected)),
            Must::Leave(expected) => (Outcome::Redirect, Some(expected)),
        };
        let is_answer = met.seen.packet.len() != met.input.len();
        // The sum is not compared if the packet is dropped, or answered out of the device on which it arrived.
        if met.seen.is_sum_wrong && outcome != Outcome::Drop && !is_answer {
            return Err("the sum over the whole packet is wrong".to_owned());
        }
        if met.seen.outcome != outcome {
            return Err(format!("{:?} instead of {outcome:?}", met.seen.outcome));
        }
        match expected {
            Some(expected) if !expected.is(&met.seen.packet) => {
                Err(format!("other bytes: should be\n{}", crate::report::hex(&expected.bytes)))
            }
            _ => Ok(()),
        }
    }

    fn reach(&mut self, branch: &'static str) {
        self.reached.insert(branch);
    }

    /// Counts a reason, and also for the Service if the Service is known.
    fn count(&mut self, reason: Reason, service: u32) {
        self.reach(reason.label());
        *self.counters.reasons.entry(reason).or_default() += 1;
        if service != 0 {
            *self.counters.refusals.entry((service, reason)).or_default() += 1;
        }
    }

    fn packet(&mut self, met: &mut Met<'_>) -> Result<Must, String> {
        let is_ingress = met.hook == Hook::Ingress;
        if is_ingress && is_for_others(met) {
            self.reach("a frame for another machine");
            return Ok(Must::Pass);
        }
        if let Some(result) = self.tunnelled(met) {
            return result;
        }
        let mut segment = match parse::parse(met.input) {
            Parsed::Hidden(dst) if self.is_nodes_or_services(dst) => {
                return Ok(self.passed_by(is_ingress, Reason::HiddenPorts));
            }
            Parsed::Foreign | Parsed::Hidden(_) => return Ok(Must::Pass),
            Parsed::Control => return Ok(self.control(met)),
            Parsed::Malformed => return Ok(self.passed_by(is_ingress, Reason::Malformed)),
            Parsed::Segment(segment) if segment.is_first => match self.first_fragment(met.input, segment) {
                Ok(segment) => segment,
                Err(reason) => return Ok(self.passed_by(is_ingress, reason)),
            },
            Parsed::Segment(segment) => segment,
            Parsed::Later(header) => match self.later_fragment(met.input, header) {
                Ok(segment) => segment,
                Err(reason) => return Ok(self.passed_by(is_ingress, reason)),
            },
        };
        if segment.is_first && segment.proto == SCTP {
            segment.flags = 0;
        }
        if is_ingress {
            return self.clients(met, &segment, false);
        }
        if let Some(must) = self.reply(met, &segment) {
            return Ok(must);
        }
        let is_nodes = self.scenario.node_addresses().contains(&segment.src.ip());
        if met.context.is_local_origin && !is_nodes {
            self.reach("a packet of a container on the LAN");
        }
        let is_ours = met.context.is_local_origin
            && is_nodes
            && (self.is_frontend(segment.dst, segment.proto) || self.scenario.is_in_range(segment.dst.ip()));
        // No test has a socket: such a segment is the last one of a connection that the socket programs may have translated.
        let is_last = segment.proto == TCP
            && segment.flags & (SYN | ACK) != SYN
            && self.is_frontend(segment.dst, segment.proto)
            && self.of_client(&segment).is_none();
        if is_ours && !is_last {
            self.reach("a packet of the node itself");
            return self.clients(met, &segment, true);
        }
        let may_share_port = Some(segment.src.ip()) == self.scenario.source()
            && self.scenario.is_snat_port(segment.src.port())
            && self.is_backend(segment.dst, segment.proto);
        if may_share_port {
            return self.direct_out(met, &segment);
        }
        if self.is_frontend(segment.src, segment.proto) {
            self.note_own_frontend(&segment);
        }
        Ok(Must::Pass)
    }

    /// Whether an address is one of this node or of a Service.
    fn is_nodes_or_services(&self, addr: IpAddr) -> bool {
        self.scenario.is_in_range(addr) || self.scenario.node_addresses().contains(&addr)
    }

    /// Processes a packet that cannot be parsed. At egress it passes, and nothing is counted.
    fn passed_by(&mut self, is_ingress: bool, reason: Reason) -> Must {
        if !is_ingress {
            return Must::Pass;
        }
        self.count(reason, 0);
        if reason.verdict() == Verdict::Drop { Must::Drop } else { Must::Pass }
    }

    /// Processes a packet that may be a client's.
    fn clients(&mut self, met: &mut Met<'_>, segment: &Segment, is_local: bool) -> Result<Must, String> {
        let (dst, proto) = (segment.dst, segment.proto);
        let is_frontend = self.is_frontend(dst, proto);
        let may_be_reply = self.scenario.is_snat_port(dst.port()) && self.is_backend(segment.src, proto);
        if !is_frontend && !may_be_reply && !self.scenario.is_in_range(dst.ip()) {
            return self.direct(met, segment);
        }
        if is_frontend
            && !segment.opens()
            && let Some(at) = self.of_client(segment)
        {
            if self.flows[at].continues(segment.flags, self.flows[at].service, &self.scenario, self.now)
                && !self.is_frontend_lost(met, segment, at)
            {
                return Ok(self.go_on(met, segment, at));
            }
            self.reach("a flow that does not go on");
            self.expire(at);
        }
        if may_be_reply
            && let Some(at) = self.of_backend(segment)
            && self.flows[at].kind.is_snat()
        {
            if self.is_dropped_refusal(at, segment) {
                return Ok(Must::Drop);
            }
            return Ok(self.snat_reply(met, segment, at));
        }
        self.new_flow(met, segment, is_local)
    }

    /// Whether a UDP flow ends because its frontend belongs to another Service. The programs check this once in each 256 ms
    /// of the clock, so only a flow that was silent for longer has certainly been checked.
    fn is_frontend_lost(&self, met: &mut Met<'_>, segment: &Segment, at: usize) -> bool {
        let service = self.service(segment.dst, segment.proto).map_or(0, |service| service.id);
        self.is_led_elsewhere(met, at, service)
    }

    /// Like `is_frontend_lost`, if the Service of the frontend is known.
    fn is_led_elsewhere(&self, met: &mut Met<'_>, at: usize, service: u32) -> bool {
        let flow = &self.flows[at];
        if flow.proto != UDP || service == flow.service || flow.kind.is_direct() {
            return false;
        }
        let went_on =
            met.target.counters().traffic.get(&flow.service) != self.counters.traffic.get(&flow.service);
        self.now - flow.last_seen >= timeout::FRONTEND || !went_on
    }

    /// Whether the destination is a frontend, or was one when the case began.
    fn is_frontend(&self, dst: SocketAddr, proto: u8) -> bool {
        self.scenario.services.iter().any(|service| {
            service.proto == proto
                && match service.kind {
                    Kind::NodePort => {
                        service.frontend.port() == dst.port()
                            && self.scenario.node_addresses().contains(&dst.ip())
                    }
                    _ => service.frontend == dst,
                }
        })
    }

    /// Returns the Service of a frontend. An address with a port comes before a node port.
    fn service(&self, dst: SocketAddr, proto: u8) -> Option<&Service> {
        let of = |service: &&Service| service.proto == proto;
        let mut services = self.scenario.services.iter().filter(of);
        let exact = services.clone().find(|s| s.kind != Kind::NodePort && s.frontend == dst);
        exact.or_else(|| {
            let is_nodes = self.scenario.node_addresses().contains(&dst.ip());
            services.find(|s| is_nodes && s.kind == Kind::NodePort && s.frontend.port() == dst.port())
        })
    }

    /// Whether a client that is no process of the node is outside: by its address, if the range of pods is known, or by its
    /// device.
    fn is_outside(&self, client: IpAddr, by_uplink: bool) -> bool {
        if self.scenario.knows_pods { !Scenario::is_pods(client) } else { by_uplink }
    }

    /// Refuses a packet for this reason.
    fn refuse(&mut self, met: &Met<'_>, segment: &Segment, service: u32, reason: Reason) -> Must {
        self.count(reason, service);
        if reason.verdict() != Verdict::Reject || segment.flags & RST != 0 {
            return Must::Drop;
        }
        self.reach("answered");
        Must::Leave(answer::answer(met.input, segment, Message::PortUnreachable))
    }

    /// Returns the flow whose client sends such a packet.
    fn of_client(&mut self, segment: &Segment) -> Option<usize> {
        let of = |flow: &Flow| {
            flow.has_client
                && (flow.proto, flow.client, flow.frontend) == (segment.proto, segment.src, segment.dst)
        };
        let at = self.flows.iter().position(of)?;
        self.in_time(at)
    }

    /// Returns the flow whose endpoint sends such a packet.
    fn of_backend(&mut self, segment: &Segment) -> Option<usize> {
        let of = |flow: &Flow| flow.has_replies(segment.proto, segment.src, segment.dst);
        let at = self.flows.iter().position(of)?;
        self.in_time(at)
    }

    /// Returns a flow unless it has expired; an expired flow ends.
    fn in_time(&mut self, at: usize) -> Option<usize> {
        if !self.flows[at].is_expired(self.now) {
            return Some(at);
        }
        self.reach("a flow whose time is over");
        self.expire(at);
        None
    }

    /// Ends a flow for its client. Its source port may have to stay in quarantine.
    fn expire(&mut self, at: usize) {
        if self.flows[at].is_quarantined(self.now) {
            self.reach("a port in quarantine");
            self.flows[at].has_client = false;
        } else {
            self.flows.remove(at);
        }
    }

    /// Updates the state of a flow for a packet. Returns `false` for a packet that does not count.
    fn note_packet(&mut self, at: usize, from: From, segment: &Segment) -> bool {
        let (proto, state) = (segment.proto, &self.flows[at].state);
        let (counts, acknowledges) = (state.counts(from, proto, segment), state.acknowledges(proto, segment));
        let now = self.now;
        let flow = &mut self.flows[at];
        let was_closed = flow.state.is_closed();
        flow.state.pass(from, proto, segment, counts, acknowledges);
        if flow.is_tunnel && from == From::Client && proto != UDP && counts {
            flow.state.sees_one_side(segment);
        }
        let is_stream = flow.state.replied && now - flow.created > timeout::UDP_EXCHANGE;
        flow.state.assured |= proto == UDP && is_stream;
        let is_clients_syn = from == From::Client && segment.opens();
        flow.state.has_unanswered_syn = is_clients_syn
            && (flow.state.has_unanswered_syn
                || flow.state.fin != [false; 2]
                || flow.state.assured && now - flow.last_seen > timeout::SYN_ANSWER);
        flow.last_seen = now;
        let (is_closed, is_assured) = (flow.state.is_closed(), flow.state.assured);
        if is_assured {
            self.reach("an assured flow");
        }
        if was_closed && !is_closed {
            self.reach("a reset that was none");
        }
        counts
    }

    /// Updates the state of a flow for a packet, and counts a packet out of the window.
    fn note_counted(&mut self, at: usize, from: From, segment: &Segment) {
        let service = self.flows[at].service;
        if !self.note_packet(at, from, segment) {
            self.count(Reason::OutOfWindow, service);
        }
    }

    fn touch(&mut self, at: usize, from: From, segment: &Segment) {
        self.note_counted(at, from, segment);
        let service = self.flows[at].service;
        let traffic = self.counters.traffic.entry(service).or_default();
        traffic.packet(from == From::Backend, segment.length());
    }
}

/// Whether the kernel takes a frame for one of another machine, or for a broadcast, which it does not forward. On other
/// devices than uplinks, a bridge may receive frames for any address.
fn is_for_others(met: &Met<'_>) -> bool {
    let Some(mac) = met.input.get(..6) else { return false };
    mac[0] & 1 == 1 || met.context.device == Device::Uplink && mac != MACS[0]
}
