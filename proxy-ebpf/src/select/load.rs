//! Open connections of backends, the time that they take to answer, and the selection by both.
//!
//! Each backend has one word, in one array that all CPUs share, so that a selection reads two or three words. Counts per CPU would
//! have to be added up over all CPUs for each selection. Only Services with an algorithm by open connections use the array.

use proxy_common::backend::weight_of;
use proxy_common::connections::{of_jiffies, of_micros, with_answer};
use proxy_common::conntrack::{counted, first_answer};
use proxy_common::decide;
use proxy_common::select::{Load, is_by_latency, is_less_loaded, next_random, random_slot};
use proxy_common::service::ServiceEntry;

use crate::env::{OpenConnections, Services};
use crate::shared::{Exchange as _, Raw, Shared as _, add, opaque};

/// Maximum number of slots that are checked for another endpoint, since one endpoint may have many slots.
const LOOKS: u32 = 8;

/// Counts a new open connection of a backend.
#[inline(always)]
pub fn begun<M: OpenConnections>(maps: M, backend: u32) {
    maps.count_open(backend, 1, 0);
}

/// Counts the end of an open connection of a backend.
#[inline(always)]
pub fn ended<M: OpenConnections>(maps: M, backend: u32) {
    maps.count_open(backend, u64::MAX, 0);
}

/// Updates the count after a change of a flow's bits. The code that changed the bits calls it once.
#[inline(always)]
pub fn changed<M: OpenConnections>(maps: M, backend: u32, before: u32, after: u32) {
    let change = u64::from(counted(after)).wrapping_sub(counted(before).into());
    if change != 0 {
        maps.count_open(backend, change, 0);
    }
}

/// Does the same as [`changed`] after a packet, and notes the time to the backend's first answer. `created`: jiffies when the flow
/// began.
#[inline(always)]
pub fn touched<M: OpenConnections>(maps: M, backend: u32, before: u32, after: u32, created: u32) {
    let change = u64::from(counted(after)).wrapping_sub(counted(before).into());
    if opaque(change | u64::from(first_answer(before, after))) != 0 {
        maps.count_open(backend, change, created);
    }
}

/// Adds to the count of a backend. If `change` is 0, notes instead that the backend has answered a connection that began at jiffies
/// `created`.
#[inline(always)]
pub fn count<M: OpenConnections>(maps: M, backend: u32, change: u64, created: u32) {
    if change == 0 {
        answered(maps, backend, |now, hz| of_jiffies(now.wrapping_sub(created), hz));
    } else if let Some(open) = maps.open_connections(backend) {
        // SAFETY: a map value.
        unsafe { add(open, change) };
    }
}

/// Notes that a backend has answered a connection within this number of microseconds; 0: unknown.
#[inline(always)]
pub fn answered_within<M: OpenConnections>(maps: M, backend: u32, micros: u32) {
    if micros != 0 {
        answered(maps, backend, |_, hz| of_micros(micros, hz));
    }
}

/// Notes the time to an answer, which `took` returns for jiffies and their number in a second.
#[inline(always)]
fn answered<M: OpenConnections>(maps: M, backend: u32, took: impl FnOnce(u32, u32) -> u32) {
    let (Some(word), Some(time)) = (maps.open_connections(backend), maps.time()) else { return };
    // SAFETY: a map value.
    let word = unsafe { Raw::new(word) };
    let (found, now, hz) = (word.load(), time.now, time.config.hz);
    // If another CPU has written the word first, the next answer is noted.
    word.compare_exchange(found, with_answer(found, took(now, hz), now, hz));
}

/// Returns the less loaded of two randomly selected endpoints; 0: none. This is nearly as good as the least loaded of all
/// endpoints, and connections that begin at the same moment do not all go to the same endpoint (Mitzenmacher, "The power of
/// two choices in randomized load balancing"). Weights count twice, in the slots and in the comparison: an endpoint is
/// selected as often as its weight says.
///
/// By latency, a third endpoint is compared: of ten endpoints of which two are slow, both of a pair are slow for one connection in 45.
#[inline(always)]
pub fn first_id<M: Services>(maps: M, service: &ServiceEntry, selector: u32) -> u32 {
    let random = next_random(selector);
    let mut slot = maps.less_loaded(service, random_slot(selector, service.slot_count), random);
    if is_by_latency(service.algorithm) {
        slot = maps.less_loaded(service, slot, random.rotate_left(16));
    }
    maps.slot(service.slot_base + slot).unwrap_or(0)
}

/// Compares the endpoint in a slot with another one, which `random` selects; returns the slot of the less loaded one.
#[inline(always)]
pub fn less_loaded<M: Services>(maps: M, service: &ServiceEntry, slot: u32, random: u32) -> u32 {
    let (base, count) = (service.slot_base, service.slot_count);
    let Some(one) = maps.slot(base + slot) else { return slot };
    let (mut random, mut other, mut next, mut look) = (random, one, slot, 0);
    while look < LOOKS && other == one && count > 1 {
        // Any slot except `slot`.
        next = slot + 1 + random_slot(random, count - 1);
        if next >= count {
            next -= count;
        }
        let Some(id) = maps.slot(base + next) else { return slot };
        other = id;
        random = next_random(random);
        look += 1;
    }
    if other == one {
        return slot;
    }
    let (first, second) = (load(maps, service, one), load(maps, service, other));
    if is_less_loaded(service.algorithm, second, first) { next } else { slot }
}

/// Returns the load of a backend; [`Load::GONE`] if it does not serve. No `Option`: the compiler would leave its numbers undefined, and
/// the verifier refuses that.
#[inline(always)]
fn load<M: Services>(maps: M, service: &ServiceEntry, id: u32) -> Load {
    let (Some(backend), Some(word)) = (maps.backend(id), maps.open_connections(id)) else {
        return Load::GONE;
    };
    if !decide::serves(backend, service) {
        return Load::GONE;
    }
    // SAFETY: a map value, an integer.
    let word = unsafe { word.read_volatile() };
    let weight = weight_of(backend.flags);
    match maps.time() {
        Some(time) if is_by_latency(service.algorithm) => {
            Load::by_latency(word, weight, time.now, time.config.hz)
        }
        _ => Load::new(word, weight),
    }
}
