//! Which entry a new flow takes. A clock hand goes round all entries, and each CPU takes a few at a time from it.

use core::mem::offset_of;
use core::ptr::{read_volatile, write_volatile};

use proxy_common::config::NodeConfig;
use proxy_common::flow::{FLOW_CLAIMED, FLOW_REPLIED, FLOW_USED, Flow, is_expired, is_over};
use proxy_common::{Address, PROTO_UDP};

use super::Time;
use super::index::{Index, Keys, NONE};
use crate::atomic;
use crate::maps::{self, Tables};

/// Entries that one step of the clock hand covers; eight IPv4 entries are eight cache lines in a row.
const WINDOW: u32 = 8;
/// Steps after which the table is called full.
const WINDOWS: u32 = 8;

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
    } else {
        rank_of_live(flow, time)
    }
}

/// The same for a flow that goes on.
///
/// One exchange of UDP that was answered more than a second ago goes first, then who has waited for an answer for longer
/// than that: the answer to a packet of this moment is on its way. Without a branch: each would double what the verifier
/// has to walk through.
#[inline(always)]
fn rank_of_live<A: Address>(flow: &Flow<A>, time: Time) -> u32 {
    let exceeds = |ticks: u32, seconds: u32| {
        // The sign of a difference.
        let left =
            u64::from(time.config.hz * seconds).wrapping_sub(i64::from(ticks.cast_signed()).cast_unsigned());
        (atomic::opaque(left) >> 63) as u32
    };
    let replied = u32::from(flow.state & FLOW_REPLIED) >> FLOW_REPLIED.trailing_zeros();
    let is_connection = (atomic::opaque(u64::from(flow.proto ^ PROTO_UDP)).wrapping_neg() >> 63) as u32;
    let is_stream = is_connection | exceeds(flow.last_seen.wrapping_sub(flow.created), UDP_EXCHANGE);
    let is_silent = exceeds(time.now.wrapping_sub(flow.last_seen), 1);
    let stays = replied & (is_stream | (1 - is_silent));
    // 3 for an exchange, 4 or 5 for who waits.
    stays * KEEP + (1 - stays) * (5 - replied - is_silent)
}

/// For so many seconds after its first packet, UDP that is answered may be one question and one answer
/// (`net/netfilter/nf_conntrack_proto_udp.c`, `stream_ts`).
const UDP_EXCHANGE: u32 = 2;

const KEEP: u32 = 6;

/// The most willing of the [`WINDOW`] entries from `start` on, or of `room` if that is less: its rank in the upper half,
/// how far it is from the first in the lower.
#[inline(always)]
fn scan<F: Tables>(start: u32, room: u32, now: u32) -> u64 {
    let mut best = u64::from(KEEP) << 32;
    let Some(config) = maps::config() else { return best };
    let time = Time { now, config };
    let mut step = 0;
    while step < WINDOW && step < room && start + step < config.flow_entries {
        let Some(place) = F::flow(start + step) else { return best };
        // SAFETY: a map value; a stale look costs at worst a flow that was over anyway.
        let rank = rank::<F>(unsafe { &*place }, time);
        let found = u64::from(rank) << 32 | u64::from(step);
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

/// Entries that a CPU takes from the clock hand at once. Were it one, the hand would go to and fro between the CPUs with
/// each new flow.
const BLOCK: u32 = 16;

/// Entries that are a CPU's to look at.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Block {
    /// The next one.
    next: u32,
    /// How many there are.
    left: u32,
}

/// The next entry to look at, where a CPU has some left.
#[inline(always)]
fn at_hand<F: Tables>(time: Time) -> Option<(*mut Block, u32)> {
    let block = maps::flow_block(F::INDEX)?;
    // SAFETY: a map value of this CPU.
    let Block { next, left } = unsafe { read_volatile(block) };
    (left != 0 && next < time.config.flow_entries).then_some((block, next))
}

/// Asks for the entry that a new flow will look at first, so that it is there when it does: see
/// [`index::expect`](super::index::expect).
#[inline(always)]
pub fn expect<F: Tables>(time: Time) {
    if let Some((_, next)) = at_hand::<F>(time)
        && let Some(place) = F::flow(next)
    {
        // SAFETY: a map value; these bytes are always zero.
        unsafe { write_volatile(&raw mut (*place).reserved, 0) };
    }
}

/// Moves on to the next entry but `skip`, and gives it, and how many are this CPU's from there on; [`NONE`] if there are
/// no entries.
#[inline(always)]
fn advance<F: Tables>(skip: u32, config: &NodeConfig) -> (u32, u32) {
    let (Some(block), Some(hand)) = (maps::flow_block(F::INDEX), maps::flow_hand(F::INDEX)) else {
        return (NONE, 0);
    };
    if config.flow_entries == 0 {
        return (NONE, 0);
    }
    // SAFETY: a map value of this CPU, and one of all, aligned to eight bytes.
    unsafe {
        let Block { mut next, mut left } = read_volatile(block);
        if left > skip && next + skip < config.flow_entries {
            next += skip;
            left -= skip;
        } else {
            next = atomic::fetch_add(hand, u64::from(BLOCK)) as u32 % config.flow_entries;
            left = BLOCK;
        }
        write_volatile(block, Block { next: next + 1, left: left - 1 });
        (next, left)
    }
}

/// Leaves behind what lies between the entry that was looked at first and the one that was taken: it is less willing than
/// that. Were it looked at again, this CPU would soon meet nothing but established flows and those that it began a moment
/// ago.
#[inline(always)]
fn pass<F: Tables>(count: u32) {
    let Some(block) = maps::flow_block(F::INDEX) else { return };
    // SAFETY: a map value of this CPU.
    unsafe {
        let Block { next, left } = read_volatile(block);
        write_volatile(block, Block { next: next + count, left: left.saturating_sub(count) });
    }
}

/// Takes an entry for a new flow, by its [`rank`]. An established flow keeps its place whatever comes. Gives the index,
/// or [`NONE`].
#[inline(always)]
fn claim<F: Claim>(now: u32) -> u32 {
    let Some(config) = maps::config() else { return NONE };
    // One entry at a time while entries are free: neighbours come from memory together.
    let (mut window, mut skip) = (0, 0);
    while window < WINDOWS {
        let (start, room) = advance::<F>(skip, config);
        let Some(place) = F::flow(start) else { return NONE };
        // SAFETY: a map value; a stale look is noticed when the entry is taken.
        let mut found = u64::from(rank::<F>(unsafe { &*place }, Time { now, config })) << 32;
        if found >> 32 > 1 {
            // What lies behind this CPU's entries another one has taken a moment ago.
            found = F::scan(start, room, now);
        }
        let (rank, passed) = ((found >> 32) as u32, found as u32);
        if rank < KEEP && take::<F>(start + passed, rank, Time { now, config }) {
            pass::<F>(passed);
            return start + passed;
        }
        window += 1;
        skip = WINDOW - 1;
    }
    NONE
}

const _: () =
    assert!(offset_of!(Flow<[u32; 1]>, proto) % 4 == 0 && offset_of!(Flow<[u32; 4]>, proto) % 4 == 0);

/// Takes the entry at the clock hand, if it is free.
#[inline(always)]
pub(super) fn claim_free<F: Tables>(time: Time) -> u32 {
    let Some((block, index)) = at_hand::<F>(time) else { return NONE };
    let Some(place) = F::flow(index) else { return NONE };
    // SAFETY: a map value: protocol, state and two bytes of zero, aligned to four.
    unsafe {
        let word = word_of(place);
        let old = read_volatile(word);
        let [proto, state, ..] = old.to_ne_bytes();
        if state != 0 || atomic::compare_exchange32(word, old, claimed(proto)) != old {
            return NONE;
        }
        let Block { next, left } = read_volatile(block);
        write_volatile(block, Block { next: next + 1, left: left - 1 });
    }
    index
}

/// The word with protocol and state.
#[inline(always)]
pub(super) fn word_of<A>(place: *mut Flow<A>) -> *mut u32 {
    // SAFETY: inside the entry, and aligned as asserted below.
    unsafe { (&raw mut (*place).proto).cast() }
}

/// What it is while an entry is filled.
#[inline(always)]
fn claimed(proto: u8) -> u32 {
    u32::from_ne_bytes([proto, FLOW_USED | FLOW_CLAIMED, 0, 0])
}

/// What it is when the entry is free.
#[inline(always)]
pub(super) fn freed(word: u32) -> u32 {
    let [proto, ..] = word.to_ne_bytes();
    u32::from_ne_bytes([proto, 0, 0, 0])
}

/// Takes an entry that had this rank, unless it has changed, or another CPU is faster.
#[inline(always)]
fn take<F: Tables>(index: u32, was: u32, time: Time) -> bool {
    let Some(place) = F::flow(index) else { return false };
    // SAFETY: a map value: protocol, state and two bytes of zero, aligned to four.
    unsafe {
        let word = word_of(place);
        let old = read_volatile(word);
        if rank::<F>(&*place, time) != was {
            return false;
        }
        let [proto, ..] = old.to_ne_bytes();
        if atomic::compare_exchange32(word, old, claimed(proto)) != old {
            return false;
        }
        if was > 0 {
            Keys::of(&*place).remove::<F>(index);
        }
    }
    true
}

/// The loops, as functions that the verifier checks once each, on their own ("global").
pub trait Claim: Index {
    /// [`scan`].
    fn scan(start: u32, room: u32, now: u32) -> u64;
    /// [`claim`].
    fn claim(now: u32) -> u32;
}

macro_rules! claim {
    ($family:ty, $scan:ident, $claim:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $scan(start: u32, room: u32, now: u32) -> u64 {
            scan::<$family>(start, room, now)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $claim(now: u32) -> u32 {
            claim::<$family>(now)
        }

        impl Claim for $family {
            #[inline(always)]
            fn scan(start: u32, room: u32, now: u32) -> u64 {
                $scan(start, room, now)
            }

            #[inline(always)]
            fn claim(now: u32) -> u32 {
                $claim(now)
            }
        }
    };
}

claim!(proxy_common::V4, scan4, claim4);
claim!(proxy_common::V6, scan6, claim6);
