//! ICMP errors about packets of flows.

use std::net::SocketAddr;

use proxy_common::health::Failure;

use super::flow::{Flow, From, Kind, half};
use super::parse::{Header, header_at};
use super::rewrite::error;
use super::{Met, Model, Must};
use crate::forge::ETHERNET;
use crate::scenario::{ICMP, ICMPV6, SCTP, TCP, UDP};
use crate::target::Hook;

/// An ICMP error, and what it quotes.
struct Quote {
    outer: Header,
    inner: Header,
    /// Source and destination of the quoted packet.
    src: SocketAddr,
    dst: SocketAddr,
    /// Sequence number of the quoted packet, if it is TCP and did not reach its destination.
    refused: Option<u32>,
}

impl Model {
    pub(super) fn control(&mut self, met: &Met<'_>) -> Must {
        let Some(quote) = quote(met.input) else { return Must::Pass };
        let Some((at, is_reply)) = self.of_error(met.hook, &quote) else { return Must::Pass };
        let seq = self.flows[at].state.seq[From::Client as usize];
        if is_reply
            && self.flows[at].waits()
            && quote.refused.is_some_and(|refused| Some(half(refused)) == seq)
            && self.drops_refusal(at, Failure::Unreachable)
        {
            return Must::Drop;
        }
        let flow = &self.flows[at];
        // The quoted packet went in the opposite direction to the error, so its addresses are translated the other way round.
        let (from, to) = if is_reply { (flow.client, flow.frontend) } else { (flow.backend, flow.source) };
        // A process of the node gets the error from the endpoint, for the source check of the device.
        let is_own = met.hook == Hook::Ingress && flow.kind == Kind::Local;
        let is_ends_own = quote.outer.src == quote.inner.dst && !is_own;
        let src = if is_ends_own { to.ip() } else { quote.outer.src };
        let is_forwarded = met.hook == Hook::Ingress && flow.kind == Kind::Snat;
        let out = error(met.input, &quote.outer, &quote.inner, src, [from, to]);
        if !is_forwarded {
            self.reach("an error goes on");
            return Must::Become(out);
        }
        self.reach("an error is forwarded");
        self.forward_error(met, out, from)
    }

    /// Returns the flow that an error is about, and whether the error has the direction of the flow's replies.
    fn of_error(&mut self, hook: Hook, quote: &Quote) -> Option<(usize, bool)> {
        let proto = quote.inner.proto;
        if hook == Hook::Ingress && (self.is_frontend(quote.src, proto) || self.is_backend(quote.src, proto))
        {
            let is = |flow: &Flow| {
                flow.has_client && (flow.proto, flow.frontend, flow.client) == (proto, quote.src, quote.dst)
            };
            if let Some(at) = self.flows.iter().position(is)
                && let Some(at) = self.in_time(at)
            {
                return Some((at, false));
            }
        }
        let is = |flow: &Flow| flow.kind != Kind::Own && flow.has_replies(proto, quote.dst, quote.src);
        let at = self.flows.iter().position(is)?;
        let at = self.in_time(at)?;
        // At ingress, an error has that direction only if the node is the client of the endpoint (SNAT).
        (hook == Hook::Egress || self.flows[at].kind.is_snat()).then_some((at, true))
    }
}

/// Reads an error that quotes enough of a packet.
fn quote(input: &[u8]) -> Option<Quote> {
    let outer = header_at(input, ETHERNET)?;
    if outer.is_later {
        return None;
    }
    let is_error = match outer.proto {
        ICMP if outer.src.is_ipv4() => matches!(input.get(outer.l4)?, 3 | 11 | 12),
        ICMPV6 if outer.src.is_ipv6() => matches!(input.get(outer.l4)?, 1..=4),
        _ => false,
    };
    if !is_error {
        return None;
    }
    let inner = header_at(input, outer.l4 + 8)?;
    let is_ours = matches!(inner.proto, TCP | UDP | SCTP);
    // The destination of an error is the source of the quoted packet.
    if inner.is_later || !is_ours || inner.l4 + 8 > outer.end || inner.src != outer.dst {
        return None;
    }
    let start = input.get(inner.l4..inner.l4 + 8)?;
    let port = |at: usize| u16::from_be_bytes([start[at], start[at + 1]]);
    let (src, dst) = (SocketAddr::new(inner.src, port(0)), SocketAddr::new(inner.dst, port(2)));
    let seq = u32::from_be_bytes(start[4..].try_into().ok()?);
    let is_unreachable = match (outer.proto, input.get(outer.l4)?, input.get(outer.l4 + 1)?) {
        (ICMP, 3, code) => *code != 4,
        (ICMPV6, 1, _) => true,
        _ => false,
    };
    let refused = (inner.proto == TCP && is_unreachable).then_some(seq);
    Some(Quote { outer, inner, src, dst, refused })
}
