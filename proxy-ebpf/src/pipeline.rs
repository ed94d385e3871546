//! The order of the stages: one dispatcher for what comes in, and for what goes out.
//!
//! ```text
//!             parse -> classify -+-> established -+-> translate -> deliver (up the stack, or on as it went)
//!                                |   snat_reply   |            \-> forward (by the kernel's route)
//!                                +-> direct       |
//!                                +-> new_flow -> open_flow -> encapsulate (to the endpoint's node, DSR)
//!                                |       \-> refuse (ICMP), drop
//!                                |       ^ another backend: established -> eject (a refusal) -> drop
//!                                |       its endpoint left: established -> reset (TCP, back to the client)
//!                                +-> icmp
//!                                +-> tunnel -> tunnelled -> established (from another node, DSR)
//! ```
//!
//! Foreign packets leave after `classify`.

use proxy_common::PROTO_UDP;
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY};
use proxy_common::reason::Reason;

use crate::context::{NO_HASH, PacketCtx};
use crate::env::{Node, Transition, Words};
use crate::flow::track::is_syn;
use crate::frame::Frame;
use crate::parse::Parsed;
use crate::report;
use crate::shared::opaque;
use crate::stage::classify;
use crate::stage::direct::Way;
use crate::stage::established::{self, Look};
use crate::stage::refuse::Refusal;
use crate::stage::tunnel;
use crate::step::{DROP, NEXT, Step, StepCode};

/// Stages that a packet may go through, the last look included; more than any packet needs. A packet that needs more met changes of other CPUs at each stage.
const TURNS: u32 = 8;

mod enter;
mod stages;

pub use enter::parse_pulled;
pub use stages::{Ip, Stages, send};

/// A packet that comes in by a device. Gives the program's verdict.
#[inline(always)]
pub fn ingress<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> i32
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    let step = incoming(maps, frame, ctx);
    go_on(maps, frame, ctx, step)
}

/// A packet that goes out of a device: towards a client, or from one that is a process of this node.
#[inline(always)]
pub fn egress<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> i32
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    let step = outgoing(maps, frame, ctx);
    go_on(maps, frame, ctx, step)
}

/// What the kernel does by a program of its own for each part, since only packets that are rewritten are to pay for what lets
/// programs write.
#[inline(always)]
pub fn go_on<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, first: Step) -> i32
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    let step = known(maps, frame, ctx, first);
    dispatch(maps, frame, ctx, step.into())
}

/// The first stage of a packet that comes in: it is parsed and classified, and nothing is changed.
#[inline(always)]
pub fn incoming<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    match enter::parse(maps, frame, ctx, DIRECTION_FORWARD) {
        Parsed::Packet => classify::incoming(maps, &ctx.packet),
        Parsed::Icmp => Step::Icmp,
        Parsed::Tunnel if tunnel::is_expected(maps) => Step::Tunnel,
        Parsed::Foreign | Parsed::Tunnel => Step::Pass,
        Parsed::Dropped => Step::Drop,
    }
}

/// The same for a packet that goes out.
#[inline(always)]
pub fn outgoing<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    match enter::parse(maps, frame, ctx, DIRECTION_REPLY) {
        Parsed::Packet if classify::may_be_reply(maps, &ctx.packet) => Step::Reply,
        Parsed::Packet => no_reply(maps, frame, ctx),
        Parsed::Icmp => Step::Icmp,
        // What cannot be parsed was counted at ingress; what this node sends itself is not counted.
        Parsed::Foreign | Parsed::Tunnel | Parsed::Dropped => Step::Pass,
    }
}

/// A packet that goes out, and is no reply to a flow.
#[inline(always)]
fn no_reply<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step
where
    M: Stages<F>,
    F: Frame,
    M::Family: Ip,
{
    ctx.packet.key.direction = DIRECTION_FORWARD;
    if frame.is_local_origin() {
        classify::local_origin(maps, frame, &ctx.packet)
    } else {
        classify::leaving(maps, frame, &ctx.packet)
    }
}

/// The stages that nearly every packet of a flow ends in. A packet for another stage is left to [`dispatch`].
#[inline(always)]
pub fn known<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, first: Step) -> Step
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    ctx.hash = NO_HASH;
    ctx.tunnelled = 0;
    let mut step = first;
    if step == Step::Reply {
        step = established::reply(maps, frame, ctx);
        return if step == Step::NewFlow { no_reply(maps, frame, ctx) } else { step };
    }
    if step == Step::Established {
        step = established::established(maps, frame, ctx, Look::First);
    }
    if step == Step::SnatReply {
        step = established::snat_reply(maps, frame, ctx);
    }
    match step {
        Step::Forward => send::<F, M::Family>(frame, ctx, false),
        Step::DeliverLocal => send::<F, M::Family>(frame, ctx, true),
        step => step,
    }
}

/// Goes from stage to stage until one says what becomes of the packet.
#[inline(always)]
pub fn dispatch<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, first: StepCode) -> i32
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
    // ICMP has no flow of its own: what the parser says of the direction stays.
    let is_incoming = ctx.packet.key.direction == DIRECTION_FORWARD;
    // As a number that the compiler cannot see through: it would keep what belongs to a step on the stack, also where no step
    // has any, and the verifier objects to what was never written.
    let StepCode(mut code) = first;
    let mut turn = 0;
    while turn < TURNS {
        let step = Step::decode(opaque(u64::from(code)) as u32);
        let StepCode(next) = match step {
            Step::Established => maps.established(frame, ctx, Look::First),
            Step::Continue => maps.established(frame, ctx, Look::Again),
            Step::RepairReplyKey => {
                maps.repair_reply_key(frame, ctx);
                Step::Continue.into()
            }
            Step::SnatReply => maps.snat_reply(frame, ctx),
            Step::NewFlow if leaves_to_others(maps, ctx) => Step::Pass.into(),
            Step::NewFlow => maps.new_flow(frame, ctx),
            Step::OpenFlow => maps.open_flow(frame, ctx),
            Step::Translate => maps.translate(frame, ctx),
            Step::Refused | Step::Unreachable if maps.refused(frame, ctx) => Step::Drop.into(),
            Step::Unreachable => Step::Icmp.into(),
            Step::Refused if is_incoming => Step::SnatReply.into(),
            Step::Refused => match Step::from(maps.reply(frame, ctx)) {
                // Evicted meanwhile.
                Step::NewFlow => Step::Pass.into(),
                step => step.into(),
            },
            // To programs behind these, the packets that these have translated look like this.
            Step::Direct | Step::DirectOut | Step::DirectOwn | Step::DirectReply
                if matches!(maps.transition(), Transition::LooksUp | Transition::Opens) =>
            {
                Step::Pass.into()
            }
            Step::Direct => maps.direct(frame, ctx, Way::In),
            Step::DirectOut => maps.direct(frame, ctx, Way::Out),
            Step::DirectOwn => maps.direct(frame, ctx, Way::Own),
            Step::DirectReply => maps.direct(frame, ctx, Way::Back),
            Step::Icmp => {
                let code = maps.translate_error(frame, ctx, is_incoming);
                match Step::from(code) {
                    Step::Icmp if is_incoming => maps.forward_error(frame, ctx),
                    Step::Icmp => Step::Pass.into(),
                    _ => code,
                }
            }
            Step::Refuse => maps.refuse(frame, ctx, Refusal::PortUnreachable),
            Step::TooBig => maps.refuse(frame, ctx, Refusal::TooBig),
            Step::Reset => maps.reset(frame, ctx),
            Step::Forward => maps.send(frame, ctx, false),
            Step::DeliverLocal => maps.send(frame, ctx, true),
            Step::Encapsulate => maps.encapsulate(frame, ctx),
            Step::Tunnelled => tunnel::tunnelled(maps.parse_pulled(frame, ctx)).into(),
            // Whether it is a reply is known by now, and a program of its own takes outer headers away.
            Step::Tunnel | Step::Pass | Step::Drop | Step::DropFor(_) | Step::Sent(_) | Step::Reply => {
                return finish::<M, F>(maps, step);
            }
        };
        code = next;
        turn += 1;
    }
    // Others were faster each time.
    finish::<M, F>(maps, Step::DropFor(Reason::FlowCollision))
}

/// Whether a packet without a flow is for the programs of another version, which run behind these and may know it.
#[inline(always)]
fn leaves_to_others<M: Node>(maps: M, ctx: &PacketCtx<Words<M>>) -> bool {
    match maps.transition() {
        Transition::None | Transition::Yields => false,
        Transition::LooksUp => true,
        // Where the other programs' flows are not copied yet, that is a datagram which may reach another backend.
        Transition::Opens => ctx.packet.key.proto != PROTO_UDP && !is_syn(ctx.packet.tcp_flags),
    }
}

/// The program's verdict for what became of a packet.
#[inline(always)]
pub fn finish<M, F>(maps: M, step: Step) -> i32
where
    M: Stages<F>,
    M::Family: Ip,
    F: Frame,
{
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
