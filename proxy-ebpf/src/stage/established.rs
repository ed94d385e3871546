//! Translates packets of existing flows by the flow's entry, in both directions.

use core::mem::swap;

use proxy_common::config::{CONFIG_IPSEC, CONFIG_POLICY_ROUTES, CONFIG_SOURCES};
use proxy_common::conntrack::{SEEN_REPLY, is_closed, is_watched, tcp};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_DIRECT, STATE_LOCAL, STATE_SNAT, STATE_SYN,
    is_encapsulated, is_guess, is_masqueraded, is_rerouted, tunnel_hops,
};
use proxy_common::reason::Reason;
use proxy_common::{Address, PROTO_SCTP, PROTO_TCP};

use super::classify;
use super::eject;
use super::forward::{self, Routing};
use super::martian;
use super::translate::{self, Hop, Rewrite};
use crate::context::{MAX_HOPS, NO_HASH, Packet, PacketCtx, Tuple, encapsulated};
use crate::env::{Counters, FlowTable, Time, Words};
use crate::flow::track::{self, Tracked, is_syn};
use crate::frame::{Fib, Frame, Route};
use crate::header::same;
use crate::net::{tcp as tcp_header, udp};
use crate::report;
use crate::shared::opaque;
use crate::step::Step;

/// Whether the packet's flow is looked up for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The first lookup.
    First,
    /// A repeated lookup: the flow is known to exist, since it has just begun, or its reply key was repaired.
    Again,
}

/// Translates a client's packet that may belong to a flow.
#[inline(always)]
pub fn established<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, lookup: Lookup) -> Step
where
    M: FlowTable + Counters + Routing<F>,
    F: Frame,
{
    match of_flow(maps, frame, ctx, lookup) {
        Step::NewFlow => without_flow(maps, ctx),
        step => step,
    }
}

/// Translates a client's packet if it belongs to a flow; [`Step::NewFlow`] if it does not.
///
/// A SYN mostly has no flow yet: its flow is looked up only if the new flow finds its key taken.
#[inline(always)]
fn of_flow<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, lookup: Lookup) -> Step
where
    M: FlowTable + Counters + Routing<F>,
    F: Frame,
{
    let Some(time) = maps.time() else { return Step::Pass };
    // This check is not in `classify`, so that foreign packets do not pay for it.
    if frame.has_vlan_tag() {
        return Step::Pass;
    }
    if lookup == Lookup::First && is_syn(ctx.packet.tcp_flags) && maps.opens_flows() {
        ctx.hash = NO_HASH;
        return Step::NewFlow;
    }
    ctx.hash = time.hash(&ctx.packet.key);
    let found = if F::EARLY {
        track::find_untouched(maps, &ctx.packet.key, ctx.hash, time)
    } else {
        track::find(maps, &ctx.packet.key, ctx.hash, time)
    };
    let Some(flow) = found else { return Step::NewFlow };
    // The number is hidden from the compiler: a comparison of the flow's bits themselves would give the verifier two states.
    let bits = opaque(u64::from(flow.bits())) as u32;
    let returns = !F::EARLY && is_encapsulated(bits) && opaque(u64::from(has_returned(ctx, bits))) != 0;
    // `existing` has already compared the Service of a SYN with the flow's, so the flow's own Service is passed here.
    let continues = !returns && flow.continues(ctx.packet.tcp_flags, flow.service(), time);
    if !continues || flow.needs_frontend_check(time) && !keeps_frontend(maps, ctx, &flow, time) {
        if F::EARLY {
            return Step::Pass;
        }
        if !returns && flow.is_to_be_moved(ctx.packet.tcp_flags) {
            return Step::Move;
        }
        if !returns && flow.is_to_be_reset(ctx.packet.tcp_flags) {
            ctx.service = flow.service();
            ctx.plan.bits = flow.bits();
            return Step::Reset;
        }
        flow.expire();
        return Step::NewFlow;
    }
    if lookup == Lookup::First && flow.has_lost_reply_key(time) {
        return Step::RepairReplyKey;
    }
    if F::EARLY && is_encapsulated(bits) {
        // The packet is counted when it certainly leaves.
        ctx.found = flow.number();
        return flow.to_backend().map_or(Step::Pass, |to| encapsulate(ctx, bits, &to));
    }
    let flags = time.config.flags;
    if F::EARLY && !can_forward(maps, frame, ctx, flow.bits(), flow.to_backend(), Some(flags)) {
        return Step::Pass;
    }
    if martian::is_forged(maps, frame, ctx, flow.bits(), time.config) {
        return Step::DropFor(Reason::MartianSource);
    }
    touch(maps, &flow, ctx, DIRECTION_FORWARD, time);
    // A connection of this node itself is counted for Service 0, which is never shown, and its rewrite changes nothing: a
    // test for it would cost each packet a branch.
    report::forwarded(maps, flow.service(), ctx.packet.length);
    match flow.to_backend() {
        Some(mut to) if F::EARLY || flow.bits() & STATE_SNAT != 0 => {
            forward_to(maps, frame, ctx, &mut to, Some(flags))
        }
        Some(to) if is_encapsulated(flow.bits()) => encapsulate(ctx, flow.bits(), &to),
        Some(to) => {
            let step = deliver::<F, M::Family>(frame, ctx, &to);
            // After the translation, which the verifier would otherwise walk through twice.
            if is_masqueraded(flow.bits())
                && let Some(config) = maps.config()
            {
                frame.mark(config.masquerade_mark);
            }
            step
        }
        // Another CPU evicted the flow after the lookup.
        None => Step::NewFlow,
    }
}

/// Notes the endpoint of a flow with these bits, to whose node the packet is to be encapsulated.
#[inline(always)]
fn encapsulate<A: Address>(ctx: &mut PacketCtx<A>, bits: u32, to: &Tuple<A>) -> Step {
    ctx.plan.reply.src = to.dst;
    ctx.plan.reply.src_port = to.dst_port;
    ctx.plan.bits = bits;
    Step::Encapsulate
}

/// Whether an encapsulated packet is not sent on by this flow to another node: nodes with different tables would send it in a
/// circle. A TCP flow that did not begin with a SYN is a guess. It holds for packets that were encapsulated as often as the first
/// one; others have been at more nodes, and return.
#[inline(always)]
fn has_returned<A>(ctx: &PacketCtx<A>, bits: u32) -> bool {
    let hops = encapsulated(ctx.tunnelled);
    hops >= MAX_HOPS || is_guess(ctx.packet.key.proto, bits) && hops > tunnel_hops(bits)
}

/// Whether the packet's frontend still belongs to the Service of its flow. Both scopes of a frontend belong to one Service.
#[inline(always)]
fn keeps_frontend<M: FlowTable>(
    maps: M,
    ctx: &mut PacketCtx<Words<M>>,
    flow: &Tracked<M>,
    time: Time,
) -> bool {
    maps.packet_frontend(ctx, false);
    let keeps = ctx.frontend.id == flow.service();
    // Otherwise the next hook looks it up again, and ends the flow.
    if keeps {
        flow.note_frontend_check(time);
    }
    keeps
}

/// Returns the next stage for a packet to a frontend without a flow of its client. A bit in the prefilter may have been set
/// by another tuple, so the packet may still be a reply.
#[inline(always)]
fn without_flow<M: FlowTable>(maps: M, ctx: &PacketCtx<Words<M>>) -> Step {
    classify::may_be_snat_reply(maps, &ctx.packet).map_or(Step::NewFlow, Step::from)
}

/// Adds the lost reply key of the packet's flow to the index again.
#[inline(always)]
pub fn repair_reply_key<M: FlowTable>(maps: M, ctx: &PacketCtx<Words<M>>) {
    if let Some(time) = maps.time()
        && let Some(flow) = track::find_called(maps, &ctx.packet.key)
    {
        flow.repair_reply_key(time);
    }
}

/// Translates a packet at egress if it is a backend's reply. Returns [`Step::NewFlow`] if it belongs to no flow.
#[inline(always)]
pub fn reply<M: FlowTable + Counters + Routing<F>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
) -> Step {
    let Some(time) = maps.time() else { return Step::Pass };
    let Some(flow) = track::tracked(maps, ctx.found, time) else { return Step::NewFlow };
    if may_have_successor(maps, &flow, time) {
        return Step::NewFlow;
    }
    if is_closed(flow.bits()) && !flow.has_numbers_of(&ctx.packet, DIRECTION_REPLY) {
        // The packet belongs to a connection that the client made directly to the backend.
        return Step::Pass;
    }
    if is_of_another_connection(&ctx.packet, flow.bits()) {
        return Step::DirectReply;
    }
    if eject::check_refusal(maps, &flow, &ctx.packet) {
        return Step::Refused;
    }
    touch(maps, &flow, ctx, DIRECTION_REPLY, time);
    if flow.bits() & STATE_DIRECT == 0 {
        report::replied(maps, flow.service(), ctx.packet.length);
    }
    match flow.to_client() {
        // A direct flow may keep its source port.
        Some(to) if flow.bits() & STATE_DIRECT != 0 && to.dst_port == ctx.packet.key.dst_port => Step::Pass,
        Some(to) => {
            // The source is a frontend's address and port from now on, which the hook of a device below this one sees, too.
            frame.set_translated();
            // The stack has routed the packet, and looked for policies, by the endpoint's address.
            if time.config.flags & (CONFIG_IPSEC | CONFIG_POLICY_ROUTES) != 0
                && (is_rerouted(flow.bits(), frame.ifindex())
                    || time.config.flags & CONFIG_IPSEC != 0 && maps.matches_ipsec_policy(&to))
            {
                let found = maps.find_route(frame, &to, ctx.packet.l4, &mut ctx.route);
                if found == Fib::Found && ctx.route.ifindex != frame.ifindex() {
                    return match deliver::<F, M::Family>(frame, ctx, &to) {
                        Step::Pass => Step::Forward,
                        step => step,
                    };
                }
            }
            deliver::<F, M::Family>(frame, ctx, &to)
        }
        None => Step::NewFlow,
    }
}

/// Whether a reply to a closed flow may belong to another connection by now: if other rules begin connections, they do not
/// know that the ports of this flow are in quarantine. The last segments of a connection arrive within a second. They stay
/// with this flow: the node would answer them with a RST.
#[inline(always)]
fn may_have_successor<M: FlowTable>(maps: M, flow: &Tracked<M>, time: Time) -> bool {
    !maps.opens_flows() && is_closed(flow.bits()) && flow.is_silent(time)
}

/// Whether a reply cannot be the answer to the SYN that created its flow. Such a packet belongs to a direct connection of
/// the client to the backend, from the same source port.
#[inline(always)]
pub fn is_of_another_connection<A>(packet: &Packet<A>, bits: u32) -> bool {
    bits & (STATE_SYN | SEEN_REPLY) == STATE_SYN && packet.tcp_flags & (tcp::SYN | tcp::RST) == 0
}

/// Translates a packet to a port of this node if it is the reply to a packet that was forwarded under the node's address
/// (SNAT). Returns [`Step::NewFlow`] if it is not.
#[inline(always)]
pub fn snat_reply<M: FlowTable + Counters + Routing<F>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
) -> Step {
    let Some(time) = maps.time() else { return Step::Pass };
    if frame.has_vlan_tag() {
        return Step::Pass;
    }
    let key = FlowKey { direction: DIRECTION_REPLY, ..ctx.packet.key };
    let found = if F::EARLY {
        track::find_untouched(maps, &key, time.hash(&key), time)
    } else {
        track::find_hashed(maps, &key, time.hash(&key))
    };
    let Some(flow) = found else { return Step::NewFlow };
    if flow.bits() & STATE_SNAT == 0 || may_have_successor(maps, &flow, time) {
        return Step::NewFlow;
    }
    if martian::is_forged(maps, frame, ctx, flow.bits(), time.config) {
        return Step::DropFor(Reason::MartianSource);
    }
    if F::EARLY && !can_forward(maps, frame, ctx, flow.bits(), flow.to_client(), None) {
        return Step::Pass;
    }
    if F::EARLY {
        // The first reply of a connection: the next hook processes it.
        if is_watched(flow.bits()) {
            return Step::Pass;
        }
    } else if eject::check_refusal(maps, &flow, &ctx.packet) {
        return Step::Refused;
    }
    touch(maps, &flow, ctx, DIRECTION_REPLY, time);
    if flow.bits() & STATE_DIRECT == 0 {
        report::replied(maps, flow.service(), ctx.packet.length);
    }
    let Some(mut to) = flow.to_client() else { return Step::NewFlow };
    if F::EARLY || flow.bits() & STATE_LOCAL == 0 {
        forward_to(maps, frame, ctx, &mut to, None)
    } else {
        deliver_local(maps, frame, ctx, &mut to)
    }
}

/// Updates the flow for the packet, and counts a RST or FIN out of the window.
#[inline(always)]
fn touch<M: FlowTable + Counters>(
    maps: M,
    flow: &Tracked<M>,
    ctx: &PacketCtx<Words<M>>,
    direction: u8,
    time: Time,
) {
    if !flow.touch(&ctx.packet, direction, time) {
        report::refusal(maps, flow.service(), Reason::OutOfWindow);
    }
}

/// Rewrites a packet that then continues up the stack, or out of the device as before.
#[inline(always)]
pub fn deliver<F: Frame, Fam: Rewrite>(
    frame: F,
    ctx: &PacketCtx<Fam::Words>,
    to: &Tuple<Fam::Words>,
) -> Step {
    match translate::rewrite::<F, Fam>(frame, &ctx.packet, to, Hop::Keep) {
        Ok(()) => Step::Pass,
        Err(reason) => Step::DropFor(reason),
    }
}

/// Whether an early hook can send a packet of a flow with these bits, which becomes `to`. If so, `ctx.route` is its route.
#[inline(always)]
fn can_forward<M: Routing<F>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    bits: u32,
    to: Option<Tuple<Words<M>>>,
    flags: Option<u32>,
) -> bool {
    let Some(mut to) = to else { return false };
    if bits & (STATE_SNAT | STATE_LOCAL) != STATE_SNAT {
        return false;
    }
    if flags.is_some_and(routes_by_client) {
        to.src = ctx.packet.key.src;
    }
    maps.find_route(frame, &to, ctx.packet.length, &mut ctx.route) == Fib::Found && frame.can_send(&ctx.route)
}

/// Whether a client's packet that gets SNAT takes the route of its own source, as with netfilter, which routes before it translates
/// the source: there are rules for routes, or uplinks with addresses of their own. Not if the stack may route the packet, which
/// has its new source then, as `IPsec` policies need it. `flags`: those of the configuration. Each call
/// is opaque to the compiler, and without a branch of its own: a result that is kept would be two states for the verifier.
#[inline(always)]
fn routes_by_client(flags: u32) -> bool {
    let flags = opaque(u64::from(flags)) as u32;
    let has = |flag: u32| flags >> flag.trailing_zeros();
    (has(CONFIG_SOURCES) | has(CONFIG_POLICY_ROUTES)) & !has(CONFIG_IPSEC) & 1 != 0
}

/// Rewrites a packet that this node forwards. The route is looked up before the rewrite, so that a "too big" error quotes
/// the packet as the client sent it. `flags`: of a client's packet, see [`routes_by_client`].
#[inline(always)]
fn forward_to<M, F>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    to: &mut Tuple<Words<M>>,
    flags: Option<u32>,
) -> Step
where
    M: Routing<F>,
    F: Frame,
{
    // An early hook has looked up the route already.
    let mut found = if F::EARLY { Fib::Found } else { find_route(maps, frame, ctx, to, flags) };
    if found == Fib::TooBig && may_be_cut::<F, Words<M>>(frame) {
        ctx.route = Route::BY_STACK;
        found = Fib::Found;
    }
    match found {
        Fib::Found => match translate::rewrite::<F, M::Family>(frame, &ctx.packet, to, Hop::Decrement) {
            Ok(()) => Step::Forward,
            Err(Reason::TtlExceeded) => Step::TimeExceeded,
            Err(reason) => Step::DropFor(reason),
        },
        Fib::TooBig => Step::TooBig,
        Fib::NoRoute => Step::DropFor(Reason::NoRoute),
        Fib::Unreachable => Step::Unreachable,
    }
}

/// Whether a router cuts a packet that is too long for the next link: IPv4 without "don't fragment".
#[inline(always)]
fn may_be_cut<F: Frame, A>(frame: F) -> bool {
    let mut fragment = 0u16;
    let at = frame.link_header() as u32 + FRAGMENT_AT;
    size_of::<A>() == size_of::<u32>()
        && frame.load(at, &mut fragment, size_of::<u16>() as u32).is_ok()
        && u16::from_be(fragment) & IPV4_DONT == 0
}

/// Offset of the fragment field in an IPv4 header.
const FRAGMENT_AT: u32 = 6;
/// "Don't fragment", in the fragment field of an IPv4 header.
const IPV4_DONT: u16 = 0x4000;

/// Finds the route of a packet that becomes `to`; if the route is cached, without a BPF-to-BPF call.
#[inline(always)]
fn find_route<M, F>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    to: &mut Tuple<Words<M>>,
    flags: Option<u32>,
) -> Fib
where
    M: Routing<F>,
    F: Frame,
{
    let length = longest(frame, ctx);
    // In place: a second tuple would not fit on the BPF stack.
    if flags.is_some_and(routes_by_client) {
        swap(&mut to.src, &mut ctx.packet.key.src);
    }
    let found = match forward::known_route(maps, frame, to, length, maps.jiffies()) {
        Some(route) => {
            ctx.route = *route;
            Fib::Found
        }
        None => maps.find_route(frame, to, length, &mut ctx.route),
    };
    if flags.is_some_and(routes_by_client) {
        swap(&mut to.src, &mut ctx.packet.key.src);
    }
    found
}

/// Rewrites a reply to a process of this node, which goes up the stack on the device that leads to its new source: on
/// another device, the kernel may drop it as a martian (`rp_filter`).
#[inline(always)]
fn deliver_local<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, to: &mut Tuple<Words<M>>) -> Step
where
    M: Routing<F>,
    F: Frame,
{
    let key = &ctx.packet.key;
    if to.dst_port == key.dst_port && to.src_port == key.src_port && same(&to.src, &key.src) {
        // A direct flow that keeps its source port.
        return Step::Pass;
    }
    // Reverses the tuple in place: a second tuple would not fit on the BPF stack.
    swap(&mut to.src, &mut to.dst);
    let found = maps.find_route(frame, to, ctx.packet.l4, &mut ctx.route);
    swap(&mut to.src, &mut to.dst);
    match deliver::<F, M::Family>(frame, ctx, to) {
        Step::Pass
            if found == Fib::Found && ctx.route.ifindex != frame.ifindex() && ctx.route.resolved != 0 =>
        {
            Step::DeliverLocal
        }
        step => step,
    }
}

/// Returns the length of the longest IP packet that leaves: the kernel segments a GSO packet only after this hook. All fragments
/// of a packet take one way: `nf_conntrack` waits for those that miss.
#[inline(always)]
pub fn longest<F: Frame, A: Address>(frame: F, ctx: &PacketCtx<A>) -> u32 {
    let (packet, segment) = (&ctx.packet, frame.gso_size());
    if segment == 0 {
        return if packet.is_later_fragment() { ctx.first_length } else { packet.length };
    }
    if packet.key.proto == PROTO_SCTP {
        // An SCTP packet does not tell the length of each segment. The segments were made to fit the route to the Service's
        // address.
        return packet.l4;
    }
    let mut header = udp::HEADER as u32;
    if packet.key.proto == PROTO_TCP {
        let mut offset = 0u8;
        // A packet with an incomplete TCP header is not segmented.
        let _ = frame.load(packet.l4 + tcp_header::OFFSET, &mut offset, 1);
        header = u32::from(offset >> 4) * 4;
    }
    let headers = packet.l4 - frame.link_header() as u32;
    // The kernel marks an IPv6 packet of more than 64 KiB by an extension header (BIG TCP), and removes it before it cuts the
    // packet. Without branches: each would be a state for the verifier.
    let is_v6 = size_of::<A>() > size_of::<u32>();
    let exceeds = |limit: u32, value: u32| limit.wrapping_sub(value) >> (u32::BITS - 1);
    let is_jumbo = exceeds(V6_HEADER, headers) & exceeds(V6_HEADER + MAX_PAYLOAD, packet.length);
    headers - if is_v6 { is_jumbo * JUMBO } else { 0 } + header + segment
}

/// Bytes of an IPv6 header without extensions.
const V6_HEADER: u32 = 40;
/// The largest payload that an IPv6 header can state.
const MAX_PAYLOAD: u32 = u16::MAX as u32;
/// Bytes of the extension header that states a larger payload (`struct hop_jumbo_hdr`).
const JUMBO: u32 = 8;

impl<M: FlowTable> Tracked<M> {
    /// Returns the id of the Service port.
    #[inline(always)]
    pub fn service(&self) -> u32 {
        use crate::flow::memory::EntryRef as _;
        self.entry.service()
    }
}
