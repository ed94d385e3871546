//! The order of the stages at a hook that runs before another hook of Ballast (XDP, before tc).
//!
//! ```text
//!   parse -> classify -+-> established -+-> translate -> forward
//!                      |   snat_reply   |
//!                      +-> new_flow -> open_flow -> encapsulate (to the endpoint's node, DSR)
//!                      |       \-> drop
//!                      +-> decapsulate_early (from another node, DSR), then the next hook
//! ```
//!
//! The stages are those of [`pipeline`](crate::pipeline). A packet that needs another stage, a route that is not known, or an
//! answer passes unchanged, and the next hook does all of the work. So both hooks may process packets of the same flow.

use proxy_common::flow::DIRECTION_FORWARD;
use proxy_common::reason::Reason;

use crate::calls::{declare, early_calls};
use crate::context::{NO_HASH, PacketCtx};
use crate::env::Words;
use crate::frame::{Frame, HelperFailed};
use crate::header::BROKEN;
use crate::parse::{Parse as _, Stop};
use crate::stage::classify;
use crate::stage::established::{self, Lookup};
use crate::stage::existing::NewFlows;
use crate::stage::forward::{self, EtherType};
use crate::stage::receive::is_for_node;
use crate::stage::translate::plain::is_plain;
use crate::stage::tunnel::{self, Outer};
use crate::step::Step;

/// The stages for one kind of frame; see [`pipeline::Stages`](crate::pipeline::Stages).
pub trait EarlyStages<F: Frame>: NewFlows<F, Family: Outer> {
    early_calls!(declare!(), Words<Self>, F);
}

/// [`established::established`], and [`forward::send`].
#[inline(always)]
pub fn established<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, lookup: Lookup) -> Step
where
    M: NewFlows<F>,
    F: Frame,
{
    let step = established::established(maps, frame, ctx, lookup);
    send::<F, M::Family>(frame, ctx, step)
}

/// [`established::snat_reply`], and [`forward::send`].
#[inline(always)]
pub fn snat_reply<M: NewFlows<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    let step = established::snat_reply(maps, frame, ctx);
    send::<F, M::Family>(frame, ctx, step)
}

/// Sends the packet if `step` is [`Step::Forward`]; returns any other step unchanged.
#[inline(always)]
fn send<F: Frame, Fam: EtherType>(frame: F, ctx: &PacketCtx<Fam::Words>, step: Step) -> Step {
    if step != Step::Forward {
        return step;
    }
    match forward::send::<F, Fam>(frame, ctx) {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}

/// Processes a packet that arrives on a device. Returns [`Step::Sent`], [`Step::Drop`] or [`Step::DropFor`], or [`Step::Tunnel`] for
/// [`tunnel::decapsulate_early`]; with any other step, the packet passes unchanged.
#[inline(always)]
pub fn ingress<M: EarlyStages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    ctx.packet.key.direction = DIRECTION_FORWARD;
    ctx.packet.key.reserved = 0;
    match M::Family::parse(frame.bounds(), frame.link_header(), &mut ctx.packet, false, |_, _| BROKEN) {
        Ok(()) => {}
        Err(Stop::Tunnel) if tunnel::is_expected(maps) && is_for_node(maps, frame) => return Step::Tunnel,
        // The next hook parses the packet again, and counts the failure.
        Err(_) => return Step::Pass,
    }
    let mut step = classify::early(maps, &ctx.packet);
    if step == Step::Pass || !is_for_node(maps, frame) || !is_plain::<F, M::Family>(frame, &ctx.packet) {
        return Step::Pass;
    }
    ctx.hash = NO_HASH;
    (ctx.tunnelled, ctx.retried) = (0, 0);
    if step == Step::Established {
        step = maps.established(frame, ctx, Lookup::First);
    }
    if step == Step::SnatReply {
        step = maps.snat_reply(frame, ctx);
    }
    if step == Step::NewFlow {
        step = maps.new_flow(frame, ctx);
    }
    if step == Step::OpenFlow {
        step = maps.open_flow(frame, ctx);
    }
    if step == Step::Continue {
        step = maps.established(frame, ctx, Lookup::Again);
    }
    if step == Step::Encapsulate { maps.encapsulate(frame, ctx) } else { step }
}
