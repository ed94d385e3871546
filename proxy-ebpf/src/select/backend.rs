//! Selection of the backend for a new connection to a frontend.

use proxy_common::backend::{BACKEND_LOCAL, tunnel_of};
use proxy_common::conntrack::tcp;
use proxy_common::health::{ANSWERED_ONLY, NO_CLIENT};
use proxy_common::reason::Reason;
use proxy_common::select::{
    is_by_load, is_by_table, is_round_robin, next_random, random_slot, selector, tunnel_tag,
};
use proxy_common::service::{SERVICE_DSR, SERVICE_LOCAL, ServiceEntry};
use proxy_common::{Address, PROTO_TCP, decide, maglev};

use super::load;
use crate::context::{MAX_HOPS, Packet, PacketCtx, TUNNELLED, TUNNELLED_SURE, encapsulated};
use crate::env::{Services, Time, Words};
use crate::frame::Frame;
use crate::select::health;
use crate::shared::{opaque, opaque_to_verifier};

/// Number of random picks; the following picks are the slots after the last random one.
const RANDOM_PICKS: u32 = 4;
/// Number of picks after which an extent is assumed to have no serving backend.
const PICKS: u32 = 6;
/// Number of picks if failing backends are skipped: with up to eight slots, an endpoint that does not fail is certainly found.
const PICKS_AMONG_FAILING: u32 = 12;

/// The backend that was selected for a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectedBackend<A> {
    /// Id of the backend.
    pub id: u32,
    /// Address of the backend.
    pub addr: A,
    /// Port of the backend, host byte order.
    pub port: u16,
    /// `BACKEND_*` bits.
    pub flags: u32,
}

/// 2^64 divided by the golden ratio, odd: the upper half of a product with it depends on all lower bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the random number of a packet, from the hash of its key, whose seed is secret. As good as the helper's random
/// number, at a fifth of its cost. `now`: 0 if the same packet is to get the same number later.
#[inline(always)]
pub fn random(hash: u64, now: u32) -> u32 {
    ((hash ^ u64::from(now)).wrapping_mul(SPREAD) >> 32) as u32
}

/// Returns the random number for a new connection to a Service with session affinity: the same for all connections of a client until a
/// time that the affinity lasts has passed, so that the client stays with its endpoint also if the table of affinities is full.
#[inline(always)]
pub fn random_of_client(client: u32, service: &ServiceEntry, time: Time) -> u32 {
    let span = service.affinity_secs.saturating_mul(time.config.hz);
    random(u64::from(client), time.now.checked_div(span).unwrap_or(0))
}

/// Selects a backend for a packet to a frontend. `random`: a number that two packets share only by chance.
#[inline(always)]
pub fn select_packets<M: Services, F: Frame>(
    maps: M,
    _frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    random: u32,
) -> Option<SelectedBackend<Words<M>>> {
    if ctx.frontend.slot_count == 0 {
        return None;
    }
    // An early hook never processes an encapsulated packet.
    let mut id = if F::EARLY || ctx.tunnelled == 0 { maps.select_for(ctx, random) } else { maps.tagged(ctx) };
    if !F::EARLY && may_have_begun_elsewhere(ctx) {
        let first = id;
        let next = maps.second_chance(ctx, first);
        id = next & !LAST;
        ctx.second_chance = first ^ next;
    }
    selected(maps, id)
}

/// Whether a packet without a flow may belong to a connection whose flow another node has, because the Service address has
/// moved to this node. With SNAT only the other node knows the source port, so the Service must have DSR.
#[inline(always)]
fn may_have_begun_elsewhere<A: Address>(ctx: &PacketCtx<A>) -> bool {
    is_mid_connection(&ctx.packet)
        && ctx.frontend.flags & SERVICE_DSR != 0
        && is_by_table(ctx.frontend.algorithm)
}

/// Whether the packet is a TCP segment without SYN.
#[inline(always)]
fn is_mid_connection<A>(packet: &Packet<A>) -> bool {
    packet.key.proto == PROTO_TCP && packet.tcp_flags & tcp::SYN == 0
}

/// Whether this node may send the packet on to another node that may have its flow.
#[inline(always)]
const fn is_looked_for(tunnelled: u32) -> bool {
    tunnelled & TUNNELLED_SURE == 0 && encapsulated(tunnelled) < MAX_HOPS
}

/// In the result of [`second_chance`], and in [`PacketCtx::second_chance`]: no node has the flow, so the backend takes the packet in
/// any case.
pub const LAST: u32 = 1 << 31;

/// Returns another backend for a packet in the middle of a connection, if the backend `id` (0: none) is on this node, although
/// this node has no flow of the connection: it may have begun by another Maglev table. If the first node has followed a flow to
/// another backend, that of the current table gets the packet next. Then the nodes of the previous tables' backends get it, in the
/// order of the backends' tags. The packet has the tag of the last one, so nodes whose tables differ do
/// not send it in a circle. Removed backends are left out, since their nodes may be gone. If no node has the flow, the backend
/// of the oldest table gets the packet, with [`LAST`]: most connections without a flow began before the changes.
#[inline(always)]
pub fn second_chance<M: Services>(maps: M, ctx: &PacketCtx<Words<M>>, id: u32) -> u32 {
    let service = &ctx.frontend;
    if !is_looked_for(ctx.tunnelled) {
        return id;
    }
    if let Some(backend) = maps.backend(id)
        && id != 0
        && backend.flags & BACKEND_LOCAL == 0
    {
        // The node of the backend gets the packet first.
        return id;
    }
    let selector = selector(service.algorithm, &ctx.packet.key, 0);
    let current = maps.table_id(service, 0, selector);
    let (hops, came_by) = (encapsulated(ctx.tunnelled), ctx.tunnelled & 0xffff);
    let current_tag = maps.chance(service, current, 0);
    if hops == 1 && current_tag < TUNNELLED && current_tag != came_by {
        return current;
    }
    // The choice of the current table comes before all others, whatever its tag.
    let noise = u64::from(selector);
    let from = if hops <= 1 || id == current { 0 } else { came_by + 1 };
    let from = opaque_to_verifier(u64::from(from), noise) as u32;
    let (mut best, mut best_tag, mut oldest) = (0, TUNNELLED, 0);
    let mut number = 1;
    while number < maglev::TABLES {
        let other = maps.table_id(service, number, selector);
        let tag = maps.chance(service, other, from);
        if other != 0 {
            oldest = other;
        }
        // Without a branch for each comparison.
        let is_another = opaque(u64::from(other ^ current) * u64::from(other ^ id)) != 0;
        if tag < best_tag && is_another {
            (best, best_tag) = (other, tag);
        }
        number += 1;
        // Otherwise the verifier would check the next table separately for each result so far.
        best = opaque_to_verifier(u64::from(best), noise) as u32;
        best_tag = opaque_to_verifier(u64::from(best_tag), noise) as u32;
        oldest = opaque_to_verifier(u64::from(oldest), noise) as u32;
    }
    if best != 0 {
        return best;
    }
    match maps.chance(service, oldest, ALSO_REMOVED) {
        HERE => oldest,
        tag if tag < TUNNELLED && oldest != id => oldest | LAST,
        _ => id,
    }
}

/// Value of `from` for [`chance`]: any tag counts, and the backend may have been removed from the Service.
const ALSO_REMOVED: u32 = u32::MAX;

/// Result of [`chance`]: the backend is on this node.
const HERE: u32 = u32::MAX;

/// Returns the tag of a backend on another node to which this node can send a packet in the middle of a connection, [`HERE`] for
/// a backend on this node, or a higher number than any tag if it is lower than `from`. A separate function, since the verifier would otherwise walk through
/// the rest of [`second_chance`] again for each result.
#[inline(always)]
pub fn chance<M: Services>(maps: M, service: &ServiceEntry, id: u32, from: u32) -> u32 {
    match maps.backend(id) {
        Some(backend) if id != 0 && decide::is_of(backend, service) => {
            let tag = u32::from(tunnel_tag(&backend.addr, backend.port));
            if backend.flags & BACKEND_LOCAL != 0 {
                HERE
            } else if tunnel_of(backend.flags) != 0
                && (from == ALSO_REMOVED || tag >= from && decide::serves(backend, service))
            {
                tag
            } else {
                TUNNELLED
            }
        }
        _ => TUNNELLED,
    }
}

/// Returns the id of the backend in table `number` of the Service port; 0: there is no such table. A separate function, since the
/// verifier would otherwise walk through the code after it again for each result.
#[inline(always)]
pub fn table_id<M: Services>(maps: M, service: &ServiceEntry, number: u32, selector: u32) -> u32 {
    let base = maps.maglev_base(table_index(service), number);
    if base == 0 { 0 } else { maglev::backend(base, selector, |at| maps.maglev(at)) }
}

/// Returns the id of the backend in the newest previous table for a new connection; 0 if there is none, it has begun to
/// terminate since, or clients of this frontend may not use it any more.
#[inline(always)]
pub fn previous_choice<M: Services>(maps: M, service: &ServiceEntry, selector: u32) -> u32 {
    let id = maps.table_id(service, 1, selector);
    match maps.backend(id) {
        Some(backend) if decide::may_stay(backend, service) => id,
        _ => 0,
    }
}

/// Returns the index of a frontend's tables in `maglev_index`.
#[inline(always)]
fn table_index(service: &ServiceEntry) -> u32 {
    maglev::index(service.id, service.flags & SERVICE_LOCAL != 0)
}

/// Returns the id of the backend for the packet in the context; 0: none.
#[inline(always)]
pub fn select_for<M: Services>(maps: M, ctx: &PacketCtx<Words<M>>, random: u32) -> u32 {
    let seed = maps.config().map_or(0, |config| config.flow_seed);
    let client = health::client_of(&ctx.frontend, &ctx.packet.key.src, ctx.packet.tcp_flags, seed);
    let client = if ctx.retried != 0 && client != NO_CLIENT { client | ANSWERED_ONLY } else { client };
    let selector = selector(ctx.frontend.algorithm, &ctx.packet.key, random);
    // Otherwise the verifier would check the selection separately for each kind of client.
    let client = opaque_to_verifier(u64::from(client), u64::from(random)) as u32;
    select_id(maps, &ctx.frontend, selector, client)
}

/// Number of slots that are searched for the endpoint whose tag another node has sent. The endpoints of this node have the first
/// slots, unless the weights of the endpoints differ. An endpoint in a later slot is found only by the Maglev table.
const TAGGED_SLOTS: u32 = 96;

/// Returns the id of the endpoint on this node that another node has selected, by the tag in the packet; 0: not found.
#[inline(always)]
pub fn tagged<M: Services>(maps: M, ctx: &PacketCtx<Words<M>>) -> u32 {
    let service = &ctx.frontend;
    let (base, count) = (service.slot_base, service.slot_count);
    let (tag, selector) = (ctx.tunnelled & 0xffff, selector(service.algorithm, &ctx.packet.key, 0));
    if may_have_begun_elsewhere(ctx) {
        let mut number = 1;
        while number < maglev::TABLES {
            let previous = maps.table_id(service, number, selector);
            if maps.has_tag(service, previous, tag, ANY) != 0 {
                return previous;
            }
            number += 1;
        }
    }
    // The other node has most likely selected the endpoint in the same way.
    let mut id = maps.first_id(service, selector);
    let mut slot = 0;
    while slot < TAGGED_SLOTS {
        if maps.has_tag(service, id, tag, SERVING) != 0 {
            return id;
        }
        if slot >= count {
            return 0;
        }
        let Some(next) = maps.slot(base + slot) else { return 0 };
        id = next;
        slot += 1;
    }
    0
}

/// For [`has_tag`]: endpoints that take new connections.
const SERVING: u32 = 0;
/// For [`has_tag`]: all endpoints, since removed endpoints still have connections.
const ANY: u32 = 1;

/// Returns not 0 if a backend is an endpoint of this node and has the tag. `of`: [`SERVING`] or [`ANY`].
#[inline(always)]
pub fn has_tag<M: Services>(maps: M, service: &ServiceEntry, id: u32, tag: u32, of: u32) -> u32 {
    let Some(backend) = maps.backend(id) else { return 0 };
    let is_taken = if of == ANY { decide::is_of(backend, service) } else { decide::serves(backend, service) };
    let is_here = is_taken && backend.flags & BACKEND_LOCAL != 0;
    u32::from(is_here && u32::from(tunnel_tag(&backend.addr, backend.port)) == tag)
}

/// [`rank`] of an id without a backend, or of a backend that does not serve.
pub const GONE: u32 = u32::MAX;

/// Returns [`health::TAKES`] if a backend takes a new connection, a higher number for a worse backend, or [`GONE`] if it does
/// not serve. A separate function, since the verifier would otherwise walk through all of it again for each pick.
#[inline(always)]
pub fn rank<M: Services>(maps: M, service: &ServiceEntry, id: u32, client: u32, random: u32) -> u32 {
    match maps.backend(id) {
        Some(backend) if decide::serves(backend, service) => {
            if client == NO_CLIENT {
                health::TAKES
            } else {
                health::rank(maps, id, client, random)
            }
        }
        _ => GONE,
    }
}

#[inline(always)]
fn selected<M: Services>(maps: M, id: u32) -> Option<SelectedBackend<Words<M>>> {
    if id == 0 {
        return None;
    }
    let backend = maps.backend(id)?;
    Some(SelectedBackend { id, addr: backend.addr, port: backend.port, flags: backend.flags })
}

/// Selects a backend of the Service.
///
/// `selector`: the result of [`select::selector`](proxy_common::select::selector). `client`: number of the client whose
/// failures count ([`proxy_common::health`]).
#[inline(always)]
pub fn select<M: Services>(
    maps: M,
    service: &ServiceEntry,
    selector: u32,
    client: u32,
) -> Option<SelectedBackend<Words<M>>> {
    if service.slot_count == 0 {
        return None;
    }
    let id = maps.select_id(service, selector, client);
    selected(maps, id)
}

/// Returns the id of the backend that [`select`] selects; 0: none. A separate function, since the verifier would otherwise
/// walk through the code after it again for each pick.
///
/// A backend that was just removed may still be in the extent or table that this call reads; another pick then finds a
/// serving backend. If only one backend was removed, the picks after the random picks certainly find one. Two nodes with the
/// same selector make the same picks.
///
/// A failing backend is skipped; if all picks are failing backends, the connection goes to the least bad of them. If a
/// Maglev table leads to a failing backend or a newcomer, the previous table is next: another node to which the Service's
/// address moves finds the connection's backend there, too (see [`second_chance`]).
#[inline(always)]
pub fn select_id<M: Services>(maps: M, service: &ServiceEntry, selector: u32, client: u32) -> u32 {
    let (base, count) = (service.slot_base, service.slot_count);
    if count == 0 {
        return 0;
    }
    let mut random = selector;
    let mut slot = random_slot(random, count);
    let mut id = if is_by_load(service.algorithm) {
        load::first_id(maps, service, selector)
    } else {
        maps.first_id(service, selector)
    };
    let mut pick = 0;
    let (mut least_bad, mut least_rank) = (0, u32::MAX);
    let picks = if client == NO_CLIENT { PICKS } else { PICKS_AMONG_FAILING };
    // The verifier is not to know the number: it would check each pick for both.
    let picks = opaque_to_verifier(u64::from(picks), u64::from(selector)) as u32;
    while pick < PICKS_AMONG_FAILING && pick < picks {
        let rank = maps.rank(service, id, client, random);
        if rank == health::TAKES {
            return id;
        }
        if rank < least_rank {
            (least_bad, least_rank) = (id, rank);
        }
        random = next_random(random);
        pick += 1;
        slot = if pick < RANDOM_PICKS {
            random_slot(random, count)
        } else if slot + 1 < count {
            slot + 1
        } else {
            0
        };
        let previous = if pick == 1 && is_by_table(service.algorithm) {
            maps.previous_choice(service, selector)
        } else {
            0
        };
        let Some(next) = maps.slot(base + slot) else { return least_bad };
        id = if previous == 0 { next } else { previous };
        // Otherwise the verifier would check the next pick separately for each path through this pick.
        let noise = u64::from(random);
        slot = opaque_to_verifier(u64::from(slot), noise) as u32;
        least_bad = opaque_to_verifier(u64::from(least_bad), noise) as u32;
        least_rank = opaque_to_verifier(u64::from(least_rank), noise) as u32;
    }
    least_bad
}

/// Returns the id of the backend that the algorithm picks first; 0: none. An unknown number of an algorithm means random, and so does
/// an algorithm by open connections: for these, [`select_id`] calls [`load::first_id`], since nested calls need stack.
#[inline(always)]
pub fn first_id<M: Services>(maps: M, service: &ServiceEntry, selector: u32) -> u32 {
    let (base, count) = (service.slot_base, service.slot_count);
    if count == 0 {
        return 0;
    }
    let number = service.algorithm;
    if is_by_table(number) {
        let id = table_id(maps, service, 0, selector);
        if id != 0 {
            return id;
        }
    }
    let mut slot = random_slot(selector, count);
    if is_round_robin(number)
        && let Some(turns) = maps.turns(service.id)
    {
        // SAFETY: a map value. Two CPUs that read it at nearly the same time may get the same turn.
        slot = (unsafe { turns.read_volatile() } % u64::from(count)) as u32;
    }
    maps.slot(base + slot).unwrap_or(0)
}

/// Returns the reason for which [`select`] found no backend.
#[inline(always)]
pub fn why_none(service: &ServiceEntry) -> Reason {
    if service.slot_count == 0 { decide::no_endpoint_reason(service) } else { Reason::MapInconsistent }
}
