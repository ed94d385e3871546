//! Open connections of backends, and the selection by their number.
//!
//! Each backend has one count, in one array that all CPUs share, so that a selection reads two counts. Counts per CPU would
//! have to be added up over all CPUs for each selection. Only Services with an algorithm by open connections use the array.

use proxy_common::backend::weight_of;
use proxy_common::conntrack::is_counted;
use proxy_common::decide;
use proxy_common::select::{Load, is_less_loaded, next_random, random_slot};
use proxy_common::service::ServiceEntry;

use crate::env::{OpenConnections, Services};
use crate::shared::add;

/// Maximum number of slots that are checked for a second endpoint, since one endpoint may have many slots.
const LOOKS: u32 = 8;

/// Counts a new open connection of a backend.
#[inline(always)]
pub fn begun<M: OpenConnections>(maps: M, backend: u32) {
    maps.count_open(backend, 1);
}

/// Counts the end of an open connection of a backend.
#[inline(always)]
pub fn ended<M: OpenConnections>(maps: M, backend: u32) {
    maps.count_open(backend, u64::MAX);
}

/// Updates the count after a change of a flow's bits. The code that changed the bits calls it once.
#[inline(always)]
pub fn changed<M: OpenConnections>(maps: M, backend: u32, before: u32, after: u32) {
    if is_counted(before) != is_counted(after) {
        maps.count_open(backend, if is_counted(after) { 1 } else { u64::MAX });
    }
}

/// Adds to the count of a backend.
#[inline(always)]
pub fn count<M: OpenConnections>(maps: M, backend: u32, change: u64) {
    if let Some(open) = maps.open_connections(backend) {
        // SAFETY: a map value.
        unsafe { add(open, change) };
    }
}

/// Returns the less loaded of two randomly selected endpoints; 0: none. This is nearly as good as the least loaded of all
/// endpoints, and connections that begin at the same moment do not all go to the same endpoint (Mitzenmacher, "The power of
/// two choices in randomized load balancing"). Weights count twice, in the slots and in the comparison: an endpoint is
/// selected as often as its weight says.
#[inline(always)]
pub fn first_id<M: Services>(maps: M, service: &ServiceEntry, selector: u32) -> u32 {
    let (base, count) = (service.slot_base, service.slot_count);
    let slot = random_slot(selector, count);
    let Some(one) = maps.slot(base + slot) else { return 0 };
    let (mut random, mut other, mut look) = (selector, one, 0);
    while look < LOOKS && other == one && count > 1 {
        random = next_random(random);
        // Any slot except `slot`.
        let mut next = slot + 1 + random_slot(random, count - 1);
        if next >= count {
            next -= count;
        }
        let Some(id) = maps.slot(base + next) else { return one };
        other = id;
        look += 1;
    }
    if other == one {
        return one;
    }
    match (load(maps, service, one), load(maps, service, other)) {
        (Some(first), Some(second)) if !is_less_loaded(service.algorithm, second, first) => one,
        (_, Some(_)) => other,
        _ => one,
    }
}

/// Returns the load of a backend; `None` if it does not serve.
#[inline(always)]
fn load<M: Services>(maps: M, service: &ServiceEntry, id: u32) -> Option<Load> {
    let backend = maps.backend(id).filter(|backend| decide::serves(backend, service))?;
    let open = maps.open_connections(id)?;
    // SAFETY: a map value, an integer.
    Some(Load::new(unsafe { open.read_volatile() }, weight_of(backend.flags)))
}
