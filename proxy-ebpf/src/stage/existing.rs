//! What a flow that exists already means for a segment that opens a connection.

use super::forward::Routing;
use crate::context::PacketCtx;
use crate::env::{Affinity, Counters, FlowTable, Words};
use crate::flow::track::is_syn;
use crate::frame::Frame;
use crate::step::Step;

/// What asking about the flow of a segment that opens a connection has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// There is none, or it was over and has been removed.
    None = 0,
    /// It goes on.
    GoesOn = 1,
    /// It goes on, and has lost the key of its replies.
    LostReplyKey = 2,
    /// Its backend did not answer: that was noted, the flow has been removed, and the earlier selection does not count.
    Unanswered = 3,
}

/// What new flows ask of the maps.
pub trait NewFlows<F: Frame>: FlowTable + Affinity + Counters + Routing<F> {
    /// [`open_flow::existing`](super::open_flow::existing).
    fn existing(self, ctx: &mut PacketCtx<Words<Self>>) -> Existing;
}

/// The next stage of a segment that opens a connection, if it belongs to a flow that goes on; of other packets it is known
/// by now that they do not.
#[inline(always)]
pub fn of_existing<M: NewFlows<F>, F: Frame>(maps: M, ctx: &mut PacketCtx<Words<M>>) -> Option<Step> {
    if is_syn(ctx.packet.tcp_flags) { next_of(maps.existing(ctx)) } else { None }
}

/// The next stage after what was found; `None`: there is no flow.
#[inline(always)]
pub fn next_of(existing: Existing) -> Option<Step> {
    match existing {
        Existing::None => None,
        Existing::GoesOn => Some(Step::Continue),
        Existing::LostReplyKey => Some(Step::RepairReplyKey),
        Existing::Unanswered => Some(Step::NewFlow),
    }
}
