//! Beginning a flow: an entry for it, and its two keys.

use core::ptr::write_volatile;

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use proxy_common::Address;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FLOW_CLAIMED, FLOW_SNAT, FLOW_USED, FlowKey, NO_PLACE, is_expired,
    is_over, lingers,
};
use proxy_common::reason::Reason;
use proxy_common::select::{random_slot, source_port};

use super::claim::{Claim, claim_free};
use super::index::{self, Keys, NONE};
use super::{Time, Tracked, owns};
use crate::balance::Choice;
use crate::maps;
use crate::packet::Aim;
use crate::{atomic, report};

/// Source ports that are tried when two flows would look the same to their backend.
const PORT_TRIES: u32 = 32;
/// Of these, tries for a source port that the backend cannot remember; then one of a closed connection must do.
const RESTED_TRIES: u64 = 16;
/// The lowest source port that a collision is moved to.
const FIRST_PORT: u32 = 1024;

/// The source ports among which a flow may choose: the first, and how many.
#[inline(always)]
fn ports(config: &NodeConfig, snat: bool) -> (u32, u32) {
    if snat {
        let first = u32::from(config.snat_first);
        (first, u32::from(config.snat_last).wrapping_sub(first).wrapping_add(1))
    } else {
        (FIRST_PORT, 0x1_0000 - FIRST_PORT)
    }
}

/// The key of the replies to a flow that begins. With `snat` the backend sees that address of this node.
#[inline(always)]
pub fn reply_key<A: Address>(
    key: &FlowKey<A>,
    choice: &Choice<A>,
    config: &NodeConfig,
    snat: Option<&A>,
) -> FlowKey<A> {
    let mut dst_port = key.src_port;
    if snat.is_some() {
        let (first, count) = ports(config, true);
        dst_port = source_port(key.src_port, first, count);
    }
    FlowKey {
        src: choice.addr,
        dst: *snat.unwrap_or(&key.src),
        src_port: choice.port,
        dst_port,
        proto: key.proto,
        direction: DIRECTION_REPLY,
        reserved: 0,
    }
}

/// Begins a flow for a client's packet, whose key has this hash; not, if it has one already. The aim is then what
/// became of it.
#[inline(always)]
pub fn open<F: Steps>(
    key: &FlowKey<F::Words>,
    hash: u64,
    service: u32,
    aim: &mut Aim<F::Words>,
    time: Time,
) -> Result<bool, Reason> {
    let (reply, backend_id) = (&aim.reply, aim.backend_id);
    let now = time.now;
    let state = FLOW_USED | aim.state as u8;
    // Calls are dear, since returns are not predicted on many a CPU: most find a free entry at once.
    let index = match claim_free::<F>(time) {
        NONE => F::claim(now),
        index => index,
    };
    let Some(place) = F::flow(index) else { return Err(Reason::FlowTableFull) };
    // SAFETY: a map value that is ours until `CLAIMED` goes. The generation goes first, so that keys of the
    // entry's last flow lead nowhere.
    unsafe {
        let generation = (*place).generation.wrapping_add(1);
        write_volatile(&raw mut (*place).generation, generation);
        (*place).client = key.src;
        (*place).frontend = key.dst;
        (*place).backend = reply.src;
        (*place).source = reply.dst;
        (*place).client_port = key.src_port;
        (*place).frontend_port = key.dst_port;
        (*place).backend_port = reply.src_port;
        (*place).source_port = reply.dst_port;
        write_volatile(&raw mut (*place).state, state | FLOW_CLAIMED);
        (*place).proto = key.proto;
        (*place).service = service;
        (*place).backend_id = backend_id;
        (*place).created = now;
        (*place).last_seen = now;
        (*place).places = [NO_PLACE; 2];
    }
    let mut leads_to = F::add_key(index, u32::from(DIRECTION_REPLY), aim.reply_hash);
    if leads_to != index {
        leads_to = F::add_reply_key(index);
    }
    if leads_to == index {
        leads_to = F::add_key(index, u32::from(DIRECTION_FORWARD), hash);
    }
    if leads_to == index {
        // SAFETY: as above; this takes `CLAIMED` away.
        unsafe { write_volatile(&raw mut (*place).state, state) };
        report::connection(service, backend_id);
    } else {
        // Another CPU was faster with this flow, or there is no room. There is one flow, and it stays.
        // SAFETY: as above.
        Keys::of(unsafe { &*place }).remove::<F>(index);
        // SAFETY: as above.
        unsafe { write_volatile(&raw mut (*place).state, 0) };
    }
    let Some(place) = F::flow(leads_to) else {
        return Err(if aim.state != 0 { Reason::SnatPortsExhausted } else { Reason::FlowCollision });
    };
    // SAFETY: a map value, of plain integers.
    let flow = unsafe { &*place };
    if leads_to == index {
        aim.reply.dst_port = flow.source_port;
    } else if flow.state & FLOW_CLAIMED == 0 {
        return Ok(false);
    } else {
        aim.reply = flow.reply_key();
    }
    Ok(true)
}

/// Adds the key of the replies to the flow in the entry `index`, and gives the flow to use.
///
/// Where another flow has the key (the same client port to two frontends with one backend), the backend gets to
/// see another source port. Where it is this very flow's already, that one is used. [`NONE`]: no port is free.
/// The ports of connections that were closed a moment ago are the last choice: their backend may be in `TIME_WAIT`, and
/// the kernel makes sequence numbers and timestamps from ports that the backend does not see.
#[inline(always)]
fn add_reply_key<F: Steps>(index: u32) -> u32 {
    let Some(place) = F::flow(index) else { return NONE };
    // SAFETY: a map value, which is the caller's own for now.
    let flow = unsafe { &mut *place };
    let Some(config) = maps::config() else { return NONE };
    let time = Time { now: flow.created, config };
    let mut tries = 0;
    while tries < PORT_TRIES {
        tries += 1;
        let hash = flow.reply_key().hash(config.flow_seed);
        let leads_to = F::add_key(index, u32::from(DIRECTION_REPLY), hash);
        if leads_to == index {
            return index;
        }
        let Some(other) = F::flow(leads_to) else { return NONE };
        // SAFETY: a map value, of plain integers.
        let theirs = unsafe { &*other };
        if is_over(theirs.state) || is_expired(theirs, time.now, config) {
            let rests = flow.state & FLOW_SNAT != 0
                && atomic::opaque(u64::from(tries)) <= RESTED_TRIES
                && lingers(theirs, time.now, config.hz);
            if !rests {
                let tracked = Tracked::<F> { index: leads_to, generation: theirs.generation, place: other };
                tracked.release();
                continue;
            }
        } else if owns(theirs, &flow.forward_key()) {
            return readopt::<F>(leads_to, config);
        }
        // SAFETY: the helper takes nothing and cannot fail.
        let random = unsafe { bpf_get_prandom_u32() };
        let (first, count) = ports(config, flow.state & FLOW_SNAT != 0);
        flow.source_port = (first + random_slot(random, count)) as u16;
    }
    NONE
}

/// The flow that this packet's flow is already, whose forward key was lost: it gets it again.
#[inline(always)]
fn readopt<F: Steps>(index: u32, config: &NodeConfig) -> u32 {
    let Some(place) = F::flow(index) else { return NONE };
    // SAFETY: a map value, of plain integers.
    let flow = unsafe { &*place };
    if flow.state & FLOW_CLAIMED == 0 && !index::stands::<F>(index, flow, DIRECTION_FORWARD) {
        F::add_key(index, u32::from(DIRECTION_FORWARD), flow.forward_key().hash(config.flow_seed));
    }
    index
}

/// The loop of [`open`], as a function that the verifier checks once, on its own ("global").
pub trait Steps: Claim {
    /// [`add_reply_key`].
    fn add_reply_key(index: u32) -> u32;
}

macro_rules! steps {
    ($family:ty, $add_reply_key:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $add_reply_key(index: u32) -> u32 {
            add_reply_key::<$family>(index)
        }

        impl Steps for $family {
            #[inline(always)]
            fn add_reply_key(index: u32) -> u32 {
                $add_reply_key(index)
            }
        }
    };
}

steps!(proxy_common::V4, add_reply_key4);
steps!(proxy_common::V6, add_reply_key6);
