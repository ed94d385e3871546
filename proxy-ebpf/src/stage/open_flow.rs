//! Creates the planned flow, and translates its first packet.

use proxy_common::PROTO_UDP;
use proxy_common::conntrack::{SYN_ANSWERS_PER_SEC, may_begin};
use proxy_common::flow::{
    DIRECTION_REPLY, STATE_DIRECT, STATE_LOCAL, STATE_SNAT, is_encapsulated, is_masqueraded,
};
use proxy_common::reason::Reason;

use super::eject;
use super::established::deliver;
use super::existing::{Existing, NewFlows, next_of, of_existing};
use super::new_flow::refuse;
use super::seen::mark_direct_seen;
use super::translate::Rewrite;
use super::{limit, tunnel};
use crate::context::{PacketCtx, Tuple};
use crate::env::{Counters, FlowTable, NEW_FLOWS, Words};
use crate::flow::memory::EntryRef as _;
use crate::flow::open::{self, Opened};
use crate::flow::track::{self, is_syn};
use crate::frame::Frame;
use crate::report;
use crate::shared::Shared as _;
use crate::step::Step;

/// Looks up the flow of the packet, and ends the flow if the packet does not continue it.
#[inline(always)]
pub fn existing<M: FlowTable + Counters>(maps: M, ctx: &mut PacketCtx<Words<M>>) -> Existing {
    let Some(time) = maps.time() else { return Existing::None };
    let Some(flow) = track::find_called(maps, &ctx.packet.key) else { return Existing::None };
    // This function is called for SYNs only. An early hook may have begun the flow with this very packet.
    let is_again =
        || time.now.wrapping_sub(flow.entry.last_seen().load()) > time.config.hz / SYN_ANSWERS_PER_SEC;
    if maps.measures_latency() && track::is_unreplied_syn(flow.bits()) && is_again() {
        maps.syn_again(flow.service(), flow.entry.backend_id());
    }
    let is_retried = eject::selects_again(maps, ctx, &flow, time);
    if is_retried || !flow.continues(ctx.packet.tcp_flags, ctx.service, time) {
        flow.expire();
        return if is_retried { Existing::Retried } else { Existing::None };
    }
    if flow.has_lost_reply_key(time) { Existing::LostReplyKey } else { Existing::GoesOn }
}

/// Creates the planned flow, unless the packet has a flow already.
#[inline(always)]
pub fn open_flow<M: NewFlows<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    let Some(time) = maps.time() else { return Step::Pass };
    let service = ctx.service;
    let is_direct = ctx.plan.bits & STATE_DIRECT != 0;
    // A FIN or RST to another node, which begins no flow.
    let ends = !F::EARLY
        && is_encapsulated(ctx.plan.bits)
        && ctx.packet.key.proto != PROTO_UDP
        && !may_begin(ctx.packet.tcp_flags);
    let rate = time.config.dsr_flow_rate;
    if tunnel::can_bypass(ctx, time)
        && (ends || !limit::take(maps, NEW_FLOWS, rate, rate, time))
        && tunnel::is_of_table(maps, ctx)
    {
        // The flow of a SYN was not looked up yet.
        return if F::EARLY && is_syn(ctx.packet.tcp_flags) && track::exists(maps, &ctx.packet.key) {
            Step::Pass
        } else if !F::EARLY
            && let Some(next) = of_existing(maps, ctx)
        {
            next
        } else {
            tunnel::bypass(maps, frame, ctx)
        };
    }
    if ends {
        report::refused(maps, frame, ctx, service, Reason::InvalidState);
        return refuse(Reason::InvalidState, ctx.packet.tcp_flags);
    }
    match open::open(maps, ctx, service, time) {
        // Nothing was changed, so the next hook can process the packet.
        Ok(Opened::Exists) | Err(_) if F::EARLY => Step::Pass,
        Ok(Opened::Begun) if is_direct => {
            if ctx.plan.bits & (STATE_SNAT | STATE_LOCAL) == 0 {
                mark_direct_seen(maps, &ctx.packet.key, time);
            }
            if ctx.packet.key.direction == DIRECTION_REPLY {
                // A packet of an endpoint, or of this node itself: it passes unchanged, unless it is for another connection.
                if ctx.plan.bits & STATE_LOCAL != 0 || ctx.other.dst_port == 0 {
                    return Step::Pass;
                }
                let (to, reply) = (&ctx.other, &mut ctx.plan.reply);
                (reply.src, reply.dst) = (to.dst, to.src);
                (reply.src_port, reply.dst_port) = (to.dst_port, to.src_port);
            }
            frame.set_translated();
            Step::Translate
        }
        // Without a direct flow, its replies are taken for another flow's; the packet still reaches the endpoint.
        Ok(Opened::Exists) | Err(_) if is_direct => Step::Pass,
        Ok(Opened::Begun) => {
            report::new_flow(maps, frame, ctx, service, ctx.plan.backend_id);
            if !F::EARLY && ctx.second_chance != 0 {
                report::refused(maps, frame, ctx, service, Reason::SecondChance);
            }
            // A packet that this node forwards needs a route, like every packet of an existing flow.
            let is_forwarded = ctx.plan.bits & STATE_SNAT != 0 || is_encapsulated(ctx.plan.bits);
            if is_forwarded { Step::Continue } else { Step::Translate }
        }
        Ok(Opened::Exists) => next_of(maps.existing(ctx)).unwrap_or(Step::NewFlow),
        Err(reason) => {
            if let Some(next) = of_existing(maps, ctx) {
                return next;
            }
            report::refused(maps, frame, ctx, service, reason);
            refuse(reason, ctx.packet.tcp_flags)
        }
    }
}

/// Translates the first packet of a flow whose backend sees the client's own address.
#[inline(always)]
pub fn translate<M: Counters<Family: Rewrite>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
) -> Step {
    let to = Tuple::to_backend(&ctx.plan.reply);
    if ctx.plan.bits & STATE_DIRECT == 0 {
        report::forwarded(maps, ctx.service, ctx.packet.length);
    }
    if is_masqueraded(ctx.plan.bits)
        && let Some(config) = maps.config()
    {
        frame.mark(config.masquerade_mark);
    }
    deliver::<F, M::Family>(frame, ctx, &to)
}
