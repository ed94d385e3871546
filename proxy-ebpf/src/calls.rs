//! The BPF-to-BPF calls, listed once. In the kernel, each is a "global" function for each family: the verifier checks it once,
//! separately, and it has its own stack frame. If the compiler inlined the function at each call, the verifier would process it
//! again from every state that gets there. On the host, each is an ordinary call.
//!
//! A line of a list is a method of a trait, without the handle, and the function that it calls with the handle as the first
//! argument. A list is used with a macro that makes something of each line:
//!
//! * [`declare`] the methods of a trait,
//! * [`direct`] methods that call the functions directly,
//! * `global` and `through_global` (`kernel/calls.rs`) the kernel's global functions, and methods that call them.
//!
//! Types are resolved where a list is used. `$words` is an address of the family as words, `$frame` the kind of frame.

/// Declares the methods of a list.
macro_rules! declare {
    ([] $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $function:ident $(:: $path:ident)*;)*) => {
        $(
            #[doc = concat!(
                "Calls [`", stringify!($function $(:: $path)*), "`](crate::", stringify!($function $(:: $path)*), ")."
            )]
            fn $name(self $(, $argument: $type)*) -> $result;
        )*
    };
}

/// Implements the methods of a list by direct calls.
#[cfg(any(target_arch = "bpf", test, feature = "host"))]
macro_rules! direct {
    ([] $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $($path:ident)::+;)*) => {
        $(
            #[inline(always)]
            fn $name(self $(, $argument: $type)*) -> $result {
                $crate::$($path)::+(self $(, $argument)*).into()
            }
        )*
    };
}

/// Methods of [`Node`](crate::env::Node).
macro_rules! node_calls {
    ($make:ident!($($with:tt)*), $words:ty) => {
        $make! { [$($with)*]
            fn matches_ipsec_policy(tuple: &Tuple<$words>) -> bool = stage::forward::matches_ipsec_policy;
        }
    };
}

/// Methods of [`Health`](crate::env::Health). Both families share the maps, and so the functions.
macro_rules! health_calls {
    ($make:ident!($($with:tt)*)) => {
        $make! { [$($with)*]
            fn rank_slow(id: u32, client: u32, random: u32) -> u32 = select::health::rank_slow;
            fn note_failure(id: u32, client: u32, failure: u32) -> u32 = select::health::note_failure;
            fn answered(id: u32, client: u32) -> () = select::health::answered;
        }
    };
}

/// Methods of [`Services`](crate::env::Services).
macro_rules! service_calls {
    ($make:ident!($($with:tt)*), $words:ty) => {
        $make! { [$($with)*]
            fn packet_frontend(ctx: &mut PacketCtx<$words>, outside: bool) -> () = select::lookup::packet_frontend;
            fn backend_is_frontend(id: u32) -> bool = select::lookup::backend_is_frontend;
            fn first_id(service: &ServiceEntry, selector: u32) -> u32 = select::backend::first_id;
            fn less_loaded(service: &ServiceEntry, slot: u32, random: u32) -> u32 = select::load::less_loaded;
            fn table_id(service: &ServiceEntry, number: u32, selector: u32) -> u32 = select::backend::table_id;
            fn chance(service: &ServiceEntry, id: u32, from: u32) -> u32 = select::backend::chance;
            fn previous_choice(service: &ServiceEntry, selector: u32) -> u32 = select::backend::previous_choice;
            fn rank(service: &ServiceEntry, id: u32, client: u32, random: u32) -> u32 = select::backend::rank;
            fn has_tag(service: &ServiceEntry, id: u32, tag: u32, of: u32) -> u32 = select::backend::has_tag;
            fn select_id(service: &ServiceEntry, selector: u32, client: u32) -> u32 = select::backend::select_id;
            fn select_for(ctx: &PacketCtx<$words>, random: u32) -> u32 = select::backend::select_for;
            fn tagged(ctx: &PacketCtx<$words>) -> u32 = select::backend::tagged;
            fn second_chance(ctx: &PacketCtx<$words>, id: u32) -> u32 = select::backend::second_chance;
        }
    };
}

/// Methods of [`FlowTable`](crate::env::FlowTable).
macro_rules! flow_calls {
    ($make:ident!($($with:tt)*), $words:ty) => {
        $make! { [$($with)*]
            fn hash_key(key: &FlowKey<$words>) -> u64 = flow::track::hash_key;
            fn find_key(key: &FlowKey<$words>, hash: u64) -> u64 = flow::track::find_key;
            fn end_flow(index: u32, state: u64, removes: bool) -> bool = flow::track::end;
            fn touch_flow(packet: &Packet<$words>, index: u32, state: u64, direction: u32) -> bool = flow::track::touch;
            fn close_flow(index: u32, state: u64, closes: u32, was: u64) -> () = flow::track::close;
            fn unlink(index: u32) -> () = flow::index::unlink;
            fn prefetch(hash: u64, reply_hash: u64) -> () = flow::prefetch;
            fn find_in(bucket: u32, tag: u32, key: &FlowKey<$words>) -> u64 = flow::index::find_in;
            fn add_key(flow: u32, direction: u32, hash: u64) -> u32 = flow::index::add;
            fn take_slot_in(bucket: u32, pending: u32, stale: bool) -> u32 = flow::index::take_slot_in;
            fn conflicting_entry(flow: u32, direction: u32, own: u32, bucket: u32) -> u32 = flow::index::conflicting_entry;
            fn scan(start: u32, room: u32, now: u32) -> u64 = flow::evict::scan;
            fn scan_elsewhere(start: u32, now: u32) -> u64 = flow::evict::scan_elsewhere;
            fn move_window(skip: u32, far: bool) -> u64 = flow::evict::move_window;
            fn claim(now: u32) -> u32 = flow::evict::claim;
            fn try_ports(index: u32, tries: u32, plan: u32) -> u32 = flow::open::try_ports;
            fn try_port(index: u32, tries: u32, plan: u32) -> u32 = flow::open::try_port;
        }
    };
}

/// Methods of [`Routing`](crate::stage::forward::Routing).
macro_rules! routing_calls {
    ($make:ident!($($with:tt)*), $words:ty, $frame:ty) => {
        $make! { [$($with)*]
            fn find_route(frame: $frame, tuple: &Tuple<$words>, length: u32, route: &mut Route) -> Fib
                = stage::forward::find_route;
            fn is_of_another_device(frame: $frame, ctx: &mut PacketCtx<$words>, by_uplink: bool) -> bool
                = stage::martian::is_of_another_device;
        }
    };
}

/// Methods of [`NewFlows`](crate::stage::existing::NewFlows).
macro_rules! new_flow_calls {
    ($make:ident!($($with:tt)*), $words:ty, $frame:ty) => {
        $make! { [$($with)*]
            fn existing(ctx: &mut PacketCtx<$words>) -> Existing = stage::open_flow::existing;
            fn is_of_socket(frame: $frame, ctx: &PacketCtx<$words>) -> bool = stage::new_flow::is_of_socket;
            fn choose_source(frame: $frame, ctx: &mut PacketCtx<$words>, ends: u32) -> () = stage::source::choose;
        }
    };
}

/// Methods of [`Stages`](crate::pipeline::Stages): the stages of a packet at tc. A function does not get what it does not use:
/// the compiler would not pass it, and the verifier requires it.
macro_rules! stage_calls {
    ($make:ident!($($with:tt)*), $words:ty, $frame:ty) => {
        $make! { [$($with)*]
            fn parse_pulled(frame: $frame, ctx: &mut PacketCtx<$words>) -> Parsed = pipeline::parse_pulled;
            fn first_fragment(frame: $frame, ctx: &PacketCtx<$words>) -> Result<(), Stop> = stage::fragment::first;
            fn later_fragment(frame: $frame, ctx: &mut PacketCtx<$words>) -> Result<(), Stop> = stage::fragment::later;
            fn established(frame: $frame, ctx: &mut PacketCtx<$words>, lookup: Lookup) -> StepCode
                = stage::established::established;
            fn repair_reply_key(ctx: &PacketCtx<$words>) -> () = stage::established::repair_reply_key;
            fn snat_reply(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::established::snat_reply;
            fn reply(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::established::reply;
            fn refused(frame: $frame, ctx: &mut PacketCtx<$words>, by_route: bool) -> bool = stage::eject::handle_refusal;
            fn direct(frame: $frame, ctx: &mut PacketCtx<$words>, case: DirectCase) -> StepCode = stage::direct::direct;
            fn new_flow(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::new_flow::new_flow;
            fn open_flow(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::open_flow::open_flow;
            fn translate(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::open_flow::translate;
            fn refuse(frame: $frame, ctx: &mut PacketCtx<$words>, refusal: Refusal) -> StepCode = stage::refuse::refuse;
            fn reset(frame: $frame, ctx: &PacketCtx<$words>) -> StepCode = stage::reset::reset;
            fn end_at_backend(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::reset::end_at_backend;
            fn send(frame: $frame, ctx: &PacketCtx<$words>, inwards: bool) -> StepCode = pipeline::send;
            fn encapsulate(frame: $frame, ctx: &mut PacketCtx<$words>) -> StepCode = stage::tunnel::encapsulate;
            fn translate_error(frame: $frame, ctx: &mut PacketCtx<$words>, incoming: bool) -> StepCode
                = stage::icmp::translate_error;
            fn forward_error(frame: $frame, ctx: &mut PacketCtx<$words>, incoming: bool) -> StepCode
                = stage::icmp::forward_error;
            fn answer_echo(frame: $frame, incoming: bool) -> StepCode = stage::echo::answer;
        }
    };
}

/// Methods of [`EarlyStages`](crate::early::EarlyStages): the stages of a packet at XDP.
macro_rules! early_calls {
    ($make:ident!($($with:tt)*), $words:ty, $frame:ty) => {
        $make! { [$($with)*]
            fn established(frame: $frame, ctx: &mut PacketCtx<$words>, lookup: Lookup) -> Step = early::established;
            fn snat_reply(frame: $frame, ctx: &mut PacketCtx<$words>) -> Step = early::snat_reply;
            fn new_flow(frame: $frame, ctx: &mut PacketCtx<$words>) -> Step = stage::new_flow::new_flow;
            fn open_flow(frame: $frame, ctx: &mut PacketCtx<$words>) -> Step = stage::open_flow::open_flow;
            fn encapsulate(frame: $frame, ctx: &mut PacketCtx<$words>) -> Step = stage::tunnel::encapsulate;
        }
    };
}

#[cfg(any(target_arch = "bpf", test, feature = "host"))]
pub(crate) use direct;
pub(crate) use {
    declare, early_calls, flow_calls, health_calls, new_flow_calls, node_calls, routing_calls, service_calls,
    stage_calls,
};
