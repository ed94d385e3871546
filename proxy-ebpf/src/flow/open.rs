//! Beginning a flow: an entry for it, and its two keys.

use proxy_common::conntrack::{ASSURED, SEQ_CLIENT, in_time_wait, is_closed, is_expired};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_CLAIMED, STATE_SNAT, STATE_SYN, STATE_USED, bits_of,
    with_bits,
};
use proxy_common::reason::Reason;
use proxy_common::select::{random_slot, source_port};
use proxy_common::{Address, PROTO_TCP};

use super::evict::claim_free;
use super::index::{self, NONE};
use super::memory::{EntryRef as _, NewFlow};
use super::track::{Tracked, is_syn};
use crate::context::PacketCtx;
use crate::env::{FlowTable, Time, Words};
use crate::select::backend::SelectedBackend;
use crate::select::load;
use crate::shared::{Exchange as _, Shared as _, opaque};

/// Source ports that are tried when two flows would look the same to their backend.
const TRIES: u32 = 512;
/// See [`try_ports`].
const TRIES_AT_ONCE: u32 = 32;
/// Of these, how many are random; then come those that follow the last one.
const RANDOM_TRIES: u32 = 16;
/// Tries after which a flow that is not assured, and was silent for a second, gives its port to a new one. A flood of SYNs with
/// forged sources would otherwise keep all ports for a minute, and each new flow would cost [`TRIES`].
const SILENT_YIELD: u32 = 32;
/// Tries after which every flow does that is not assured: ports in quarantine are taken first.
const ALL_YIELD: u32 = 160;
/// Of these, tries that leave a port alone whose last connection the backend may still have in `TIME_WAIT`: the kernel makes
/// sequence numbers and timestamps from ports that the backend does not see.
const QUIET_TRIES: u64 = 128;
/// The lowest source port that a collision is moved to.
const FIRST_PORT: u32 = 1024;

/// The key of the replies to a flow that begins. With `snat` the backend sees that address of this node.
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

/// What came of [`open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The flow has begun, or another CPU has just begun it: the plan says what the packet becomes.
    Begun,
    /// It has begun long ago.
    Exists,
}

/// Begins a flow by the plan in `ctx`; not, if the packet has one already.
#[inline(always)]
pub fn open<M: FlowTable>(
    maps: M,
    ctx: &mut PacketCtx<Words<M>>,
    service: u32,
    time: Time,
) -> Result<Opened, Reason> {
    let now = time.now;
    // Calls are dear, since returns are not predicted on many a CPU: most find a free entry at once.
    let index = match claim_free(maps, time) {
        NONE => maps.claim(now),
        index => index,
    };
    let Some(entry) = maps.entry(index) else { return Err(Reason::FlowTableFull) };
    entry.fill(&NewFlow { packet: &ctx.packet, plan: &ctx.plan, service, now });
    let mut leads_to = maps.add_key(index, u32::from(DIRECTION_REPLY), ctx.plan.reply_hash);
    if leads_to != index {
        leads_to = add_reply_key(maps, index, ctx.plan.bits & STATE_SNAT);
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
        // Another CPU was faster with this flow, or there is no room. There is one flow, and it stays.
        index::remove_key(maps, index, entry, DIRECTION_REPLY);
        index::remove_key(maps, index, entry, DIRECTION_FORWARD);
    }
    load::changed(maps, ctx.plan.backend_id, 0, bits);
    // It cannot fail: no other CPU changes the state of a claimed entry.
    entry.state().compare_exchange(claimed, with_bits(claimed, bits));
    if is_ours {
        ctx.plan.reply.dst_port = entry.source_port();
        return Ok(Opened::Begun);
    }
    let Some(other) = maps.entry(leads_to) else {
        let is_snat = ctx.plan.bits & STATE_SNAT != 0;
        return Err(if is_snat { Reason::SnatPortsExhausted } else { Reason::FlowCollision });
    };
    if bits_of(other.state().load()) & STATE_CLAIMED == 0 {
        return Ok(Opened::Exists);
    }
    ctx.plan.reply = other.key(DIRECTION_REPLY);
    Ok(Opened::Begun)
}

/// Adds the key of the replies to the flow in the claimed entry `index`, and gives the flow to use; [`NONE`]: no source port
/// is free.
///
/// Where another flow has the key (the same client port to two frontends with one backend), the backend gets to see another
/// source port. Where it is this very flow's already, that one is used.
#[inline(always)]
fn add_reply_key<M: FlowTable>(maps: M, index: u32, snat: u32) -> u32 {
    let mut tries = 0;
    while tries < TRIES {
        let leads_to = maps.try_ports(index, tries, snat);
        if leads_to != NONE {
            return leads_to;
        }
        tries += TRIES_AT_ONCE;
    }
    NONE
}

/// The tries of [`add_reply_key`] from that number on, [`TRIES_AT_ONCE`] of them: the verifier walks through both loops once,
/// and not through one of [`TRIES`].
#[inline(always)]
pub fn try_ports<M: FlowTable>(maps: M, index: u32, tries: u32, snat: u32) -> u32 {
    let mut more = 0;
    while more < TRIES_AT_ONCE {
        let leads_to = maps.try_port(index, tries.wrapping_add(more), snat);
        if leads_to != NONE {
            return leads_to;
        }
        more += 1;
    }
    NONE
}

/// The next source port to try after `port`: a random one at first, later the next one.
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

/// Whether a flow gives its source port to a new one after so many tries.
#[inline(always)]
fn yields(bits: u32, last_seen: u32, tries: u32, time: Time) -> bool {
    let (silent, hz) = (time.now.wrapping_sub(last_seen), time.config.hz);
    let is_silent = silent > hz && silent.wrapping_neg() > hz;
    bits & ASSURED == 0 && (tries >= ALL_YIELD || (tries >= SILENT_YIELD && is_silent))
}

/// One try of [`add_reply_key`]. [`NONE`]: the source port was not free, and the entry has the next one. `snat`: not 0 if the
/// ports are the node's.
#[inline(always)]
pub fn try_port<M: FlowTable>(maps: M, index: u32, tries: u32, snat: u32) -> u32 {
    let (Some(entry), Some(time)) = (maps.entry(index), maps.time()) else { return NONE };
    let is_snat = snat != 0;
    let hash = time.hash(&entry.key(DIRECTION_REPLY));
    let leads_to = maps.add_key(index, u32::from(DIRECTION_REPLY), hash);
    if leads_to == index {
        return index;
    }
    let Some(other) = Tracked::at(maps, leads_to) else { return NONE };
    let (bits, last_seen, proto) = (other.bits(), other.entry.last_seen().load(), other.entry.proto());
    if is_closed(bits) || is_expired(proto, bits, last_seen, time.now, time.config) {
        let waits = is_snat
            && opaque(u64::from(tries)) < QUIET_TRIES
            && in_time_wait(proto, bits, last_seen, time.now, time.config.hz);
        if !waits && other.remove() {
            return NONE;
        }
    } else if other.entry.differs_from(&entry.key(DIRECTION_FORWARD)) == 0 {
        other.repair_forward_key(time);
        return leads_to;
    } else if yields(bits, last_seen, opaque(u64::from(tries)) as u32, time) && other.remove() {
        return NONE;
    }
    entry.set_source_port(next_port(maps, entry.source_port(), is_snat, tries, time));
    NONE
}
