//! The order of the stages: one dispatcher for ingress and egress packets.
//!
//! ```text
//!             parse -> classify -+-> established -+-> translate -> deliver (up the stack, or on as it went)
//!                                |   snat_reply   |            \-> forward (by the kernel's route)
//!                                +-> direct       |
//!                                +-> new_flow -> open_flow -> encapsulate (to the endpoint's node, DSR)
//!                                |       \-> refuse (ICMP), drop
//!                                |       ^ another backend: established -> eject (a refusal) -> drop
//!                                |       its endpoint left: established -> reset (TCP, back to the client)
//!                                +-> icmp -> answer_echo (back to the client)
//!                                +-> tunnel -> tunnelled -> established (from another node, DSR; or XDP has removed the outer header)
//! ```
//!
//! Foreign packets pass after `classify`.

use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY};
use proxy_common::reason::Reason;

use crate::context::{NO_HASH, PacketCtx};
use crate::env::Words;
use crate::frame::Frame;
use crate::parse::Parsed;
use crate::report;
use crate::shared::opaque;
use crate::stage::classify;
use crate::stage::direct::DirectCase;
use crate::stage::established::{self, Lookup};
use crate::stage::icmp;
use crate::stage::receive::{is_for_node, spoofs_node};
use crate::stage::refuse::Refusal;
use crate::stage::tunnel;
use crate::step::{DROP, NEXT, Step, StepCode};

/// Maximum number of stages of a packet, including the last lookup of its flow: a packet that arrives encapsulated, begins a flow,
/// is encapsulated to another node and is then too big has seven. Only a packet for which other CPUs change the tables at each
/// stage exceeds the number.
const MAX_STAGES: u32 = 7;

mod enter;
mod stages;

pub use enter::parse_pulled;
pub use stages::{Ip, Stages, send};

/// Runs the first stage of an ingress packet: parses and classifies the packet, and changes nothing.
#[inline(always)]
pub fn incoming<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    if frame.is_loopback() {
        return looped(maps, frame, ctx);
    }
    ctx.tunnelled = tunnel::noted(maps, frame);
    let parsed = enter::parse(maps, frame, ctx, DIRECTION_FORWARD);
    if ctx.tunnelled != 0 {
        return tunnel::tunnelled(parsed);
    }
    let step = match parsed {
        Parsed::Packet => classify::incoming(maps, &ctx.packet),
        Parsed::Icmp => Step::Icmp,
        Parsed::Tunnel if tunnel::is_expected(maps) => Step::Tunnel,
        Parsed::Foreign | Parsed::Tunnel => return Step::Pass,
        Parsed::Dropped => return Step::Drop,
    };
    if step == Step::Pass {
        if spoofs_node(maps, ctx) {
            frame.set_translated();
        }
        return step;
    }
    // Foreign packets do not pay for this.
    if is_for_node(maps, frame) { step } else { Step::Pass }
}

/// Runs the first stage of a packet that arrives on the loopback device. The programs process only the stack's ICMP errors about
/// translated packets whose source is an address of this node: it could not route them ([`Route::BY_STACK`]), and tells the source.
///
/// [`Route::BY_STACK`]: crate::frame::Route::BY_STACK
#[inline(always)]
fn looped<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    (ctx.tunnelled, ctx.packet.key.direction) = (0, DIRECTION_FORWARD);
    if !frame.is_translated() && icmp::is_stacks_error(maps, frame) { Step::Icmp } else { Step::Pass }
}

/// Runs the first stage of an egress packet: parses and classifies the packet, and changes nothing.
#[inline(always)]
pub fn outgoing<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    if frame.is_loopback() {
        return Step::Pass;
    }
    ctx.tunnelled = 0;
    match enter::parse(maps, frame, ctx, DIRECTION_REPLY) {
        Parsed::Packet => match classify::find_reply(maps, ctx) {
            Some(lookup) => lookup.into(),
            None => classify_egress(maps, frame, ctx),
        },
        Parsed::Icmp => Step::Icmp,
        // The ingress hook has counted packets that cannot be parsed; packets of local origin are not counted.
        Parsed::Foreign | Parsed::Tunnel | Parsed::Dropped => Step::Pass,
    }
}

/// Classifies an egress packet that is no reply of a flow.
#[inline(always)]
fn classify_egress<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    ctx.packet.key.direction = DIRECTION_FORWARD;
    if frame.is_local_origin() {
        classify::local_origin(maps, frame, &ctx.packet)
    } else {
        classify::leaving(maps, frame, &ctx.packet)
    }
}

/// Runs the stages that are the last ones of nearly every packet of a flow. Packets for another stage are left to
/// [`dispatch`].
#[inline(always)]
pub fn known<M: Stages<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, first: Step) -> Step {
    ctx.hash = NO_HASH;
    ctx.retried = 0;
    if ctx.tunnelled != 0 {
        // The packet may pass another device of this node. Without a note there is nothing to delete.
        let _ = frame.set_note([0; 2]);
    }
    let mut step = first;
    if step == Step::Reply {
        step = established::reply(maps, frame, ctx);
        return if step == Step::NewFlow { classify_egress(maps, frame, ctx) } else { step };
    }
    if step == Step::Established {
        step = established::established(maps, frame, ctx, Lookup::First);
    }
    if step == Step::SnatReply {
        step = established::snat_reply(maps, frame, ctx);
    }
    match step {
        Step::Forward => send(maps, frame, ctx, false),
        Step::DeliverLocal => send(maps, frame, ctx, true),
        step => step,
    }
}

/// Runs one stage after the other, until a stage returns the packet's verdict. Returns the program's verdict.
#[inline(always)]
pub fn dispatch<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, first: StepCode) -> i32
where
    M: Stages<F>,
    F: Frame,
{
    // An ICMP packet has no flow of its own, so its direction is still the one that the parser has set for the hook.
    let is_incoming = ctx.packet.key.direction == DIRECTION_FORWARD;
    // The step is a number that is opaque to the compiler. Otherwise the compiler keeps the payload of a step on the stack,
    // even for steps without payload, and the verifier rejects reads of stack that was never written.
    let StepCode(mut code) = first;
    let mut turn = 0;
    while turn < MAX_STAGES {
        let step = Step::decode(opaque(u64::from(code)) as u32);
        let StepCode(next) = match step {
            Step::Established => maps.established(frame, ctx, Lookup::First),
            Step::Continue => maps.established(frame, ctx, Lookup::Again),
            Step::RepairReplyKey => {
                maps.repair_reply_key(ctx);
                Step::Continue.into()
            }
            Step::SnatReply => maps.snat_reply(frame, ctx),
            Step::NewFlow if !maps.opens_flows() => Step::Pass.into(),
            Step::NewFlow => maps.new_flow(frame, ctx),
            Step::OpenFlow => maps.open_flow(frame, ctx),
            // This stage, and others that no stage follows, do not continue the loop: each further turn costs the verifier as
            // much as the first.
            Step::Translate => return finish_code::<M, F>(maps, maps.translate(frame, ctx)),
            Step::Refused | Step::RefusedByIcmp | Step::Unreachable
                if maps.refused(frame, ctx, step == Step::Unreachable) =>
            {
                Step::Drop.into()
            }
            Step::RefusedByIcmp => Step::Icmp.into(),
            Step::Refused if is_incoming => Step::SnatReply.into(),
            Step::Refused => {
                // The number is compared: if it were decoded and encoded again, each step would be a separate state for the
                // verifier.
                let code = maps.reply(frame, ctx);
                // `NewFlow`: another CPU has evicted the flow since the refusal was found.
                if code == Step::NewFlow.into() { Step::Pass.into() } else { code }
            }
            Step::Direct | Step::DirectEgress | Step::DirectFrontendSource | Step::DirectReply
                if !maps.opens_flows() =>
            {
                Step::Pass.into()
            }
            Step::Direct => maps.direct(frame, ctx, DirectCase::Ingress),
            Step::DirectEgress => maps.direct(frame, ctx, DirectCase::Egress),
            Step::DirectFrontendSource => maps.direct(frame, ctx, DirectCase::FrontendSource),
            Step::DirectReply => maps.direct(frame, ctx, DirectCase::EndpointReply),
            Step::Icmp => {
                let code = maps.translate_error(frame, ctx, is_incoming);
                if code == Step::Icmp.into() {
                    let code = maps.forward_error(frame, ctx, is_incoming);
                    let is_sent = code == Step::Forward.into();
                    return finish_code::<M, F>(
                        maps,
                        if is_sent { maps.send(frame, ctx, false) } else { code },
                    );
                }
                code
            }
            Step::EchoRequest => return finish_code::<M, F>(maps, maps.answer_echo(frame, is_incoming)),
            Step::Refuse => {
                return finish_code::<M, F>(maps, maps.refuse(frame, ctx, Refusal::PortUnreachable));
            }
            Step::TooBig => return finish_code::<M, F>(maps, maps.refuse(frame, ctx, Refusal::TooBig)),
            Step::TimeExceeded => {
                return finish_code::<M, F>(maps, maps.refuse(frame, ctx, Refusal::TimeExceeded));
            }
            Step::Unreachable => {
                return finish_code::<M, F>(maps, maps.refuse(frame, ctx, Refusal::Unreachable));
            }
            Step::Move => maps.end_at_backend(frame, ctx),
            Step::Reset => return finish_code::<M, F>(maps, maps.reset(frame, ctx)),
            Step::Forward => return finish_code::<M, F>(maps, maps.send(frame, ctx, false)),
            Step::DeliverLocal => return finish_code::<M, F>(maps, maps.send(frame, ctx, true)),
            Step::Encapsulate => maps.encapsulate(frame, ctx),
            Step::Tunnelled => tunnel::tunnelled(maps.parse_pulled(frame, ctx)).into(),
            // `known` has already processed replies, and a separate program removes outer headers.
            Step::Tunnel | Step::Pass | Step::Drop | Step::DropFor(_) | Step::Sent(_) | Step::Reply => {
                return finish::<M, F>(maps, step);
            }
        };
        code = next;
        turn += 1;
    }
    // Other CPUs changed the tables at each stage.
    finish::<M, F>(maps, Step::DropFor(Reason::FlowCollision))
}

/// Returns the program's verdict for the result of the last stage of a packet.
#[inline(always)]
fn finish_code<M: Stages<F>, F: Frame>(maps: M, code: StepCode) -> i32 {
    finish::<M, F>(maps, code.into())
}

/// Returns the program's verdict for the last step of a packet, and counts the reason of a drop.
#[inline(always)]
pub fn finish<M: Stages<F>, F: Frame>(maps: M, step: Step) -> i32 {
    match step {
        Step::Sent(verdict) => verdict,
        Step::Drop => DROP,
        Step::DropFor(reason) => {
            report::reason(maps, reason);
            DROP
        }
        _ => NEXT,
    }
}
