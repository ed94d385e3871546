//! Beginning a flow: an entry for it, and its two keys.

use core::mem::offset_of;
use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FLOW_CLAIMED, FLOW_REPLIED, FLOW_SNAT, FLOW_USED, Flow, FlowKey,
    NO_PLACE, is_expired, is_over, lingers,
};
use proxy_common::reason::Reason;
use proxy_common::select::random_slot;

use super::index::{self, Index, Keys, NONE};
use super::{Time, Tracked, free};
use crate::balance::Choice;
use crate::header::same;
use crate::maps::{self, Tables};
use crate::nat::Tuple;
use crate::{atomic, report};

/// Entries that one step of the clock hand covers; eight IPv4 entries are eight cache lines in a row.
const WINDOW: u64 = 8;
/// Steps after which the table is called full.
const WINDOWS: u32 = 8;
/// Source ports that are tried when two flows would look the same to their backend.
const PORT_TRIES: u32 = 32;
/// Of these, tries for a source port that the backend cannot remember; then one of a closed connection must do.
const RESTED_TRIES: u64 = 16;
/// The lowest source port that a collision is moved to.
const FIRST_PORT: u32 = 1024;

/// How willingly an entry is given to a new flow; from `KEEP` on not at all.
#[inline(always)]
fn rank<F: Tables>(flow: &Flow<F::Words>, time: Time) -> u32 {
    if flow.state == 0 {
        0
    } else if flow.state & FLOW_CLAIMED != 0 {
        KEEP
    } else if is_expired(flow, time.now, time.config) {
        1
    } else if is_over(flow.state) {
        2
    } else if flow.state & FLOW_REPLIED == 0 {
        3
    } else {
        KEEP
    }
}

const KEEP: u32 = 4;

/// The most willing of the [`WINDOW`] entries from `start` on: its rank in the upper half, its index in the lower.
#[inline(always)]
fn scan<F: Tables>(start: u32, now: u32) -> u64 {
    let none = u64::from(KEEP) << 32;
    let Some(config) = maps::config() else { return none };
    let time = Time { now, config };
    let mut best = none;
    let mut step = 0;
    while step < WINDOW as u32 {
        let mut index = start + step;
        if index >= config.flow_entries {
            index -= config.flow_entries;
        }
        let Some(place) = F::flow(index) else { return best };
        // SAFETY: a map value; a stale look costs at worst a flow that was over anyway.
        let rank = rank::<F>(unsafe { &*place }, time);
        let found = u64::from(rank) << 32 | u64::from(index);
        if rank <= 1 {
            return found;
        }
        if found >> 32 < best >> 32 {
            best = found;
        }
        step += 1;
    }
    best
}

/// Takes an entry for a new flow: one that is free or expired, else one that is over, else one that nobody has
/// answered yet. An established flow keeps its place whatever comes. Gives the index, or [`NONE`].
#[inline(always)]
fn claim<F: Steps>(now: u32) -> u32 {
    let (Some(config), Some(hand)) = (maps::config(), maps::flow_hand(F::INDEX)) else { return NONE };
    if config.flow_entries == 0 {
        return NONE;
    }
    // One entry at a time while entries are free: neighbours come from memory together.
    let (mut window, mut step) = (0, 1);
    while window < WINDOWS {
        // SAFETY: a map value, aligned to eight bytes.
        let start = unsafe { atomic::fetch_add(hand, step) } as u32 % config.flow_entries;
        let Some(place) = F::flow(start) else { return NONE };
        // SAFETY: a map value; a stale look is noticed when the entry is taken.
        let mut found =
            u64::from(rank::<F>(unsafe { &*place }, Time { now, config })) << 32 | u64::from(start);
        if found >> 32 > 1 {
            found = F::scan(start, now);
        }
        if found >> 32 < u64::from(KEEP)
            && take::<F>(found as u32, (found >> 32) as u32, Time { now, config })
        {
            return found as u32;
        }
        window += 1;
        step = WINDOW;
    }
    NONE
}

/// Takes an entry that had this rank, unless it has changed, or another CPU is faster.
#[inline(always)]
fn take<F: Tables>(index: u32, was: u32, time: Time) -> bool {
    let Some(place) = F::flow(index) else { return false };
    // SAFETY: a map value: protocol, state and two bytes of zero, aligned to four.
    unsafe {
        let word = place.cast::<u32>().add(offset_of!(Flow<F::Words>, proto) / size_of::<u32>());
        let old = read_volatile(word);
        if rank::<F>(&*place, time) != was {
            return false;
        }
        let [proto, ..] = old.to_ne_bytes();
        let new = u32::from_ne_bytes([proto, FLOW_USED | FLOW_CLAIMED, 0, 0]);
        if atomic::compare_exchange32(word, old, new) != old {
            return false;
        }
        if was > 0 {
            Keys::of(&*place).remove::<F>(index);
        }
    }
    true
}

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

/// Begins a flow for a client's packet, whose key has this hash, and tells what the packet becomes. With `snat` the backend sees that address
/// of this node.
#[inline(always)]
pub fn open<F: Steps>(
    key: &FlowKey<F::Words>,
    hash: u64,
    service: u32,
    choice: &Choice<F::Words>,
    time: Time,
    snat: Option<&F::Words>,
) -> Result<Tuple<F::Words>, Reason> {
    let now = time.now;
    let state = if snat.is_some() { FLOW_USED | FLOW_SNAT } else { FLOW_USED };
    let index = F::claim(now);
    let Some(place) = F::flow(index) else { return Err(Reason::FlowTableFull) };
    // SAFETY: a map value that is ours until `CLAIMED` goes. The generation goes first, so that keys of the
    // entry's last flow lead nowhere.
    unsafe {
        let generation = (*place).generation.wrapping_add(1);
        write_volatile(&raw mut (*place).generation, generation);
        (*place).client = key.src;
        (*place).frontend = key.dst;
        (*place).backend = choice.addr;
        (*place).source = *snat.unwrap_or(&key.src);
        (*place).client_port = key.src_port;
        (*place).frontend_port = key.dst_port;
        (*place).backend_port = choice.port;
        (*place).source_port = key.src_port;
        if snat.is_some() {
            let (first, count) = ports(time.config, true);
            // The client's port spreads well enough, and needs no random number.
            let spread = (u32::from(key.src_port)).wrapping_mul(0x9e37_79b1);
            (*place).source_port = (first + random_slot(spread, count)) as u16;
        }
        write_volatile(&raw mut (*place).state, state | FLOW_CLAIMED);
        (*place).proto = key.proto;
        (*place).service = service;
        (*place).backend_id = choice.backend_id;
        (*place).created = now;
        (*place).last_seen = now;
        (*place).places = [NO_PLACE; 2];
    }
    let mut leads_to = F::add_reply_key(index);
    if leads_to == index {
        leads_to = F::add_key(index, u32::from(DIRECTION_FORWARD), hash);
    }
    if leads_to == index {
        // SAFETY: as above; this takes `CLAIMED` away.
        unsafe { write_volatile(&raw mut (*place).state, state) };
        report::connection(service, choice.backend_id);
    } else {
        // Another CPU was faster with this flow, or there is no room. There is one flow, and it stays.
        // SAFETY: as above.
        Keys::of(unsafe { &*place }).remove::<F>(index);
        free::<F>(place);
    }
    let Some(place) = F::flow(leads_to) else {
        return Err(if snat.is_some() { Reason::SnatPortsExhausted } else { Reason::FlowCollision });
    };
    // SAFETY: a map value, of plain integers.
    let generation = unsafe { (*place).generation };
    let tracked = Tracked::<F> { index: leads_to, generation, place };
    tracked.to_backend().ok_or(Reason::FlowCollision)
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
        } else if theirs.client_port == flow.client_port
            && theirs.frontend_port == flow.frontend_port
            && same(&theirs.client, &flow.client)
            && same(&theirs.frontend, &flow.frontend)
        {
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

/// The loops of [`open`], as functions that the verifier checks once each, on their own ("global").
pub trait Steps: Index {
    /// [`scan`].
    fn scan(start: u32, now: u32) -> u64;
    /// [`claim`].
    fn claim(now: u32) -> u32;
    /// [`add_reply_key`].
    fn add_reply_key(index: u32) -> u32;
}

macro_rules! steps {
    ($family:ty, $scan:ident, $claim:ident, $add_reply_key:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $scan(start: u32, now: u32) -> u64 {
            scan::<$family>(start, now)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $claim(now: u32) -> u32 {
            claim::<$family>(now)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $add_reply_key(index: u32) -> u32 {
            add_reply_key::<$family>(index)
        }

        impl Steps for $family {
            #[inline(always)]
            fn scan(start: u32, now: u32) -> u64 {
                $scan(start, now)
            }

            #[inline(always)]
            fn claim(now: u32) -> u32 {
                $claim(now)
            }

            #[inline(always)]
            fn add_reply_key(index: u32) -> u32 {
                $add_reply_key(index)
            }
        }
    };
}

steps!(proxy_common::V4, scan4, claim4, add_reply_key4);
steps!(proxy_common::V6, scan6, claim6, add_reply_key6);
