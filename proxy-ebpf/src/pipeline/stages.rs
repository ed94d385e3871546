//! The stages as the pipeline calls them: methods of a trait, so that a kind of frame may have its own implementation.

use proxy_common::reason::Reason;

use crate::context::PacketCtx;
use crate::env::{Fragments, RateLimit, Words};
use crate::frame::{Frame, HelperFailed};
use crate::parse::{Parsed, Stop};
use crate::stage::direct::{self, DirectCase};
use crate::stage::echo::{self, EchoReply};
use crate::stage::eject;
use crate::stage::established::{self, Lookup};
use crate::stage::existing::NewFlows;
use crate::stage::forward::{self, EtherType};
use crate::stage::fragment::{self, Fragmented};
use crate::stage::icmp::{self, IcmpErrors};
use crate::stage::new_flow;
use crate::stage::open_flow;
use crate::stage::refuse::{self, Refusal, Refuse};
use crate::stage::reset::{self, Reset};
use crate::stage::tunnel::{self, Outer};
use crate::step::{Step, StepCode};

/// What the stages need of an address family.
pub trait Ip: IcmpErrors + EchoReply + Refuse + Reset + Fragmented + Outer {}

impl<T: IcmpErrors + EchoReply + Refuse + Reset + Fragmented + Outer> Ip for T {}

/// The stages for one kind of frame. In the kernel, each stage is a function that the verifier checks once, separately: if
/// the verifier walked through the stages from every state that calls them, they would cost half a million instructions.
pub trait Stages<F: Frame>: NewFlows<F> + Fragments + RateLimit
where
    Self::Family: Ip,
{
    /// [`parse_pulled`](super::parse_pulled).
    fn parse_pulled(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> Parsed;

    /// [`fragment::first`].
    #[inline(always)]
    fn first_fragment(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> Result<(), Stop> {
        fragment::first(self, frame, ctx)
    }

    /// [`fragment::later`].
    #[inline(always)]
    fn later_fragment(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> Result<(), Stop> {
        fragment::later(self, frame, ctx)
    }

    /// [`established::established`].
    #[inline(always)]
    fn established(self, frame: F, ctx: &mut PacketCtx<Words<Self>>, lookup: Lookup) -> StepCode {
        established::established(self, frame, ctx, lookup).into()
    }

    /// [`established::repair_reply_key`].
    #[inline(always)]
    fn repair_reply_key(self, _frame: F, ctx: &mut PacketCtx<Words<Self>>) {
        established::repair_reply_key(self, ctx);
    }

    /// [`established::snat_reply`].
    #[inline(always)]
    fn snat_reply(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        established::snat_reply(self, frame, ctx).into()
    }

    /// [`eject::handle_refusal`].
    #[inline(always)]
    fn refused(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> bool {
        eject::handle_refusal(self, frame, ctx)
    }

    /// [`established::reply`].
    #[inline(always)]
    fn reply(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        established::reply(self, frame, ctx).into()
    }

    /// [`direct::direct`].
    #[inline(always)]
    fn direct(self, frame: F, ctx: &mut PacketCtx<Words<Self>>, case: DirectCase) -> StepCode {
        direct::direct(self, frame, ctx, case).into()
    }

    /// [`new_flow::new_flow`].
    #[inline(always)]
    fn new_flow(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        new_flow::new_flow(self, frame, ctx).into()
    }

    /// [`open_flow::open_flow`].
    #[inline(always)]
    fn open_flow(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        open_flow::open_flow(self, frame, ctx).into()
    }

    /// [`open_flow::translate`].
    #[inline(always)]
    fn translate(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        open_flow::translate(self, frame, ctx).into()
    }

    /// [`refuse::refuse`].
    #[inline(always)]
    fn refuse(self, frame: F, ctx: &mut PacketCtx<Words<Self>>, refusal: Refusal) -> StepCode {
        refuse::refuse(self, frame, ctx, refusal).into()
    }

    /// [`reset::reset`].
    #[inline(always)]
    fn reset(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        reset::reset(self, frame, ctx).into()
    }

    /// [`forward::send`], or [`forward::receive`] with `inwards`.
    #[inline(always)]
    fn send(self, frame: F, ctx: &mut PacketCtx<Words<Self>>, inwards: bool) -> StepCode {
        send::<F, Self::Family>(frame, ctx, inwards).into()
    }

    /// [`tunnel::encapsulate`].
    #[inline(always)]
    fn encapsulate(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        tunnel::encapsulate(self, frame, ctx).into()
    }

    /// [`icmp::translate_error`].
    #[inline(always)]
    fn translate_error(self, frame: F, ctx: &mut PacketCtx<Words<Self>>, incoming: bool) -> StepCode {
        icmp::translate_error(self, frame, ctx, incoming).into()
    }

    /// [`echo::answer`].
    #[inline(always)]
    fn answer_echo(self, frame: F, _ctx: &mut PacketCtx<Words<Self>>, incoming: bool) -> StepCode {
        echo::answer(self, frame, incoming).into()
    }

    /// [`icmp::forward_error`].
    #[inline(always)]
    fn forward_error(self, frame: F, ctx: &mut PacketCtx<Words<Self>>) -> StepCode {
        icmp::forward_error(self, frame, ctx).into()
    }
}

/// See [`Stages::send`].
#[inline(always)]
pub fn send<F: Frame, Fam: EtherType>(frame: F, ctx: &PacketCtx<Fam::Words>, inwards: bool) -> Step {
    let sent =
        if inwards { forward::receive::<F, Fam>(frame, ctx) } else { forward::send::<F, Fam>(frame, ctx) };
    match sent {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}
