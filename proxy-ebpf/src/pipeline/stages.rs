//! The stages as the pipeline calls them: methods of a trait, so that a kind of frame may have its own implementation.

use proxy_common::reason::Reason;

use crate::calls::{declare, stage_calls};
use crate::context::PacketCtx;
use crate::env::{Fragments, Node, RateLimit, Words};
use crate::frame::{Frame, HelperFailed};
use crate::parse::{Parsed, Stop};
use crate::stage::direct::DirectCase;
use crate::stage::echo::EchoReply;
use crate::stage::established::Lookup;
use crate::stage::existing::NewFlows;
use crate::stage::forward::{self, EtherType};
use crate::stage::fragment::Fragmented;
use crate::stage::icmp::IcmpErrors;
use crate::stage::refuse::{Refusal, Refuse};
use crate::stage::reset::Reset;
use crate::stage::tunnel::Outer;
use crate::step::{Step, StepCode};

/// What the stages need of an address family.
pub trait Ip: IcmpErrors + EchoReply + Refuse + Reset + Fragmented + Outer {}

impl<T: IcmpErrors + EchoReply + Refuse + Reset + Fragmented + Outer> Ip for T {}

/// The stages for one kind of frame, as the pipeline calls them.
pub trait Stages<F: Frame>: NewFlows<F, Family: Ip> + Fragments + RateLimit {
    stage_calls!(declare!(), Words<Self>, F);
}

/// [`forward::send`], or [`forward::receive`] with `inwards`.
#[inline(always)]
pub fn send<M, F>(_maps: M, frame: F, ctx: &PacketCtx<Words<M>>, inwards: bool) -> Step
where
    M: Node,
    M::Family: EtherType,
    F: Frame,
{
    let sent = if inwards {
        forward::receive::<F, M::Family>(frame, ctx)
    } else {
        forward::send::<F, M::Family>(frame, ctx)
    };
    match sent {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}
