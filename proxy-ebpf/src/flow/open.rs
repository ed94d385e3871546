//! Creation of a flow: claims an entry, and adds the flow's two keys to the index.

use proxy_common::conntrack::{
    ASSURED, SEQ_CLIENT, is_abandoned, is_closed, is_expired, is_reset_by_client, keeps_ports,
};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_CLAIMED, STATE_DIRECT, STATE_SNAT, STATE_SYN,
    STATE_USED, bits_of, has_reply_key, with_bits,
};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::select::{random_slot, source_port};
use proxy_common::{Address, PROTO_TCP};

use super::evict::claim_free;
use super::index::NO_FLOW;
use super::memory::{EntryRef as _, NewFlow};
use super::track::{Tracked, is_syn};
use crate::context::PacketCtx;
use crate::env::{FlowTable, Time, Words};
use crate::header::same;
use crate::select::backend::SelectedBackend;
use crate::select::load;
use crate::shared::{Exchange as _, Shared as _, opaque};

/// Number of source ports that are tried if two flows would have the same reply key at their backend.
const TRIES: u32 = 512;
/// Number of tries in one call of [`try_ports`].
const TRIES_AT_ONCE: u32 = 32;
/// Number of the [`TRIES`] that use a random port; each later try uses the port after the previous one.
const RANDOM_TRIES: u32 = 16;
/// Number of tries after which a flow that is not assured, and has been silent for a second, gives its port to a new flow; so
/// does a half-closed flow that has been silent for a minute.
/// Otherwise a flood of SYNs with forged sources would keep all ports for a minute, and each new flow would cost [`TRIES`]
/// tries.
const TRIES_BEFORE_SILENT: u32 = 32;
/// Number of tries after which every flow that is not assured, or is abandoned, gives its port to a new flow. Ports in quarantine are taken
/// earlier.
const TRIES_BEFORE_UNASSURED: u32 = 160;
/// Number of tries that skip a port in quarantine, whose last connection may still be in `TIME_WAIT` at the backend: the
/// kernel derives sequence numbers and timestamps from ports that the backend does not see.
const QUARANTINE_TRIES: u64 = 128;
/// Lowest source port that a flow without SNAT gets after a collision.
const FIRST_PORT: u32 = 1024;

/// Returns the reply key of a new flow. `snat` is the address of this node that the backend sees; `None` without SNAT.
#[inline(always)]
pub fn reply_key<A: Address>(
    key: &FlowKey<A>,
    backend: &SelectedBackend<A>,
    time: Time,
    snat: Option<&A>,
) -> FlowKey<A> {
    let mut dst_port = key.src_port;
    if snat.is_some() {
        dst_port = time.config.snat_port(source_port(key.src_port, time.config.snat_count()));
    }
    FlowKey {
        src: backend.addr,
        dst: *snat.unwrap_or(&key.src),
        src_port: backend.port,
        dst_port,
        proto: key.proto,
        direction: DIRECTION_REPLY,
        reserved: 0,
    }
}

/// Result of [`open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// This CPU has created the flow, or another CPU is creating it: the plan holds the translation of the packet.
    Begun,
    /// The flow existed before.
    Exists,
}

/// Creates a flow by the plan in `ctx`, unless the packet already has a flow.
#[inline(always)]
pub fn open<M: FlowTable>(
    maps: M,
    ctx: &mut PacketCtx<Words<M>>,
    service: u32,
    time: Time,
) -> Result<Opened, Reason> {
    let now = time.now;
    // BPF-to-BPF calls are expensive, since many CPUs do not predict the return. Most new flows find a free entry without a
    // call.
    let index = match claim_free(maps, time) {
        NO_FLOW => maps.claim(now),
        index => index,
    };
    let Some(entry) = maps.entry(index) else { return Err(Reason::FlowTableFull) };
    entry.fill(&NewFlow { packet: &ctx.packet, plan: &ctx.plan, service, now });
    let mut leads_to = index;
    // Replies to packets that this node encapsulates do not pass it.
    if has_reply_key(ctx.plan.bits) {
        if chooses_port(ctx.plan.bits)
            && is_frontend(maps, &ctx.plan.reply.dst, ctx.plan.reply.dst_port, ctx.packet.key.proto)
        {
            leads_to = NO_FLOW;
        } else {
            leads_to = maps.add_key(index, u32::from(DIRECTION_REPLY), ctx.plan.reply_hash);
        }
        if leads_to != index {
            leads_to = add_reply_key(maps, index, ctx.plan.bits & (STATE_SNAT | STATE_DIRECT));
        }
    }
    if leads_to == index {
        leads_to = maps.add_key(index, u32::from(DIRECTION_FORWARD), ctx.hash);
    }
    let claimed = entry.state().load();
    let is_ours = leads_to == index;
    let mut bits = 0;
    if is_ours {
        let is_tcp = ctx.packet.key.proto == PROTO_TCP;
        let seq = if is_tcp { SEQ_CLIENT } else { 0 };
        let syn = if is_tcp && is_syn(ctx.packet.tcp_flags) { STATE_SYN } else { 0 };
        bits = STATE_USED | ctx.plan.bits | seq | syn;
        if maps.measures_latency() && syn != 0 {
            maps.syn_begun(index);
        }
    } else {
        // Another CPU has created this flow first, or the index has no room. The keys of this entry are removed; the
        // existing flow stays.
        maps.unlink(index);
    }
    load::changed(maps, ctx.plan.backend_id, 0, bits);
    // The exchange cannot fail: no other CPU changes the state of a claimed entry.
    entry.state().compare_exchange(claimed, with_bits(claimed, bits));
    if is_ours {
        ctx.plan.reply.dst_port = entry.source_port();
        return Ok(Opened::Begun);
    }
    let Some(other) = maps.entry(leads_to) else {
        let is_snat = ctx.plan.bits & STATE_SNAT != 0;
        return Err(if is_snat { Reason::SnatPortsExhausted } else { Reason::FlowCollision });
    };
    let reply = other.key(DIRECTION_REPLY);
    // The bits of the plan belong to its own source: with another one, the finished flow is looked up.
    if bits_of(other.state().load()) & STATE_CLAIMED == 0 || !same(&reply.dst, &ctx.plan.reply.dst) {
        return Ok(Opened::Exists);
    }
    ctx.plan.reply = reply;
    Ok(Opened::Begun)
}

/// Adds the reply key of the flow in the claimed entry `index`. Returns the number of the flow to use, or [`NO_FLOW`] if no
/// source port is free.
///
/// If another flow has the key (the same client port to two frontends with one backend), this flow gets another source
/// port. If the flow with the key is this same flow, created by another CPU, that entry is used.
#[inline(always)]
fn add_reply_key<M: FlowTable>(maps: M, index: u32, plan: u32) -> u32 {
    let mut tries = 0;
    while tries < TRIES {
        let leads_to = maps.try_ports(index, tries, plan);
        if leads_to != NO_FLOW {
            return leads_to;
        }
        tries += TRIES_AT_ONCE;
    }
    NO_FLOW
}

/// Makes [`TRIES_AT_ONCE`] tries of [`add_reply_key`], the first of them with the number `tries`. Returns the flow to use,
/// or [`NO_FLOW`]. With two nested loops the verifier walks through each loop once, instead of through one loop of [`TRIES`]
/// iterations.
#[inline(always)]
pub fn try_ports<M: FlowTable>(maps: M, index: u32, tries: u32, plan: u32) -> u32 {
    let mut more = 0;
    while more < TRIES_AT_ONCE {
        let leads_to = maps.try_port(index, tries.wrapping_add(more), plan);
        if leads_to != NO_FLOW {
            return leads_to;
        }
        more += 1;
    }
    NO_FLOW
}

/// Returns the source port to try after `port`: a random port for the first [`RANDOM_TRIES`] tries, later the next port.
#[inline(always)]
fn next_port<M: FlowTable>(maps: M, port: u16, snat: bool, tries: u32, time: Time) -> u16 {
    let config = time.config;
    if tries < RANDOM_TRIES {
        let random = maps.random();
        return if snat {
            config.snat_port(random_slot(random, config.snat_count()))
        } else {
            (FIRST_PORT + random_slot(random, 0x1_0000 - FIRST_PORT)) as u16
        };
    }
    let next = port.wrapping_add(1);
    if !snat {
        return if u32::from(next) < FIRST_PORT { FIRST_PORT as u16 } else { next };
    }
    let [low, high] = config.snat;
    if config.is_snat_port(next) {
        next
    } else if low.contains(port) && high.count != 0 {
        high.first
    } else {
        config.snat_port(0)
    }
}

/// Whether an existing flow gives its source port to a new flow after this number of tries.
#[inline(always)]
fn gives_up_port(bits: u32, last_seen: u32, tries: u32, time: Time) -> bool {
    let (silent, hz) = (time.now.wrapping_sub(last_seen), time.config.hz);
    let is_silent = silent > hz && silent.wrapping_neg() > hz;
    let may_end = bits & ASSURED == 0 || is_abandoned(bits, silent, hz);
    may_end && (tries >= TRIES_BEFORE_UNASSURED || (tries >= TRIES_BEFORE_SILENT && is_silent))
}

/// Whether Ballast gives the flow its source port: an existing connection of the node keeps its own, if it is free.
#[inline(always)]
const fn chooses_port(bits: u32) -> bool {
    bits & (STATE_SNAT | STATE_DIRECT) == STATE_SNAT
}

/// Whether a source of SNAT may be a frontend, for which the node of the endpoint would take the replies.
#[inline(always)]
fn is_frontend<M: FlowTable>(maps: M, addr: &Words<M>, port: u16, proto: u8) -> bool {
    !maps.may_be(Role::Frontend, addr, port, proto).is_no()
}

/// Makes one try of [`add_reply_key`]. Returns [`NO_FLOW`] if the caller has to try again: the source port was not free, and
/// the entry may have the next port now. `plan`: the flow's `STATE_SNAT` and `STATE_DIRECT`.
#[inline(always)]
pub fn try_port<M: FlowTable>(maps: M, index: u32, tries: u32, plan: u32) -> u32 {
    let is_snat = plan & STATE_SNAT != 0;
    let (Some(entry), Some(time)) = (maps.entry(index), maps.time()) else { return NO_FLOW };
    let reply = entry.key(DIRECTION_REPLY);
    // An answer of the prefilter never decides that no port is free.
    if chooses_port(plan)
        && tries < RANDOM_TRIES
        && is_frontend(maps, &reply.dst, reply.dst_port, reply.proto)
    {
        entry.set_source_port(next_port(maps, reply.dst_port, true, tries, time));
        return NO_FLOW;
    }
    let hash = time.hash(&reply);
    let leads_to = maps.add_key(index, u32::from(DIRECTION_REPLY), hash);
    if leads_to == index {
        return index;
    }
    let (Some(holder), Some(time)) = (maps.entry(leads_to), maps.time()) else { return NO_FLOW };
    let is_same = holder.differs_from_entry(entry, DIRECTION_FORWARD) == 0;
    let Some(other) = Tracked::at(maps, leads_to) else {
        // Another CPU creates or removes the flow.
        if is_same {
            return leads_to;
        }
        entry.set_source_port(next_port(maps, entry.source_port(), is_snat, tries, time));
        return NO_FLOW;
    };
    let (bits, last_seen) = (other.bits(), holder.last_seen().load());
    // If the client alone has reset the connection, `existing` decides whether its SYN begins a new one.
    let is_over = is_closed(bits) && !(is_same && !is_snat && is_reset_by_client(bits));
    if is_over || is_expired(holder.proto(), bits, last_seen, time.now, time.config) {
        // Without SNAT, too: to the client, another frontend is another peer, whose sequence numbers are unrelated.
        let waits = (is_snat || !is_same)
            && opaque(u64::from(tries)) < QUARANTINE_TRIES
            && keeps_ports(holder.proto(), bits, last_seen, time.now, time.config.hz);
        if !waits && other.remove() {
            return NO_FLOW;
        }
    } else if is_same {
        other.repair_forward_key(time);
        return leads_to;
    } else if gives_up_port(bits, last_seen, opaque(u64::from(tries)) as u32, time) && other.remove() {
        return NO_FLOW;
    }
    entry.set_source_port(next_port(maps, entry.source_port(), is_snat, tries, time));
    NO_FLOW
}
