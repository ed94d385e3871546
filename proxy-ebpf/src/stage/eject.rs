//! Backends that refuse a connection or do not answer it: the failure is noted in `health`, and the connection moves to
//! another backend.
//!
//! A refusal is dropped once for a connection, and only if another backend has answered lately: the client retransmits its
//! SYN, which creates a new flow to such a backend. Any other refusal reaches the client.

use proxy_common::conntrack::{SYN_UNANSWERED, is_hidden, is_unanswered, is_watched, refuses_syn, tcp};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_WATCH, WATCH_LAST, WATCH_OUTSIDE,
};
use proxy_common::health::{Failure, client};
use proxy_common::reason::Reason;
use proxy_common::service::{SERVICE_EJECTS, ServiceEntry};

use super::existing::NewFlows;
use crate::context::{Packet, PacketCtx};
use crate::env::{Counters, FlowTable, Services, Time, Words};
use crate::flow::memory::EntryRef as _;
use crate::flow::track::{self, Tracked};
use crate::frame::Frame;
use crate::report;
use crate::select::{backend, health};
use crate::shared::Shared as _;

/// Whether a backend's packet refuses the connection of an unreplied, watched flow. A SYN-ACK is noted in `health` as a
/// success.
#[inline(always)]
pub fn check_refusal<M: FlowTable>(maps: M, flow: &Tracked<M>, packet: &Packet<Words<M>>) -> bool {
    if !is_watched(flow.bits()) {
        return false;
    }
    if packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK {
        let (id, ..) = flow.entry.backend();
        health::note_answer(maps, id, || flow.entry.key(DIRECTION_FORWARD).src);
        return false;
    }
    refuses_syn(packet.tcp_flags, (packet.ack >> 16) as u16, flow.entry.seq(DIRECTION_FORWARD).load())
}

/// Whether an ICMP error that quotes this sequence number is about the SYN of a watched flow.
#[inline(always)]
pub fn is_about_syn<M: FlowTable>(flow: &Tracked<M>, seq: u32) -> bool {
    is_watched(flow.bits()) && flow.entry.seq(DIRECTION_FORWARD).load() == (seq >> 16) as u16
}

/// Whether another backend is selected for the retransmitted SYN in `ctx`: the flow's backend has not answered it, or has
/// refused it and the refusal was hidden. Silence is noted, unless the Service has one endpoint only, or session affinity:
/// silence alone never moves a client, as with kube-proxy.
#[inline(always)]
pub fn selects_again<M: FlowTable + Counters + Services>(
    maps: M,
    ctx: &mut PacketCtx<Words<M>>,
    flow: &Tracked<M>,
    time: Time,
) -> bool {
    let silent = time.now.wrapping_sub(flow.entry.last_seen().load());
    let is_silent = ctx.frontend.affinity_secs == 0
        && is_unanswered(flow.bits(), silent, time.now.wrapping_sub(flow.entry.created()), time.config.hz)
        && !is_only(maps, &ctx.frontend, flow);
    let is_hidden = is_hidden(flow.bits());
    if is_silent {
        note_failure(maps, flow, &ctx.packet.key.src, Failure::Silence, time);
    }
    ctx.retried = u32::from(is_hidden || is_silent || flow.bits() & STATE_WATCH == WATCH_LAST);
    is_silent || is_hidden
}

/// Whether the flow's backend is the only one of the Service.
#[inline(always)]
fn is_only<M: FlowTable + Services>(maps: M, service: &ServiceEntry, flow: &Tracked<M>) -> bool {
    let (id, ..) = flow.entry.backend();
    service.slot_count == 1 && maps.slot(service.slot_base) == Some(id)
}

/// Notes a failure of the flow's backend for the client with this address, and counts the ejection if there is one.
#[inline(always)]
fn note_failure<M: FlowTable + Counters>(
    maps: M,
    flow: &Tracked<M>,
    address: &Words<M>,
    failure: Failure,
    time: Time,
) {
    let (id, ..) = flow.entry.backend();
    if maps.note_failure(id, client(address, time.config.flow_seed), failure as u32) != 0 {
        report::refusal(maps, flow.service(), Reason::EndpointEjected);
    }
}

/// Handles a backend's refusal of the connection whose reply key is in `ctx`: a RST, or without its flag an ICMP error; or, with
/// `by_route`, the lack of a route for the connection whose forward key is in `ctx`, which this node would report.
/// Returns whether the refusal is to be dropped; it is then counted. Otherwise the flow is no longer watched. A refusal that another pod
/// may have forged shows nothing.
#[inline(always)]
pub fn handle_refusal<M: NewFlows<F>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    by_route: bool,
) -> bool {
    let Some(time) = maps.time() else { return false };
    let (key, tcp_flags) = (ctx.packet.key, ctx.packet.tcp_flags);
    let direction = if by_route { DIRECTION_FORWARD } else { DIRECTION_REPLY };
    let Some(flow) = track::find_called(maps, &FlowKey { direction, ..key }) else {
        return false;
    };
    if !is_watched(flow.bits()) {
        return false;
    }
    // The kernel drops it only if it checks sources (`rp_filter`).
    if !by_route && maps.is_of_another_device(frame, ctx, false) {
        flow.change_bits(|bits| bits & !STATE_WATCH);
        return false;
    }
    // The key and flags of the SYN that the client will retransmit.
    ctx.packet.key = flow.entry.key(DIRECTION_FORWARD);
    ctx.packet.tcp_flags = tcp::SYN;
    let failure = if tcp_flags & tcp::RST != 0 { Failure::Refusal } else { Failure::Unreachable };
    note_failure(maps, &flow, &ctx.packet.key.src, failure, time);
    let drops = flow.bits() & STATE_WATCH != WATCH_LAST && has_other(maps, ctx, &flow, time);
    if drops {
        report::refused(maps, frame, ctx, flow.service(), Reason::RefusalDropped);
        flow.change_bits(|bits| bits | SYN_UNANSWERED);
        maps.syn_answered(flow.index, flow.service(), flow.entry.backend_id(), true);
    } else {
        flow.change_bits(|bits| bits & !STATE_WATCH);
    }
    (ctx.packet.key, ctx.packet.tcp_flags) = (key, tcp_flags);
    drops
}

/// Whether another backend of the Service, which has answered lately, will get the connection whose SYN is in `ctx`. The
/// retransmitted SYN makes the same selection.
#[inline(always)]
fn has_other<M, F>(maps: M, ctx: &mut PacketCtx<Words<M>>, flow: &Tracked<M>, time: Time) -> bool
where
    M: NewFlows<F>,
    F: Frame,
{
    maps.packet_frontend(ctx, flow.bits() & STATE_WATCH == WATCH_OUTSIDE);
    if ctx.frontend.id != flow.service() || ctx.frontend.flags & SERVICE_EJECTS == 0 {
        return false;
    }
    let (refuser, ..) = flow.entry.backend();
    ctx.retried = 1;
    let id = maps.select_for(ctx, backend::random(maps.hash_key(&ctx.packet.key), 0));
    let number = client(&ctx.packet.key.src, time.config.flow_seed);
    id != 0 && id != refuser && health::works(maps, id, number)
}
