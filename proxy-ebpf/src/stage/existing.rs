//! Looks up whether a segment that opens a connection has a flow already.

use super::forward::Routing;
use crate::calls::{declare, new_flow_calls};
use crate::context::PacketCtx;
use crate::env::{Affinity, Counters, FlowTable, RateLimit, Words};
use crate::flow::track::is_syn;
use crate::frame::Frame;
use crate::step::Step;

/// Result of looking up the flow of a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// No flow, or a closed one, which was removed.
    None = 0,
    /// An established or half-open flow.
    GoesOn = 1,
    /// Such a flow, whose reply key is missing from `flow_index`.
    LostReplyKey = 2,
    /// A flow whose backend did not answer, or whose refusal was hidden: the flow was removed, and a backend is selected
    /// again.
    Retried = 3,
}

/// The maps and lookups that the stages of new flows need.
pub trait NewFlows<F: Frame>: FlowTable + Affinity + Counters + RateLimit + Routing<F> {
    new_flow_calls!(declare!(), Words<Self>, F);
}

/// The next stage of a SYN that belongs to an existing flow. `None` for other packets: their lookup found no flow earlier.
#[inline(always)]
pub fn of_existing<M: NewFlows<F>, F: Frame>(maps: M, ctx: &mut PacketCtx<Words<M>>) -> Option<Step> {
    if is_syn(ctx.packet.tcp_flags) { next_of(maps.existing(ctx)) } else { None }
}

/// Returns the next stage for a result of the lookup; `None` if there is no flow.
#[inline(always)]
pub fn next_of(existing: Existing) -> Option<Step> {
    match existing {
        Existing::None => None,
        Existing::GoesOn => Some(Step::Continue),
        Existing::LostReplyKey => Some(Step::RepairReplyKey),
        Existing::Retried => Some(Step::NewFlow),
    }
}
