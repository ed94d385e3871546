//! Selection of the entry for a new flow, by CLOCK replacement: a clock hand goes round all entries, each CPU takes a
//! window of entries from it at a time, and a new flow gets the entry with the lowest eviction priority among the next few
//! entries.

use proxy_common::config::NodeConfig;
use proxy_common::conntrack::{KEEP, RECENT, eviction_priority};
use proxy_common::flow::{STATE_CLAIMED, bits_of, claimed};

use super::index::{NO_FLOW, NO_FLOW_GENERATION, size};
use super::memory::EntryRef as _;
use crate::env::{ClockWindow, FlowTable, Time};
use crate::select::load;
use crate::shared::{Exchange as _, Shared as _, opaque, opaque_to_verifier};

/// Number of entries that one step covers; eight IPv4 entries are eight adjacent cache lines.
const SCAN: u32 = 8;
/// Number of steps after which the table counts as full.
const SCANS: u32 = 14;
/// Number of the [`SCANS`] steps that continue at the clock hand. The other steps are spread over the whole table: assured
/// flows that were created one after the other are adjacent, thousands of them, and a new flow must not fail because the
/// hand is among them.
const NEAR: u32 = 4;
/// Number of places elsewhere in the table at which a new flow looks for an older flow before it evicts one of the last second:
/// active flows without replies are often adjacent.
const PLACES: u32 = 4;
/// Number of entries that a CPU takes from the clock hand at a time. With one entry at a time, the cache line of the hand
/// would move between the CPUs with each new flow.
const WINDOW: u32 = 16;

/// Returns the eviction priority of an entry. `state` is its state word, which was read before.
#[inline(always)]
fn priority<M: FlowTable>(entry: M::Entry, state: u64, time: Time) -> u32 {
    let entry = entry.after(state);
    eviction_priority(entry.proto(), state, entry.last_seen().load(), time.now, time.config, opaque)
}

/// Returns the entry to evict among the next [`SCAN`] entries from `start` on, or the next `room` entries if that is less:
/// its priority in the upper half, its distance from `start` in the lower half.
#[inline(always)]
pub fn scan<M: FlowTable>(maps: M, start: u32, room: u32, now: u32) -> u64 {
    let mut best = u64::from(KEEP) << 32;
    let Some(config) = maps.config() else { return best };
    let (time, entries) = (Time { now, config }, size::<M>(config).entries);
    let mut step = 0;
    while step < SCAN && step < room && start + step < entries {
        let Some(entry) = maps.entry(start + step) else { return best };
        let state = entry.state().load();
        let priority = opaque_to_verifier(u64::from(priority::<M>(entry, state, time)), state) as u32;
        let found = u64::from(priority) << 32 | u64::from(step);
        if priority <= 1 {
            return found;
        }
        if found >> 32 < best >> 32 {
            best = found;
        }
        step += 1;
    }
    best
}

/// Returns an entry whose flow was not seen in the last second, at one of [`PLACES`] places that divide the table: its priority in
/// the upper half, its index in the lower half; [`NO_FLOW_GENERATION`] if there is none.
#[inline(always)]
pub fn scan_elsewhere<M: FlowTable>(maps: M, start: u32, now: u32) -> u64 {
    let Some(config) = maps.config() else { return NO_FLOW_GENERATION };
    let entries = size::<M>(config).entries;
    let (mut place, mut at) = (0, start);
    while place < PLACES && entries != 0 {
        at = (at + entries / (PLACES + 1)) % entries;
        let found = maps.scan(at, SCAN, now);
        if (found >> 32) < u64::from(RECENT) {
            return found + u64::from(at);
        }
        place += 1;
    }
    NO_FLOW_GENERATION
}

/// Returns the window of this CPU and the next entry in it; `None` if the window is empty.
#[inline(always)]
fn in_window<M: FlowTable>(maps: M, time: Time) -> Option<(*mut ClockWindow, u32)> {
    let window = maps.clock_window()?;
    // SAFETY: this CPU's own value.
    let ClockWindow { next, left } = unsafe { window.read_volatile() };
    (left != 0 && next < size::<M>(time.config).entries).then_some((window, next))
}

/// Prefetches the entry that the next new flow examines first; see [`index::prefetch`](super::index::prefetch).
#[inline(always)]
pub fn prefetch<M: FlowTable>(maps: M, time: Time) {
    if let Some((_, next)) = in_window(maps, time)
        && let Some(entry) = maps.entry(next)
    {
        entry.prefetch();
    }
}

/// Skips `skip` entries and takes the next one from the window, or from a new window. Returns that entry, and the number of
/// entries in the window from there on; [`NO_FLOW`] if there are no entries.
#[inline(always)]
fn advance<M: FlowTable>(maps: M, skip: u32, config: &NodeConfig) -> (u32, u32) {
    let Some(window) = maps.clock_window() else { return (NO_FLOW, 0) };
    let entries = size::<M>(config).entries;
    if entries == 0 {
        return (NO_FLOW, 0);
    }
    // SAFETY: this CPU's own value.
    let ClockWindow { mut next, mut left } = unsafe { window.read_volatile() };
    if left > skip && next + skip < entries {
        next += skip;
        left -= skip;
    } else {
        let Some(hand) = maps.advance_clock_hand(WINDOW) else { return (NO_FLOW, 0) };
        next = hand as u32 % entries;
        left = WINDOW;
    }
    // SAFETY: as above.
    unsafe { window.write_volatile(ClockWindow { next: next + 1, left: left - 1 }) };
    (next, left)
}

/// Moves this CPU's window forward by a fixed part of the table. Returns the same as [`advance`].
#[inline(always)]
fn advance_far<M: FlowTable>(maps: M, config: &NodeConfig) -> (u32, u32) {
    let Some(window) = maps.clock_window() else { return (NO_FLOW, 0) };
    let entries = size::<M>(config).entries;
    if entries == 0 {
        return (NO_FLOW, 0);
    }
    // SAFETY: this CPU's own value.
    unsafe {
        let far = window.read_volatile().next + entries / (SCANS - NEAR);
        let next = far % entries;
        window.write_volatile(ClockWindow { next: next + 1, left: WINDOW - 1 });
        (next, WINDOW - 1)
    }
}

/// Moves this CPU's window forward: past `skip` entries, or, with `far`, by a fixed part of the table. Returns the next entry,
/// and in the upper half the number of entries up to the end of the window. A separate function, since the verifier would walk
/// through it again for each step of [`claim`].
#[inline(always)]
pub fn move_window<M: FlowTable>(maps: M, skip: u32, far: bool) -> u64 {
    let Some(config) = maps.config() else { return u64::from(NO_FLOW) };
    let (start, room) = if far { advance_far(maps, config) } else { advance(maps, skip, config) };
    u64::from(room) << 32 | u64::from(start)
}

/// Moves the window past the entries between the first one examined and the one taken: their priority is higher. If they
/// were examined again, this CPU would soon find only established flows and the flows that it has just created.
#[inline(always)]
fn skip_examined<M: FlowTable>(maps: M, count: u32) {
    let Some(window) = maps.clock_window() else { return };
    // SAFETY: this CPU's own value.
    unsafe {
        let ClockWindow { next, left } = window.read_volatile();
        window.write_volatile(ClockWindow { next: next + count, left: left.saturating_sub(count) });
    }
}

/// Claims an entry for a new flow, by its eviction priority. An assured flow keeps its entry until it is closed or expires.
/// Returns the index, or [`NO_FLOW`].
#[inline(always)]
pub fn claim<M: FlowTable>(maps: M, now: u32) -> u32 {
    // The first step skips nothing, so that new flows take consecutive entries while entries are free: adjacent cache lines
    // are fetched from memory together.
    let (mut scanned, mut skip) = (0, 0);
    while scanned < SCANS {
        let window = maps.move_window(skip, scanned >= NEAR);
        let (start, room) = (window as u32, (window >> 32) as u32);
        // The scan ends with this CPU's window: another CPU has just taken the entries behind it.
        let found = maps.scan(start, room, now);
        let (mut priority, passed) = ((found >> 32) as u32, found as u32);
        let mut index = start + passed;
        if priority == RECENT {
            let elsewhere = maps.scan_elsewhere(start, now);
            if elsewhere != NO_FLOW_GENERATION {
                (priority, index) = ((elsewhere >> 32) as u32, elsewhere as u32);
            }
        }
        if priority < KEEP && claim_if_unchanged(maps, index, priority, now) {
            if index == start + passed {
                skip_examined(maps, passed);
            }
            return index;
        }
        scanned += 1;
        skip = SCAN - 1;
    }
    NO_FLOW
}

/// Claims the next entry of the window if it is free. Returns its index, or [`NO_FLOW`].
#[inline(always)]
pub fn claim_free<M: FlowTable>(maps: M, time: Time) -> u32 {
    let Some((window, index)) = in_window(maps, time) else { return NO_FLOW };
    let Some(entry) = maps.entry(index) else { return NO_FLOW };
    let state = entry.state().load();
    if state as u32 != 0 || entry.state().compare_exchange(state, claimed(state)) != state {
        return NO_FLOW;
    }
    // SAFETY: this CPU's own value.
    unsafe {
        let ClockWindow { next, left } = window.read_volatile();
        window.write_volatile(ClockWindow { next: next + 1, left: left - 1 });
    }
    index
}

/// Claims an entry whose priority was `was`, and ends its flow. Returns `false` if the priority has changed, or if another
/// CPU has claimed the entry first.
#[inline(always)]
fn claim_if_unchanged<M: FlowTable>(maps: M, index: u32, was: u32, now: u32) -> bool {
    let Some(entry) = maps.entry(index) else { return false };
    let state = entry.state().load();
    // The priority is computed again after the state word was read. If the state word changes from now on, the exchange
    // fails. A claim may end and begin again in between, with the same word.
    if bits_of(state) & STATE_CLAIMED != 0 || maps.scan(index, 1, now) != u64::from(was) << 32 {
        return false;
    }
    if entry.state().compare_exchange(state, claimed(state)) != state {
        return false;
    }
    if was > 0 {
        load::changed(maps, entry.backend_id(), state as u32, 0);
        maps.unlink(index);
    }
    true
}
