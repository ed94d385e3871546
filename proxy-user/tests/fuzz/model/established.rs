//! Packets of known flows.

use std::net::SocketAddr;

use proxy_common::reason::Reason;

use super::answer::{Message, answer};
use super::flow::{From, Kind};
use super::parse::{Segment, is_v6};
use super::rewrite::{Expected, sent, translated};
use super::route::{is_strange, route, unreachable};
use super::tunnel::Came;
use super::{Met, Model, Must};
use crate::forge::ETHERNET;
use crate::scenario::{Location, address};
use crate::target::{Device, Hook, Outcome};

impl Model {
    /// Processes a client's packet of a known flow, which goes to the flow's endpoint.
    pub(super) fn go_on(&mut self, met: &mut Met<'_>, segment: &Segment, at: usize) -> Must {
        self.goes_on(met, segment, at, None)
    }

    /// Like `go_on`, for a packet that may have arrived encapsulated.
    pub(super) fn goes_on(
        &mut self,
        met: &mut Met<'_>,
        segment: &Segment,
        at: usize,
        came: Option<Came>,
    ) -> Must {
        if self.flows[at].kind == Kind::Own {
            // Such a flow has no Service: its id is 0.
            self.touch(at, From::Client, segment);
            self.reach("an answer to the node's own");
            // The same holds for a packet that was encapsulated.
            return Must::Become(Expected::new(met.input.to_vec()));
        }
        self.touch(at, From::Client, segment);
        let flow = &self.flows[at];
        let (source, backend, is_snat) = (flow.source, flow.backend, flow.kind.is_snat());
        if flow.is_tunnel {
            let is_sure = came.is_none() && (segment.opens() || !flow.is_guess());
            let hops = if is_sure { 0 } else { came.map_or(0, |came| came.hops).max(flow.hops) + 1 };
            return self.encapsulate(met, segment, backend, hops);
        }
        if is_snat {
            self.reach("a client's packet is forwarded");
            return self.forward(met, segment, source, backend);
        }
        self.reach("a client's packet goes on");
        Must::Become(translated(met.input, segment, source, backend))
    }

    /// Forwards a packet with another source and destination.
    fn forward(&mut self, met: &Met<'_>, segment: &Segment, src: SocketAddr, dst: SocketAddr) -> Must {
        // The node's own packets are answered under the address that they were sent to.
        let is_local_origin = met.hook == Hook::Egress && met.context.is_local_origin;
        let node =
            if is_local_origin { segment.dst.ip() } else { address(segment.src.is_ipv6(), Location::Node) };
        if let Some(code) = unreachable(dst.ip(), node, met.seen) {
            self.count(Reason::Unreachable, 0);
            return Must::Leave(answer(met.input, segment, Message::Unreachable(node, code)));
        }
        let Some(route) = route(dst.ip(), met.seen) else {
            self.count(Reason::NoRoute, 0);
            return Must::Drop;
        };
        let is_long = segment.longest > route.mtu;
        // No IPv4 packet of the generator forbids to be cut; the stack does it, on the loopback device.
        if is_long && dst.is_ipv6() {
            self.count(Reason::PacketTooBig, 0);
            if segment.l4.is_none() {
                return Must::Drop;
            }
            return Must::Leave(answer(met.input, segment, Message::TooBig(route.mtu)));
        }
        if time_to_live(met.input) <= 1 {
            self.count(Reason::TtlExceeded, 0);
            if segment.l4.is_none() {
                return Must::Drop;
            }
            return Must::Leave(answer(met.input, segment, Message::TimeExceeded(node)));
        }
        if is_long {
            self.reach("a packet that the stack cuts");
        }
        let macs = if is_long { [[0; 6]; 2] } else { route.macs };
        Must::Leave(sent(translated(met.input, segment, src, dst), macs))
    }

    /// Processes a packet at egress. Returns `None` if it is no endpoint's reply to a client.
    pub(super) fn reply(&mut self, met: &mut Met<'_>, segment: &Segment) -> Option<Must> {
        let at = self.of_backend(segment).filter(|at| self.flows[*at].kind != Kind::Own)?;
        let state = &self.flows[at].state;
        if state.is_closed() && !state.has_numbers_of(From::Backend, segment) {
            self.reach("an answer to another connection");
            return Some(Must::Pass);
        }
        if self.flows[at].state.is_of_another(segment) {
            self.reach("what cannot be the answer to a SYN");
            return Some(self.plan_older_connection(met, segment, at));
        }
        if self.is_dropped_refusal(at, segment) {
            return Some(Must::Drop);
        }
        if self.flows[at].kind.is_direct() {
            self.note_counted(at, From::Backend, segment);
        } else {
            self.touch(at, From::Backend, segment);
        }
        self.reach("a reply goes out");
        let flow = &self.flows[at];
        if flow.kind == Kind::Direct && flow.source == flow.client {
            return Some(Must::Pass);
        }
        Some(Must::Become(translated(met.input, segment, flow.frontend, flow.client)))
    }

    /// Processes the reply to a packet that was forwarded.
    pub(super) fn snat_reply(&mut self, met: &mut Met<'_>, segment: &Segment, at: usize) -> Must {
        if self.flows[at].kind.is_direct() {
            self.note_counted(at, From::Backend, segment);
            if self.flows[at].source == self.flows[at].client {
                self.reach("a reply to a port of netfilter's");
                return Must::Pass;
            }
        } else {
            self.touch(at, From::Backend, segment);
        }
        let flow = &self.flows[at];
        let (frontend, client) = (flow.frontend, flow.client);
        if flow.kind == Kind::Snat {
            self.reach("a reply is forwarded");
            return self.forward(met, segment, frontend, client);
        }
        self.reach("a reply to the node itself");
        let mut out = translated(met.input, segment, frontend, client);
        // The reply goes up the stack on the device that leads to its new source.
        let way = route(frontend.ip(), met.seen);
        // If the source of the lookup is a strange address, only the kernel decides whether there is a route.
        let is_known = !is_strange(client.ip()) || met.seen.outcome == Outcome::Redirect;
        match way {
            Some(way) if way.device != met.context.device && is_known => {
                let [_, own] = way.macs;
                out.bytes[..12].copy_from_slice(&[own, own].concat());
                Must::Leave(out)
            }
            _ => Must::Become(out),
        }
    }

    /// Forwards an error that is already translated, or drops it.
    pub(super) fn forward_error(&mut self, met: &Met<'_>, out: Expected, to: SocketAddr) -> Must {
        let Some(route) = route(to.ip(), met.seen) else {
            self.count(Reason::NoRoute, 0);
            return Must::Drop;
        };
        if met.input.len() - ETHERNET > route.mtu {
            // An ICMP error is never answered.
            self.count(Reason::NoRoute, 0);
            return Must::Drop;
        }
        if time_to_live(met.input) <= 1 {
            self.count(Reason::TtlExceeded, 0);
            return Must::Drop;
        }
        debug_assert!(route.device != Device::Loopback);
        Must::Leave(sent(out, route.macs))
    }
}

fn time_to_live(input: &[u8]) -> u8 {
    input[ETHERNET + if is_v6(input) == Some(true) { 7 } else { 8 }]
}
