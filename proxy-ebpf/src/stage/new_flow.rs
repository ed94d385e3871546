//! The first packet of a flow: its frontend, whether it is admitted, its backend, and the source address that the backend
//! sees.

use proxy_common::backend::BACKEND_LOCAL;
use proxy_common::config::{CONFIG_OTHER_PROXY, CONFIG_SOURCES};
use proxy_common::conntrack::{may_begin, tcp};
use proxy_common::decide::{self, Path};
use proxy_common::flow::{
    STATE_COUNTS, STATE_DSR, STATE_LOCAL, STATE_SNAT, STATE_TUNNEL_SHIFT, TUNNEL_HOPS_SHIFT, WATCH_INSIDE,
    WATCH_LAST, WATCH_OUTSIDE, is_encapsulated,
};
use proxy_common::health::client;
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::reason::{Reason, Verdict};
use proxy_common::select::by_load;
use proxy_common::service::{KIND_NODE_PORT, SERVICE_EJECTS, SERVICE_RECENT, ServiceEntry};
use proxy_common::{Address as _, Family};
use proxy_common::{PROTO_TCP, PROTO_UDP};

use super::existing::{NewFlows, of_existing};
use super::{classify, martian, source};
use crate::context::{MAX_HOPS, NO_HASH, PacketCtx, encapsulated};
use crate::env::{Time, Words};
use crate::flow::track::is_syn;
use crate::flow::{open, track};
use crate::frame::Frame;
use crate::header::same;
use crate::report;
use crate::select::backend::{self, LAST, SelectedBackend};
use crate::select::{affinity, health, lookup};
use crate::shared::opaque_to_verifier;
use crate::step::Step;

/// Where a packet comes from.
struct Origin {
    from_node: bool,
    /// `from_node` as a number that the verifier does not know.
    local: u32,
    by_uplink: bool,
    outside: bool,
}

/// Processes the first packet of a flow.
///
/// A new flow needs memory that is in no cache: two buckets and an entry. All three are prefetched before the first of them
/// is read, and admission is checked in the meantime. So a SYN comes here before its flow is looked up; if the flow exists,
/// the new flow finds its key taken.
#[inline(always)]
pub fn new_flow<M: NewFlows<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    if frame.has_vlan_tag() {
        return Step::Pass;
    }
    if ctx.packet.is_later_fragment() {
        // A later fragment gets the verdict of its first one: a first fragment to no Service has passed. An encapsulated
        // fragment may be for the address of another node, and this node would forward it there.
        maps.packet_frontend(ctx, false);
        let is_services = ctx.tunnelled != 0
            || ctx.frontend.kind != ServiceEntry::NONE.kind
            || maps.is_service_address(&ctx.packet.key.dst);
        return if is_services {
            Step::DropFor(Reason::FragmentWithoutFirst)
        } else {
            classify::to_endpoint(maps, &ctx.packet).map_or(Step::Pass, Step::from)
        };
    }
    let (Some(time), Some(node)) = (maps.time(), maps.node()) else { return Step::Pass };
    if F::EARLY && node.pods.contains(&ctx.packet.key.src) {
        // The check of this source compares with the device of the route, which may be stacked on this one.
        return Step::Pass;
    }
    let from_node = frame.is_local_origin();
    let by_uplink = !from_node && time.config.is_uplink(frame.ifindex(), |ifindex| maps.device(ifindex));
    // A process of the node is inside, whatever its source address.
    let outside = !from_node && decide::is_outside(by_uplink, time.config.flags, node, &ctx.packet.key.src);
    let unknown = |is: bool| opaque_to_verifier(u64::from(is), u64::from(time.now)) != 0;
    let (by_uplink, outside) = (unknown(by_uplink), unknown(outside));
    let local = opaque_to_verifier(u64::from(from_node), u64::from(time.now)) as u32;
    let origin = Origin { from_node, local, by_uplink, outside };
    maps.packet_frontend(ctx, outside);
    let is_frontend = ctx.frontend.kind != ServiceEntry::NONE.kind;
    let is_midway = ctx.packet.key.proto == PROTO_TCP && ctx.packet.tcp_flags & tcp::SYN == 0;
    // On an uplink, a packet to an address that is not the node's own would come back.
    let may_be_older = is_frontend
        && ctx.frontend.flags & SERVICE_RECENT != 0
        && ctx.tunnelled == 0
        && (!by_uplink || ctx.frontend.kind == KIND_NODE_PORT);
    // XDP does not leave each first datagram to tc.
    let asks = is_frontend && is_midway || !F::EARLY && may_be_older && ctx.packet.key.proto == PROTO_UDP;
    if asks && (F::EARLY || is_midway && may_be_older || maps.is_of_socket(frame, ctx)) {
        return Step::Pass;
    }
    if ctx.hash == NO_HASH {
        ctx.hash = time.hash(&ctx.packet.key);
    }
    ctx.plan.backend_id = 0;
    ctx.plan.bits = 0;
    ctx.second_chance = 0;
    if is_frontend {
        let random = if ctx.retried != 0 {
            backend::random(ctx.hash, 0)
        } else if ctx.frontend.affinity_secs != 0 {
            let client = client(&ctx.packet.key.src, time.config.flow_seed);
            backend::random_of_client(client, &ctx.frontend, time)
        } else {
            backend::random(ctx.hash, time.now)
        };
        if let Some(selected) = backend::select_packets(maps, frame, ctx, random) {
            plan(maps, frame, ctx, &selected, &origin, time);
            maps.prefetch(ctx.hash, ctx.plan.reply_hash);
        }
    }
    let tcp_flags = ctx.packet.tcp_flags;
    if !F::EARLY && ctx.tunnelled != 0 && !is_frontend {
        // The destination was a frontend when the outer header was removed.
        return Step::DropFor(Reason::TunnelNoEndpoint);
    }
    if ctx.tunnelled == 0 && is_other_proxys(ctx.packet.key.proto, tcp_flags, time.config.flags) {
        return Step::Pass;
    }
    if !is_frontend {
        return if F::EARLY { Step::Pass } else { no_service(maps, frame, ctx) };
    }
    ctx.service = ctx.frontend.id;
    match admit(maps, frame, ctx, &origin, time) {
        // The packet goes to an endpoint of this node, or keeps its source; or the route of the client's packet decides about the
        // source, and the next hook looks it up.
        Ok(_)
            if F::EARLY
                && !is_encapsulated(ctx.plan.bits)
                && (ctx.plan.bits & STATE_SNAT == 0 || time.config.flags & CONFIG_SOURCES != 0) =>
        {
            Step::Pass
        }
        Ok(step) => step,
        Err(reason)
            if F::EARLY
                && (reason.verdict() != Verdict::Drop
                    || track::find_hashed(maps, &ctx.packet.key, ctx.hash).is_some()) =>
        {
            Step::Pass
        }
        Err(reason) => {
            if !F::EARLY
                && let Some(next) = of_existing(maps, ctx)
            {
                return next;
            }
            report::refused(maps, frame, ctx, ctx.service, reason);
            refuse(reason, tcp_flags)
        }
    }
}

/// Processes a packet whose destination is not a frontend.
#[inline(always)]
fn no_service<M: NewFlows<F>, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    let (dst, tcp_flags) = (ctx.packet.key.dst, ctx.packet.tcp_flags);
    ctx.service = 0;
    if let Some(next) = of_existing(maps, ctx) {
        return next;
    }
    if !maps.is_service_address(&dst) {
        return classify::to_endpoint(maps, &ctx.packet).map_or(Step::Pass, Step::from);
    }
    let mut why = lookup::why_nothing(maps, dst);
    // The kernel does not answer such a source, either (RFC 1122, 3.2.2).
    let is_answered = why.verdict() != Verdict::Pass && !frame.is_local_origin();
    let is_martian = u64::from(decide::is_martian(&ctx.packet.key.src));
    if is_answered && opaque_to_verifier(is_martian, u64::from(tcp_flags)) != 0 {
        why = Reason::MartianSource;
    }
    report::refused(maps, frame, ctx, 0, why);
    refuse(why, tcp_flags)
}

/// Whether the packet may belong to a connection that another proxy translates by an entry of `nf_conntrack`.
#[inline(always)]
fn is_other_proxys(proto: u8, tcp_flags: u16, flags: u32) -> bool {
    flags & CONFIG_OTHER_PROXY != 0 && proto == PROTO_TCP && tcp_flags & tcp::SYN == 0
}

/// Returns the verdict on a packet that gets no flow for this reason. Never answers a RST (RFC 9293, 3.10.7.1).
#[inline(always)]
pub fn refuse(reason: Reason, tcp_flags: u16) -> Step {
    match reason.verdict() {
        Verdict::Pass => Step::Pass,
        Verdict::Reject if tcp_flags & tcp::RST == 0 => Step::Refuse,
        Verdict::Reject | Verdict::Drop => Step::Drop,
    }
}

/// Plans the flow to the selected backend.
#[inline(always)]
fn plan<M, F>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    selected: &SelectedBackend<Words<M>>,
    origin: &Origin,
    time: Time,
) where
    M: NewFlows<F>,
    F: Frame,
{
    let Some(node) = maps.node() else { return };
    let path = Path {
        from_node: origin.from_node,
        by_uplink: origin.by_uplink,
        backend_is_local: selected.flags & BACKEND_LOCAL != 0,
    };
    let client = &ctx.packet.key.src;
    let source = decide::source(&ctx.frontend, client, &selected.addr, path, time.config.flags);
    // A packet that arrived encapsulated is sent on only by its second chance: otherwise an endpoint of this node was
    // selected for it.
    let (key, flags) = (&ctx.packet.key, selected.flags);
    let tunnel =
        decide::tunnel(&ctx.frontend, source, flags, key, origin.outside, |addr| maps.node_addr(addr));
    // Each of these numbers joins the paths that lead to it: the verifier would walk through the following code for each path,
    // and for each combination of them.
    let unknown = |number: u32| opaque_to_verifier(u64::from(number), u64::from(time.now)) as u32;
    let snat = unknown((source.is_nodes() && tunnel == 0).into());
    let is_dsr = unknown((tunnel != 0 || !F::EARLY && ctx.tunnelled != 0).into());
    // Replies to packets that this node encapsulates do not pass this node.
    let is_watched = ctx.frontend.flags & SERVICE_EJECTS != 0 && is_syn(ctx.packet.tcp_flags);
    let watched = unknown(if is_watched { watch(ctx.retried != 0, origin.outside) } else { 0 });
    // Without a branch for the last node, which the verifier would walk through twice.
    let last = (ctx.second_chance >> LAST.trailing_zeros()) * (MAX_HOPS - 1);
    let hops = if tunnel == 0 { 0 } else { (encapsulated(ctx.tunnelled) & 3 | last) << TUNNEL_HOPS_SHIFT };
    // Without a tunnel, both numbers are 0.
    let to_node = tunnel << STATE_TUNNEL_SHIFT | unknown(hops);
    let bits = (snat * STATE_SNAT)
        | (origin.local * STATE_LOCAL)
        | (by_load(ctx.frontend.algorithm) * STATE_COUNTS)
        | (is_dsr * STATE_DSR)
        | to_node
        | ((1 - is_dsr) * watched);
    let source = if snat != 0 { Some(&node.source) } else { None };
    ctx.plan.reply = open::reply_key(&ctx.packet.key, selected, time, source);
    ctx.plan.backend_id = selected.id;
    ctx.plan.bits = bits;
    if !F::EARLY && time.config.flags & source::NEEDED != 0 {
        let by_uplink = u32::from(origin.by_uplink) * source::BY_UPLINK;
        let outside = u32::from(origin.outside) * source::OUTSIDE;
        maps.choose_source(frame, ctx, by_uplink | outside | selected.flags & BACKEND_LOCAL);
    }
    ctx.plan.reply_hash = time.hash(&ctx.plan.reply);
}

/// Returns the bits of `STATE_WATCH` for a new flow.
#[inline(always)]
fn watch(retried: bool, outside: bool) -> u32 {
    if retried {
        WATCH_LAST
    } else if outside {
        WATCH_OUTSIDE
    } else {
        WATCH_INSIDE
    }
}

/// Whether a segment in the middle of a connection that has no flow, or a datagram, belongs to a connection of a process of this node,
/// which is older than the frontend. kube-proxy's rules see only the first packet of a connection.
#[inline(always)]
pub fn is_of_socket<M: NewFlows<F>, F: Frame>(maps: M, frame: F, ctx: &PacketCtx<Words<M>>) -> bool {
    ctx.tunnelled == 0
        && maps.node_addr(&ctx.packet.key.dst) & NODE_ADDR_OWN != 0
        && frame.has_connection(&ctx.packet.key)
}

/// Decides whether the packet may create a flow, and to which backend: the planned one, or that of the client's session
/// affinity.
#[inline(always)]
fn admit<M: NewFlows<F>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    origin: &Origin,
    time: Time,
) -> Result<Step, Reason> {
    // The kernel checks the source of packets that go up the stack from a local device.
    let is_checked = origin.from_node || !origin.by_uplink && ctx.plan.bits & STATE_SNAT == 0;
    if !is_checked && martian::is_martian(maps, frame, ctx, origin.by_uplink) {
        return Err(Reason::MartianSource);
    }
    if decide::has_source_ranges(&ctx.frontend) && !maps.admits(ctx.frontend.ranges, &ctx.packet.key.src) {
        return Err(Reason::SourceNotAllowed);
    }
    // As in nf_conntrack (`tcp_conntracks` of `sNO`), whose invalid packets kube-proxy drops.
    let is_invalid = ctx.packet.key.proto != PROTO_UDP && !may_begin(ctx.packet.tcp_flags);
    if is_invalid && ctx.plan.backend_id != 0 {
        // The node of the endpoint may know the connection: the next stage decides.
        let is_sent = ctx.packet.tcp_flags & tcp::SYN == 0 && is_encapsulated(ctx.plan.bits);
        return if is_sent { Ok(Step::OpenFlow) } else { Err(Reason::InvalidState) };
    }
    // The node that has encapsulated the packet knows the client's session affinity.
    if ctx.frontend.affinity_secs != 0 && ctx.frontend.slot_count != 0 && ctx.tunnelled == 0 {
        if F::EARLY {
            return Ok(Step::Pass);
        }
        // A retransmitted SYN does not change the client's session affinity.
        if let Some(next) = of_existing(maps, ctx) {
            return Ok(next);
        }
        let seed = time.config.flow_seed;
        let number = health::client_of(&ctx.frontend, &ctx.packet.key.src, ctx.packet.tcp_flags, seed);
        let (planned, client) = (ctx.plan.backend_id, &ctx.packet.key.src);
        if let Some(selected) =
            affinity::lookup_and_refresh(maps, client, &ctx.frontend, number, planned, time)
        {
            ctx.second_chance = 0;
            plan(maps, frame, ctx, &selected, origin, time);
        } else if ctx.plan.backend_id != 0 {
            affinity::note(maps, &ctx.packet.key.src, &ctx.frontend, ctx.plan.backend_id, time);
        }
    }
    if ctx.plan.backend_id == 0 {
        return Err(if ctx.tunnelled != 0 {
            Reason::TunnelNoEndpoint
        } else {
            backend::why_none(&ctx.frontend)
        });
    }
    // Both ends are sockets of the node: the answer takes the loopback device, where no program translates it back. The error
    // lets the process try again, and the call of its socket is translated.
    if origin.from_node && maps.node_addr(&ctx.plan.reply.src) & NODE_ADDR_OWN != 0 {
        return Err(Reason::OwnEndpoint);
    }
    let has_source = !same(&ctx.plan.reply.dst, &<M::Family as Family>::Words::ZERO);
    if ctx.plan.bits & STATE_SNAT != 0 && !has_source {
        return Err(Reason::NoRoute);
    }
    Ok(Step::OpenFlow)
}
