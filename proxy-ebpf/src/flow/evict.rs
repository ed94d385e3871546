//! Which entry a new flow takes: CLOCK replacement. A clock hand goes round all entries, each CPU takes a few at a time from
//! it, and a new flow takes the one with the lowest eviction priority among the next few.

use proxy_common::config::NodeConfig;
use proxy_common::conntrack::{KEEP, eviction_priority};
use proxy_common::flow::claimed;

use super::index::{NONE, remove_key};
use super::memory::EntryRef as _;
use crate::env::{ClockWindow, FlowTable, Time};
use crate::select::load;
use crate::shared::{Exchange as _, Shared as _, forget, opaque};

/// Entries that one step covers; eight IPv4 entries are eight cache lines in a row.
const SCAN: u32 = 8;
/// Steps after which the table is called full.
const SCANS: u32 = 14;
/// Of these, how many go on where the clock hand is. The others are spread over the whole table: assured flows that began one
/// after the other lie side by side, thousands of them, and a new flow must not fail because the hand is among them.
const NEAR: u32 = 4;
/// Entries that a CPU takes from the clock hand at once. Were it one, the hand would go to and fro between the CPUs with
/// each new flow.
const WINDOW: u32 = 16;

/// The eviction priority of an entry whose state word was read.
#[inline(always)]
fn priority<M: FlowTable>(entry: M::Entry, state: u64, time: Time) -> u32 {
    let entry = entry.after(state);
    eviction_priority(entry.proto(), state, entry.last_seen().load(), time.now, time.config, opaque)
}

/// The entry to evict among the [`SCAN`] from `start` on, or `room` if that is less: its priority in the upper half, how far
/// it is from the first in the lower.
#[inline(always)]
pub fn scan<M: FlowTable>(maps: M, start: u32, room: u32, now: u32) -> u64 {
    let mut best = u64::from(KEEP) << 32;
    let Some(config) = maps.config() else { return best };
    let time = Time { now, config };
    let mut step = 0;
    while step < SCAN && step < room && start + step < config.flow_entries {
        let Some(entry) = maps.entry(start + step) else { return best };
        let state = entry.state().load();
        let priority = forget(u64::from(priority::<M>(entry, state, time)), state) as u32;
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

/// The window of a CPU, and the next entry in it; `None` if it is empty.
#[inline(always)]
fn in_window<M: FlowTable>(maps: M, time: Time) -> Option<(*mut ClockWindow, u32)> {
    let window = maps.clock_window()?;
    // SAFETY: this CPU's own value.
    let ClockWindow { next, left } = unsafe { window.read_volatile() };
    (left != 0 && next < time.config.flow_entries).then_some((window, next))
}

/// Asks for the entry that a new flow will look at first; see [`index::prefetch`](super::index::prefetch).
#[inline(always)]
pub fn prefetch<M: FlowTable>(maps: M, time: Time) {
    if let Some((_, next)) = in_window(maps, time)
        && let Some(entry) = maps.entry(next)
    {
        entry.prefetch();
    }
}

/// Moves on to the next entry but `skip`, and gives it, and how many are in the window from there on; [`NONE`] if there are
/// no entries.
#[inline(always)]
fn advance<M: FlowTable>(maps: M, skip: u32, config: &NodeConfig) -> (u32, u32) {
    let Some(window) = maps.clock_window() else { return (NONE, 0) };
    if config.flow_entries == 0 {
        return (NONE, 0);
    }
    // SAFETY: this CPU's own value.
    let ClockWindow { mut next, mut left } = unsafe { window.read_volatile() };
    if left > skip && next + skip < config.flow_entries {
        next += skip;
        left -= skip;
    } else {
        let Some(hand) = maps.advance_clock_hand(WINDOW) else { return (NONE, 0) };
        next = hand as u32 % config.flow_entries;
        left = WINDOW;
    }
    // SAFETY: as above.
    unsafe { window.write_volatile(ClockWindow { next: next + 1, left: left - 1 }) };
    (next, left)
}

/// Moves this CPU's window on by a part of the table, and gives what [`advance`] does.
#[inline(always)]
fn leap<M: FlowTable>(maps: M, config: &NodeConfig) -> (u32, u32) {
    let Some(window) = maps.clock_window() else { return (NONE, 0) };
    if config.flow_entries == 0 {
        return (NONE, 0);
    }
    // SAFETY: this CPU's own value.
    unsafe {
        let far = window.read_volatile().next + config.flow_entries / (SCANS - NEAR);
        let next = far % config.flow_entries;
        window.write_volatile(ClockWindow { next: next + 1, left: WINDOW - 1 });
        (next, WINDOW - 1)
    }
}

/// Leaves behind what lies between the entry that was looked at first and the one that was taken: its priority is higher.
/// Were it looked at again, this CPU would soon meet nothing but established flows and those that it began a moment ago.
#[inline(always)]
fn leave_behind<M: FlowTable>(maps: M, count: u32) {
    let Some(window) = maps.clock_window() else { return };
    // SAFETY: this CPU's own value.
    unsafe {
        let ClockWindow { next, left } = window.read_volatile();
        window.write_volatile(ClockWindow { next: next + count, left: left.saturating_sub(count) });
    }
}

/// Claims an entry for a new flow, by its eviction priority. An assured flow keeps its entry whatever comes. Gives the
/// index, or [`NONE`].
#[inline(always)]
pub fn claim<M: FlowTable>(maps: M, now: u32) -> u32 {
    let Some(config) = maps.config() else { return NONE };
    // One entry at a time while entries are free: neighbours come from memory together.
    let (mut scanned, mut skip) = (0, 0);
    while scanned < SCANS {
        let (start, room) = if scanned < NEAR { advance(maps, skip, config) } else { leap(maps, config) };
        // Another CPU has just taken what lies behind this CPU's window.
        let found = maps.scan(start, room, now);
        let (priority, passed) = ((found >> 32) as u32, found as u32);
        if priority < KEEP && take(maps, start + passed, priority, now) {
            leave_behind(maps, passed);
            return start + passed;
        }
        scanned += 1;
        skip = SCAN - 1;
    }
    NONE
}

/// Claims the next entry, if it is free.
#[inline(always)]
pub fn claim_free<M: FlowTable>(maps: M, time: Time) -> u32 {
    let Some((window, index)) = in_window(maps, time) else { return NONE };
    let Some(entry) = maps.entry(index) else { return NONE };
    let state = entry.state().load();
    if state as u32 != 0 || entry.state().compare_exchange(state, claimed(state)) != state {
        return NONE;
    }
    // SAFETY: this CPU's own value.
    unsafe {
        let ClockWindow { next, left } = window.read_volatile();
        window.write_volatile(ClockWindow { next: next + 1, left: left - 1 });
    }
    index
}

/// Claims an entry that had this priority, unless it has changed, or another CPU is faster. Its last flow ends.
#[inline(always)]
fn take<M: FlowTable>(maps: M, index: u32, was: u32, now: u32) -> bool {
    let Some(entry) = maps.entry(index) else { return false };
    let state = entry.state().load();
    // Read once more behind the state word, which then must not change.
    if maps.scan(index, 1, now) != u64::from(was) << 32 {
        return false;
    }
    if entry.state().compare_exchange(state, claimed(state)) != state {
        return false;
    }
    if was > 0 {
        load::changed(maps, entry.backend_id(), state as u32, 0);
        remove_key(maps, index, entry, 0);
        remove_key(maps, index, entry, 1);
    }
    true
}
