//! BPF-to-BPF calls: functions that the verifier checks once each, separately ("global" functions), and that have their own
//! stack frame. Each one wraps a stage or a step of the flow table for one family, and makes no decisions.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::flow::FlowKey;
use proxy_common::{V4, V6};

use super::codes::{decode_fib, decode_parsed, decode_stop, encode_stop};
use super::handle::Kernel;
use super::skb::Skb;
use crate::context::{Packet, PacketCtx, Tuple};
use crate::env::{FlowTable, Node as _, Words};
use crate::flow::{self, evict, index, open, track};
use crate::frame::{Fib, HelperFailed, Route};
use crate::header;
use crate::parse::Parsed;
use crate::parse::Stop;
use crate::pipeline::{self, Stages};
use crate::select::lookup;
use crate::stage::direct::{self, DirectCase};
use crate::stage::established::{self, Lookup};
use crate::stage::existing::{Existing, NewFlows};
use crate::stage::forward::{self, Routing};
use crate::stage::new_flow;
use crate::stage::open_flow;
use crate::stage::refuse::{self, Refusal};
use crate::stage::{echo, eject, fragment, icmp, reset, sctp, source, tunnel};
use crate::step::{Step, StepCode};

type Ctx<F> = *mut PacketCtx<Words<Kernel<F>>>;

/// Subprogram for [`header::walk_extensions`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_extensions(skb: *mut __sk_buff, proto: u32, offset: u32) -> u64 {
    header::walk_extensions(Skb::from_raw(skb), proto as u8, offset)
}

/// Subprogram for [`sctp::change_ports`]. Returns 0 for success.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn sctp_ports(skb: *mut __sk_buff, at: u32, end: u32, old: u32, new: u32) -> i32 {
    i32::from(sctp::change_ports(Skb::from_raw(skb), at, end, old, new) == Err(HelperFailed))
}

/// Defines the global function of a stage: `name(more arguments)`, which returns the stage's result as a number.
macro_rules! stage {
    ($family:ty, $name:ident($($argument:ident: $type:ty),*), |$maps:ident, $frame:ident, $ctx:ident| $body:expr) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(skb: *mut __sk_buff, ctx: Ctx<$family> $(, $argument: $type)*) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some($ctx) = (unsafe { ctx.as_mut() }) else { return Step::Pass.encode() };
            let ($maps, $frame) = (Kernel::<$family>::new(), Skb::from_raw(skb));
            $body
        }
    };
}

/// Defines the global function of a step of the flow table, which gets no packet.
macro_rules! step {
    ($family:ty, $name:ident($($argument:ident: $type:ty),*) -> $result:ty, $body:path) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $name($($argument: $type),*) -> $result {
            $body(Kernel::<$family>::new(), $($argument),*)
        }
    };
}

/// Calls [`index::take_slot_in`]; the flag `stale` is a number, as an argument of a global function has to be.
#[inline(always)]
fn take_slot_in<M: FlowTable>(maps: M, bucket: u32, pending: u32, stale: u32) -> u32 {
    index::take_slot_in(maps, bucket, pending, stale != 0)
}

/// Calls [`track::end`]; both flags are numbers.
#[inline(always)]
fn end_flow<M: FlowTable>(maps: M, index: u32, state: u64, removes: u32) -> u32 {
    u32::from(track::end(maps, index, state, removes != 0))
}

/// Calls [`index::unlink`]; a global function returns a number.
#[inline(always)]
fn unlink<M: FlowTable>(maps: M, index: u32) -> u32 {
    index::unlink(maps, index);
    0
}

/// Calls [`evict::move_window`]; the flag is a number.
#[inline(always)]
fn move_window<M: FlowTable>(maps: M, skip: u32, far: u32) -> u64 {
    evict::move_window(maps, skip, far != 0)
}

/// Calls [`flow::prefetch`]; a global function returns a number.
#[inline(always)]
fn prefetch<M: FlowTable>(maps: M, hash: u64, reply_hash: u64) -> u32 {
    flow::prefetch(maps, hash, reply_hash);
    0
}

macro_rules! family {
    (
        $family:ty, $words:ty, $parse:ident, $fragment:ident, $established:ident, $repair:ident,
        $snat_reply:ident, $reply:ident, $refused:ident, $direct:ident, $new_flow:ident, $open_flow:ident, $translate:ident, $existing:ident, $frontend:ident, $refuse:ident, $reset:ident, $send:ident, $icmp:ident,
        $icmp_forward:ident, $echo:ident, $encap:ident, $route:ident, $hash:ident, $find:ident, $end:ident, $touch:ident, $unlink:ident, $prefetch:ident, $find_in:ident, $add_key:ident, $take_slot:ident, $conflicting:ident,
        $move_window:ident, $scan:ident, $claim:ident, $try_ports:ident, $try_port:ident, $ipsec:ident, $source:ident
    ) => {
        stage!($family, $parse(), |maps, frame, ctx| pipeline::parse_pulled(maps, frame, ctx) as u32);
        stage!($family, $fragment(is_first: u32), |maps, frame, ctx| encode_stop(if is_first != 0 {
            fragment::first(maps, frame, ctx)
        } else {
            fragment::later(maps, frame, ctx)
        }));
        stage!($family, $established(again: u32), |maps, frame, ctx| {
            let lookup = if again != 0 { Lookup::Again } else { Lookup::First };
            established::established(maps, frame, ctx, lookup).encode()
        });
        stage!($family, $snat_reply(), |maps, frame, ctx| established::snat_reply(maps, frame, ctx).encode());
        stage!($family, $reply(), |maps, frame, ctx| established::reply(maps, frame, ctx).encode());
        stage!($family, $refused(), |maps, frame, ctx| u32::from(eject::handle_refusal(maps, frame, ctx)));
        stage!($family, $direct(way: u32), |maps, frame, ctx| {
            direct::direct(maps, frame, ctx, DirectCase::decode(way)).encode()
        });
        stage!($family, $new_flow(), |maps, frame, ctx| new_flow::new_flow(maps, frame, ctx).encode());
        stage!($family, $open_flow(), |maps, frame, ctx| open_flow::open_flow(maps, frame, ctx).encode());
        stage!($family, $translate(), |maps, frame, ctx| open_flow::translate(maps, frame, ctx).encode());
        stage!($family, $refuse(too_big: u32), |maps, frame, ctx| {
            let refusal = if too_big != 0 { Refusal::TooBig } else { Refusal::PortUnreachable };
            refuse::refuse(maps, frame, ctx, refusal).encode()
        });
        stage!($family, $reset(), |maps, frame, ctx| reset::reset(maps, frame, ctx).encode());
        stage!($family, $send(inwards: u32), |_maps, frame, ctx| {
            pipeline::send::<Skb, $family>(frame, ctx, inwards != 0).encode()
        });
        stage!($family, $icmp(incoming: u32), |maps, frame, ctx| {
            icmp::translate_error(maps, frame, ctx, incoming != 0).encode()
        });
        stage!($family, $echo(incoming: u32), |maps, frame, _ctx| echo::answer(maps, frame, incoming != 0).encode());
        stage!($family, $icmp_forward(), |maps, frame, ctx| icmp::forward_error(maps, frame, ctx).encode());

        stage!($family, $source(ends: u32), |maps, frame, ctx| {
            source::choose(maps, frame, ctx, ends);
            0
        });

        stage!($family, $encap(), |maps, frame, ctx| tunnel::encapsulate(maps, frame, ctx).encode());

        // Without the packet as an argument: the compiler does not pass an unused argument, and the verifier requires it.
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $repair(ctx: Ctx<$family>) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            if let Some(ctx) = unsafe { ctx.as_mut() } {
                established::repair_reply_key(Kernel::<$family>::new(), ctx);
            }
            0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $existing(ctx: Ctx<$family>) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(ctx) = (unsafe { ctx.as_mut() }) else { return 0 };
            open_flow::existing(Kernel::<$family>::new(), ctx) as u32
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $frontend(ctx: Ctx<$family>, outside: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            if let Some(ctx) = unsafe { ctx.as_mut() } {
                lookup::packet_frontend(Kernel::<$family>::new(), ctx, outside != 0);
            }
            0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $route(
            skb: *mut __sk_buff,
            tuple: *const Tuple<$words>,
            length: u32,
            route: *mut Route,
        ) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let (Some(tuple), Some(route)) = (unsafe { (tuple.as_ref(), route.as_mut()) }) else {
                return Fib::NoRoute as u32;
            };
            forward::find_route(Kernel::<$family>::new(), Skb::from_raw(skb), tuple, length, route) as u32
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $ipsec(tuple: *const Tuple<$words>) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(tuple) = (unsafe { tuple.as_ref() }) else { return 1 };
            let node = Kernel::<$family>::new().node();
            u32::from(node.is_some_and(|node| node.has_ipsec_policy(&tuple.src, &tuple.dst)))
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $hash(key: *const FlowKey<$words>) -> u64 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let (Some(key), Some(config)) = (unsafe { key.as_ref() }, Kernel::<$family>::new().config()) else {
                return 0;
            };
            key.hash(config.flow_seed)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $find(key: *const FlowKey<$words>, hash: u64) -> u64 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(key) = (unsafe { key.as_ref() }) else { return index::NO_FLOW_GENERATION };
            track::find_key(Kernel::<$family>::new(), key, hash)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $find_in(bucket: u32, tag: u32, key: *const FlowKey<$words>) -> u64 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(key) = (unsafe { key.as_ref() }) else { return index::NO_FLOW_GENERATION };
            index::find_in(Kernel::<$family>::new(), bucket, tag, key)
        }

        step!($family, $end(index: u32, state: u64, removes: u32) -> u32, end_flow);
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $touch(
            packet: *const Packet<$words>,
            index: u32,
            state: u64,
            direction: u32,
        ) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            if let Some(packet) = unsafe { packet.as_ref() } {
                track::touch(Kernel::<$family>::new(), packet, index, state, direction);
            }
            0
        }

        step!($family, $unlink(index: u32) -> u32, unlink);
        step!($family, $prefetch(hash: u64, reply_hash: u64) -> u32, prefetch);
        step!($family, $add_key(flow: u32, direction: u32, hash: u64) -> u32, index::add);
        step!($family, $take_slot(bucket: u32, pending: u32, stale: u32) -> u32, take_slot_in);
        step!($family, $conflicting(flow: u32, direction: u32, own: u32, bucket: u32) -> u32, index::conflicting_entry);
        step!($family, $move_window(skip: u32, far: u32) -> u64, move_window);
        step!($family, $scan(start: u32, room: u32, now: u32) -> u64, evict::scan);
        step!($family, $claim(now: u32) -> u32, evict::claim);
        step!($family, $try_ports(index: u32, tries: u32, snat: u32) -> u32, open::try_ports);
        step!($family, $try_port(index: u32, tries: u32, snat: u32) -> u32, open::try_port);

        impl Routing<Skb> for Kernel<$family> {
            #[inline(always)]
            fn find_route(self, frame: Skb, tuple: &Tuple<$words>, length: u32, route: &mut Route) -> Fib {
                decode_fib($route(frame.raw(), tuple, length, route))
            }
        }

        impl NewFlows<Skb> for Kernel<$family> {
            #[inline(always)]
            fn existing(self, ctx: &mut PacketCtx<$words>) -> Existing {
                match $existing(ctx) {
                    0 => Existing::None,
                    1 => Existing::GoesOn,
                    2 => Existing::LostReplyKey,
                    _ => Existing::Retried,
                }
            }

            #[inline(always)]
            fn choose_source(self, frame: Skb, ctx: &mut PacketCtx<$words>, ends: u32) {
                $source(frame.raw(), ctx, ends);
            }
        }

        impl Stages<Skb> for Kernel<$family> {
            #[inline(always)]
            fn parse_pulled(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> Parsed {
                decode_parsed($parse(frame.raw(), ctx))
            }

            #[inline(always)]
            fn first_fragment(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> Result<(), Stop> {
                decode_stop($fragment(frame.raw(), ctx, 1))
            }

            #[inline(always)]
            fn later_fragment(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> Result<(), Stop> {
                decode_stop($fragment(frame.raw(), ctx, 0))
            }

            #[inline(always)]
            fn established(self, frame: Skb, ctx: &mut PacketCtx<$words>, lookup: Lookup) -> StepCode {
                StepCode($established(frame.raw(), ctx, u32::from(lookup == Lookup::Again)))
            }

            #[inline(always)]
            fn repair_reply_key(self, _frame: Skb, ctx: &mut PacketCtx<$words>) {
                $repair(ctx);
            }

            #[inline(always)]
            fn snat_reply(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($snat_reply(frame.raw(), ctx))
            }

            #[inline(always)]
            fn refused(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> bool {
                $refused(frame.raw(), ctx) != 0
            }

            #[inline(always)]
            fn reply(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($reply(frame.raw(), ctx))
            }

            #[inline(always)]
            fn direct(self, frame: Skb, ctx: &mut PacketCtx<$words>, way: DirectCase) -> StepCode {
                StepCode($direct(frame.raw(), ctx, way as u32))
            }

            #[inline(always)]
            fn new_flow(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($new_flow(frame.raw(), ctx))
            }

            #[inline(always)]
            fn open_flow(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($open_flow(frame.raw(), ctx))
            }

            #[inline(always)]
            fn translate(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($translate(frame.raw(), ctx))
            }

            #[inline(always)]
            fn refuse(self, frame: Skb, ctx: &mut PacketCtx<$words>, refusal: Refusal) -> StepCode {
                StepCode($refuse(frame.raw(), ctx, u32::from(refusal == Refusal::TooBig)))
            }

            #[inline(always)]
            fn reset(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($reset(frame.raw(), ctx))
            }

            #[inline(always)]
            fn send(self, frame: Skb, ctx: &mut PacketCtx<$words>, inwards: bool) -> StepCode {
                StepCode($send(frame.raw(), ctx, u32::from(inwards)))
            }

            #[inline(always)]
            fn encapsulate(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($encap(frame.raw(), ctx))
            }

            #[inline(always)]
            fn translate_error(self, frame: Skb, ctx: &mut PacketCtx<$words>, incoming: bool) -> StepCode {
                StepCode($icmp(frame.raw(), ctx, u32::from(incoming)))
            }

            #[inline(always)]
            fn answer_echo(self, frame: Skb, ctx: &mut PacketCtx<$words>, incoming: bool) -> StepCode {
                StepCode($echo(frame.raw(), ctx, u32::from(incoming)))
            }

            #[inline(always)]
            fn forward_error(self, frame: Skb, ctx: &mut PacketCtx<$words>) -> StepCode {
                StepCode($icmp_forward(frame.raw(), ctx))
            }
        }
    };
}

family!(
    V4,
    [u32; 1],
    parse4,
    fragment4,
    established4,
    repair4,
    snat_reply4,
    reply4,
    refused4,
    direct4,
    new_flow4,
    open_flow4,
    translate4,
    existing4,
    frontend4,
    refuse4,
    reset4,
    send4,
    icmp4,
    icmp_forward4,
    echo4,
    encap4,
    route4,
    hash_key4,
    find4,
    end4,
    touch4,
    unlink4,
    prefetch4,
    find_in4,
    add_key4,
    take_slot4,
    conflicting4,
    move_window4,
    scan4,
    claim4,
    try_ports4,
    try_port4,
    ipsec4,
    source4
);
family!(
    V6,
    [u32; 4],
    parse6,
    fragment6,
    established6,
    repair6,
    snat_reply6,
    reply6,
    refused6,
    direct6,
    new_flow6,
    open_flow6,
    translate6,
    existing6,
    frontend6,
    refuse6,
    reset6,
    send6,
    icmp6,
    icmp_forward6,
    echo6,
    encap6,
    route6,
    hash_key6,
    find6,
    end6,
    touch6,
    unlink6,
    prefetch6,
    find_in6,
    add_key6,
    take_slot6,
    conflicting6,
    move_window6,
    scan6,
    claim6,
    try_ports6,
    try_port6,
    ipsec6,
    source6
);
