//! Backends that refuse a connection or do not answer it: the failure is noted in `health`, and the connection moves to
//! another backend.
//!
//! The refusal is dropped if another backend can get the connection: the client retransmits its SYN, which creates a new
//! flow. If all backends have failed for this client, the client gets the refusal.

use proxy_common::conntrack::{RST_BACKEND, is_unanswered, is_watched, refuses_syn, tcp};
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_OUTSIDE, STATE_WATCHED};
use proxy_common::health::client;
use proxy_common::reason::Reason;
use proxy_common::service::SERVICE_EJECTS;

use super::existing::NewFlows;
use crate::context::{Packet, PacketCtx};
use crate::env::{Counters, FlowTable, Time, Words};
use crate::flow::memory::EntryRef as _;
use crate::flow::track::{self, Tracked};
use crate::frame::Frame;
use crate::report;
use crate::select::health;
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
        health::answered(maps, id);
        return false;
    }
    refuses_syn(packet.tcp_flags, (packet.ack >> 16) as u16, flow.entry.seq(DIRECTION_FORWARD).load())
}

/// Whether an ICMP error that quotes this sequence number is about the SYN of a watched flow.
#[inline(always)]
pub fn is_about_syn<M: FlowTable>(flow: &Tracked<M>, seq: u32) -> bool {
    is_watched(flow.bits()) && flow.entry.seq(DIRECTION_FORWARD).load() == (seq >> 16) as u16
}

/// Whether the client of a flow retransmits its SYN because the backend has not answered. Such a failure is noted.
#[inline(always)]
pub fn check_unanswered<M: FlowTable + Counters>(
    maps: M,
    ctx: &PacketCtx<Words<M>>,
    flow: &Tracked<M>,
    time: Time,
) -> bool {
    let silent = time.now.wrapping_sub(flow.entry.last_seen().load());
    let is_failure = is_unanswered(flow.bits(), silent, time.config.hz);
    if is_failure {
        note_failure(maps, flow, &ctx.packet.key.src);
    }
    is_failure
}

/// Notes a failure of the flow's backend for the client with this address, and counts the ejection if there is one.
#[inline(always)]
fn note_failure<M: FlowTable + Counters>(maps: M, flow: &Tracked<M>, address: &Words<M>) {
    let (id, ..) = flow.entry.backend();
    if maps.note_failure(id, client(address)) != 0 {
        report::refusal(maps, flow.service(), Reason::EndpointEjected);
    }
}

/// Handles a backend's refusal of the connection whose reply key is in `ctx`. Returns whether the refusal is to be dropped;
/// it is then counted. Otherwise the flow is no longer watched.
#[inline(always)]
pub fn handle_refusal<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> bool
where
    M: NewFlows<F>,
    F: Frame,
{
    let Some(time) = maps.time() else { return false };
    let (key, tcp_flags) = (ctx.packet.key, ctx.packet.tcp_flags);
    let Some(flow) = track::find_called(maps, &FlowKey { direction: DIRECTION_REPLY, ..key }, time) else {
        return false;
    };
    if !is_watched(flow.bits()) {
        return false;
    }
    // The key and flags of the SYN that the client will retransmit.
    ctx.packet.key = flow.entry.key(DIRECTION_FORWARD);
    ctx.packet.tcp_flags = tcp::SYN;
    note_failure(maps, &flow, &ctx.packet.key.src);
    let drops = has_other(maps, ctx, &flow);
    if drops {
        report::refused(maps, frame, ctx, flow.service(), Reason::RefusalDropped);
        flow.change_bits(|bits| bits | RST_BACKEND);
        maps.syn_answered(flow.index, flow.service(), flow.entry.backend_id(), true);
    } else {
        flow.change_bits(|bits| bits & !STATE_WATCHED);
    }
    (ctx.packet.key, ctx.packet.tcp_flags) = (key, tcp_flags);
    drops
}

/// Whether another backend of the Service can get the connection whose SYN is in `ctx`.
#[inline(always)]
fn has_other<M, F>(maps: M, ctx: &mut PacketCtx<Words<M>>, flow: &Tracked<M>) -> bool
where
    M: NewFlows<F>,
    F: Frame,
{
    maps.packet_frontend(ctx, flow.bits() & STATE_OUTSIDE != 0);
    if ctx.frontend.id != flow.service() || ctx.frontend.flags & SERVICE_EJECTS == 0 {
        return false;
    }
    let (refuser, ..) = flow.entry.backend();
    let random = maps.random();
    let id = maps.select_for(ctx, random);
    id != 0 && id != refuser && !health::is_ejected(maps, id, client(&ctx.packet.key.src))
}
