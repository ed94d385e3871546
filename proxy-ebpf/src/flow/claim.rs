//! Which entry a new flow takes. A clock hand goes round all entries, and each CPU takes a few at a time from it.

use core::mem::offset_of;
use core::ptr::{read_volatile, write_volatile};

use proxy_common::config::NodeConfig;
use proxy_common::flow::{FLOW_CLAIMED, FLOW_REPLIED, FLOW_USED, Flow, is_expired, is_over};

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
    while step < WINDOW {
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

/// Moves on by so many entries, and gives where that begins; [`NONE`] if there are no entries.
#[inline(always)]
fn advance<F: Tables>(step: u32, config: &NodeConfig) -> u32 {
    let (Some(block), Some(hand)) = (maps::flow_block(F::INDEX), maps::flow_hand(F::INDEX)) else {
        return NONE;
    };
    if config.flow_entries == 0 {
        return NONE;
    }
    // SAFETY: a map value of this CPU, and one of all, aligned to eight bytes.
    unsafe {
        let Block { mut next, mut left } = read_volatile(block);
        if left == 0 || next >= config.flow_entries {
            next = atomic::fetch_add(hand, u64::from(BLOCK)) as u32 % config.flow_entries;
            left = BLOCK;
        }
        let after = if next + step < config.flow_entries { next + step } else { 0 };
        write_volatile(block, Block { next: after, left: left.saturating_sub(step) });
        next
    }
}

/// Takes an entry for a new flow: one that is free or expired, else one that is over, else one that nobody has
/// answered yet. An established flow keeps its place whatever comes. Gives the index, or [`NONE`].
#[inline(always)]
fn claim<F: Claim>(now: u32) -> u32 {
    let Some(config) = maps::config() else { return NONE };
    // One entry at a time while entries are free: neighbours come from memory together.
    let (mut window, mut step) = (0, 1);
    while window < WINDOWS {
        let start = advance::<F>(step, config);
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
fn word_of<A>(place: *mut Flow<A>) -> *mut u32 {
    // SAFETY: inside the entry, and aligned as asserted below.
    unsafe { (&raw mut (*place).proto).cast() }
}

/// What it is while an entry is filled.
#[inline(always)]
fn claimed(proto: u8) -> u32 {
    u32::from_ne_bytes([proto, FLOW_USED | FLOW_CLAIMED, 0, 0])
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
    fn scan(start: u32, now: u32) -> u64;
    /// [`claim`].
    fn claim(now: u32) -> u32;
}

macro_rules! claim {
    ($family:ty, $scan:ident, $claim:ident) => {
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

        impl Claim for $family {
            #[inline(always)]
            fn scan(start: u32, now: u32) -> u64 {
                $scan(start, now)
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
