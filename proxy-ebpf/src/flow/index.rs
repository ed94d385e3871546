//! The index of the flows: a set-associative hash table in an array.
//!
//! Two CPUs may begin the same flow at once, and both must end up with one. So a key is added in three steps. It
//! is written as *pending* into a free way; then all ways where it may stand are looked at for the same key; then
//! it is made valid. Of two pending ways with one key the one in the lower place stands, and takes the other
//! away; a valid one always stands. Each step is an exchange that fails if another CPU was there before, and each
//! CPU writes before it looks, so at least one of the two sees the other. The same holds for the second bucket:
//! that it counts is written before anything stands in it.

use core::ptr::{read_volatile, write_volatile};

use proxy_common::config::NodeConfig;
use proxy_common::flow::{
    Bucket, DIRECTION_FORWARD, FLOW_USED, Flow, FlowKey, NO_PLACE, PLACES, WAY_PENDING, WAY_TAG, WAYS,
    buckets_of, flow_of, tag, way_of,
};
use proxy_common::{V4, V6};

use super::owns;
use crate::atomic;
use crate::maps::{self, Tables};

/// A bucket's last word, if keys stand in their second buckets.
const OVERFLOWS: u32 = {
    let [a, b] = 1u16.to_ne_bytes();
    u32::from_ne_bytes([a, b, 0, 0])
};

/// No flow.
pub const NONE: u32 = u32::MAX;

/// A family whose keys can be added.
pub trait Index: Tables {
    /// Adds a key of a flow to the index: its number, the direction, and the key's hash. The flow's entry must be
    /// filled. Gives the flow that the key leads to: this one, or the other that has the key already; [`NONE`] if
    /// all ways are taken.
    fn add_key(flow: u32, direction: u32, hash: u64) -> u32;
    /// Writes a pending way into the second bucket, or into either in the place of one that nobody misses, and gives its
    /// place; [`NO_PLACE`] if there is no room. Asked once the first bucket was full.
    fn take(first: u32, second: u32, pending: u32) -> u32;
    /// The other flow that is to have the key of this one, which stands pending at `mine`, in a bucket; [`NONE`] if
    /// there is none (any more).
    fn rival(flow: u32, direction: u32, mine: u32, bucket: u32) -> u32;
}

/// A place's way in its bucket.
#[inline(always)]
fn way_at(bucket: *mut Bucket, way: u32) -> *mut u32 {
    // SAFETY: the mask keeps it inside the bucket.
    unsafe { bucket.cast::<u32>().add((way & (PLACES - 1)) as usize) }
}

/// The way at a place.
#[inline(always)]
fn at<F: Tables>(place: u32) -> Option<*mut u32> {
    F::bucket(place / PLACES).map(|bucket| way_at(bucket, place))
}

/// Whether keys that have this bucket first may stand in their second one.
#[inline(always)]
fn overflows<F: Tables>(bucket: u32) -> bool {
    // SAFETY: a map value; volatile, because other CPUs write it.
    F::bucket(bucket).is_some_and(|bucket| unsafe { read_volatile(&raw const (*bucket).overflow) } != 0)
}

/// Index and generation (upper half) of the flow that holds a key, if the way leads to one; else [`NOTHING`]. The generation
/// is read first: while it is the same, so is the flow.
#[inline(always)]
fn holder<F: Tables>(way: u32, key: &FlowKey<F::Words>) -> u64 {
    let index = flow_of(way);
    let Some(place) = F::flow(index) else { return NOTHING };
    // SAFETY: a map value, of plain integers; what is read is checked.
    let (generation, flow) = unsafe { (read_volatile(&raw const (*place).generation), &*place) };
    if flow.state & FLOW_USED != 0 && owns(flow, key) {
        u64::from(generation) << 32 | u64::from(index)
    } else {
        NOTHING
    }
}

/// No flow; an index is never that high.
pub const NOTHING: u64 = u64::MAX;

/// Looks into one bucket.
#[inline(always)]
fn find_in<F: Tables>(bucket: u32, tag: u32, key: &FlowKey<F::Words>) -> u64 {
    let Some(bucket) = F::bucket(bucket) else { return NOTHING };
    let mut number = 0;
    while number < WAYS {
        // SAFETY: a map value; volatile, because other CPUs write it.
        let way = unsafe { read_volatile(way_at(bucket, number)) };
        if way & (WAY_TAG | WAY_PENDING) == tag {
            let found = holder::<F>(way, key);
            if found != NOTHING {
                return found;
            }
        }
        number += 1;
    }
    NOTHING
}

/// The flow that a packet's key leads to: its index, and its generation in the upper half; or [`NOTHING`].
#[inline(always)]
pub fn find<F: Tables>(key: &FlowKey<F::Words>, hash: u64, config: &NodeConfig) -> u64 {
    let [first, second] = buckets_of(hash, config.flow_buckets);
    let tag = tag(hash);
    match find_in::<F>(first, tag, key) {
        NOTHING if overflows::<F>(first) => find_in::<F>(second, tag, key),
        found => found,
    }
}

/// Asks for the bucket where a key with this hash stands first, so that it is there when it is looked at: it seldom is in
/// a cache. Programs have no instruction for that; but a store does not wait, and these bytes are always zero.
#[inline(always)]
pub fn expect<F: Tables>(hash: u64, config: &NodeConfig) {
    let [first, _] = buckets_of(hash, config.flow_buckets);
    if let Some(bucket) = F::bucket(first) {
        // SAFETY: a map value.
        unsafe { write_volatile(&raw mut (*bucket).reserved, 0) };
    }
}

/// Whether the flow's key of that direction stands where the flow says.
#[inline(always)]
pub fn stands<F: Tables>(index: u32, flow: &Flow<F::Words>, direction: u8) -> bool {
    let place = flow.places[usize::from(direction & 1)];
    let Some(way) = at::<F>(place) else { return false };
    // SAFETY: a map value; volatile, because other CPUs write it.
    unsafe { read_volatile(way) == way_of(flow.tags[usize::from(direction & 1)], index) }
}

/// Where the keys of a flow stand: read before it is certain that the entry is still the flow's.
pub struct Keys {
    places: [u32; 2],
    tags: [u32; 2],
}

impl Keys {
    /// Those of a flow.
    #[inline(always)]
    pub fn of<A>(flow: &Flow<A>) -> Self {
        // SAFETY: plain integers of a map value; volatile, so that they are read before what vouches for them.
        unsafe {
            Self { places: read_volatile(&raw const flow.places), tags: read_volatile(&raw const flow.tags) }
        }
    }

    /// Takes both away from the flow with that number.
    #[inline(always)]
    pub fn remove<F: Tables>(&self, index: u32) {
        let mut direction = 0;
        while direction < self.places.len() {
            self.remove_one::<F>(direction, index);
            direction += 1;
        }
    }

    /// Takes away the one that a client's packets find.
    #[inline(always)]
    pub fn remove_forward<F: Tables>(&self, index: u32) {
        self.remove_one::<F>(usize::from(DIRECTION_FORWARD), index);
    }

    #[inline(always)]
    fn remove_one<F: Tables>(&self, direction: usize, index: u32) {
        if let Some(way) = at::<F>(self.places[direction]) {
            // SAFETY: a map value. Another flow's way is not equal, and stays.
            unsafe { atomic::compare_exchange32(way, way_of(self.tags[direction], index), 0) };
        }
    }
}

/// Whether nobody will miss what stands at a place: the flow it leads to knows nothing of it.
#[inline(always)]
fn is_stale<F: Tables>(way: u32, place: u32) -> bool {
    if way & WAY_PENDING != 0 {
        return false;
    }
    let Some(flow) = F::flow(flow_of(way)) else { return true };
    // SAFETY: a map value, of plain integers.
    let flow = unsafe { &*flow };
    flow.state & FLOW_USED == 0 || (flow.places[0] != place && flow.places[1] != place)
}

/// Writes a pending way into a bucket that has room, and gives its place. Without `stale` only what is free is
/// room; with it, what nobody misses too, which costs a look at a flow for each way.
#[inline(always)]
fn take_in<F: Tables>(number: u32, pending: u32, stale: bool) -> u32 {
    let Some(bucket) = F::bucket(number) else { return NO_PLACE };
    let mut way = 0;
    while way < WAYS {
        let (pointer, place) = (way_at(bucket, way), number * PLACES + way);
        // SAFETY: a map value; volatile, because other CPUs write it.
        let found = unsafe { read_volatile(pointer) };
        let is_room = if stale { is_stale::<F>(found, place) } else { found == 0 };
        // SAFETY: as above; if the exchange fails, another CPU was faster.
        if is_room && unsafe { atomic::compare_exchange32(pointer, found, pending) } == found {
            return place;
        }
        way += 1;
    }
    NO_PLACE
}

/// [`Index::take`].
#[inline(always)]
fn take<F: Tables>(first: u32, second: u32, pending: u32) -> u32 {
    let Some(bucket) = F::bucket(first) else { return NO_PLACE };
    // SAFETY: a map value: the two and the two zero bytes behind them. An exchange, so that it is seen before what follows.
    unsafe { atomic::compare_exchange32((&raw mut (*bucket).overflow).cast(), 0, OVERFLOWS) };
    let mut place = take_in::<F>(second, pending, false);
    if place == NO_PLACE {
        place = take_in::<F>(first, pending, true);
    }
    if place == NO_PLACE {
        place = take_in::<F>(second, pending, true);
    }
    place
}

/// How many ways of a bucket have that tag. Without a branch: each would double what the verifier has to
/// walk through.
#[inline(always)]
fn like<F: Tables>(number: u32, tag: u32) -> u64 {
    let Some(bucket) = F::bucket(number) else { return 0 };
    let mut count = 0;
    let mut at = 0;
    while at < WAYS {
        // SAFETY: a map value; volatile, because other CPUs write it.
        let way = unsafe { read_volatile(way_at(bucket, at)) };
        count += atomic::opaque(u64::from(way & WAY_TAG ^ tag)).wrapping_sub(1) >> 63;
        at += 1;
    }
    count
}

/// [`Index::rival`]. Looks for another way that holds the key of the flow `index` which stands, pending, at `mine`.
/// Gives its flow if that one is to have the key; takes it away if not: of two that are pending the one in the lower
/// place stands.
#[inline(always)]
fn rival<F: Tables>(index: u32, direction: u32, mine: u32, number: u32) -> u32 {
    let (Some(flow), Some(bucket)) = (F::flow(index), F::bucket(number)) else { return NONE };
    // SAFETY: a map value, and the caller's own.
    let flow = unsafe { &*flow };
    let tag = if direction == u32::from(DIRECTION_FORWARD) { flow.tags[0] } else { flow.tags[1] };
    let mut way = 0;
    while way < WAYS {
        let (pointer, place) = (way_at(bucket, way), number * PLACES + way);
        // SAFETY: a map value; volatile, because other CPUs write it.
        let found = unsafe { read_volatile(pointer) };
        if found & WAY_TAG == tag && place != mine {
            let index = flow_of(found);
            let Some(other) = F::flow(index) else { return NONE };
            // SAFETY: a map value, of plain integers; what is read is checked.
            let other = unsafe { &*other };
            if other.state & FLOW_USED != 0 && owns(other, &flow.key(direction as u8)) {
                let goes = found & WAY_PENDING != 0 && mine < place;
                // SAFETY: as above.
                if !goes || unsafe { atomic::compare_exchange32(pointer, found, 0) } == found & !WAY_PENDING {
                    return index;
                }
                // It is gone: taken away here, or by its own CPU, which has seen ours.
            }
        }
        way += 1;
    }
    NONE
}

/// The same in both buckets where the key may stand.
#[inline(always)]
fn rival_of<F: Index>(index: u32, direction: u32, mine: u32, first: u32, second: u32) -> u32 {
    let found = F::rival(index, direction, mine, first);
    if found == NONE && overflows::<F>(first) { F::rival(index, direction, mine, second) } else { found }
}

/// [`Index::add_key`].
#[inline(always)]
fn add<F: Index>(index: u32, direction: u32, hash: u64) -> u32 {
    let Some(config) = maps::config() else { return NONE };
    let [first, second] = buckets_of(hash, config.flow_buckets);
    // Opaque: what can be made of it again needs no room on the stack.
    let pending = atomic::opaque(u64::from(way_of(tag(hash), index) | WAY_PENDING)) as u32;
    let mut mine = take_in::<F>(first, pending, false);
    if mine == NO_PLACE {
        mine = F::take(first, second, pending);
    }
    let (Some(way), Some(place)) = (at::<F>(mine), F::flow(index)) else { return NONE };
    // SAFETY: a map value, and the caller's own.
    unsafe {
        let slot = (direction & 1) as usize;
        write_volatile((&raw mut (*place).places).cast::<u32>().add(slot), mine);
        write_volatile((&raw mut (*place).tags).cast::<u32>().add(slot), pending & WAY_TAG);
    }
    let mut other = NONE;
    // Its own way is one.
    if like::<F>(first, pending & WAY_TAG) != 1 || overflows::<F>(first) {
        other = rival_of::<F>(index, direction, mine, first, second);
    }
    let wanted = if other == NONE { pending & !WAY_PENDING } else { 0 };
    // SAFETY: a map value. A pending way that another CPU took away does not become valid.
    let stood = unsafe { atomic::compare_exchange32(way, pending, wanted) };
    if other != NONE {
        other
    } else if stood == pending {
        index
    } else {
        // Whoever took ours away has the key.
        rival_of::<F>(index, direction, NO_PLACE, first, second)
    }
}

/// As functions that the verifier checks once each, on their own ("global").
macro_rules! index {
    ($family:ty, $add_key:ident, $take:ident, $rival:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $add_key(flow: u32, direction: u32, hash: u64) -> u32 {
            add::<$family>(flow, direction, hash)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $take(first: u32, second: u32, pending: u32) -> u32 {
            take::<$family>(first, second, pending)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $rival(flow: u32, direction: u32, mine: u32, bucket: u32) -> u32 {
            rival::<$family>(flow, direction, mine, bucket)
        }

        impl Index for $family {
            #[inline(always)]
            fn add_key(flow: u32, direction: u32, hash: u64) -> u32 {
                $add_key(flow, direction, hash)
            }

            #[inline(always)]
            fn take(first: u32, second: u32, pending: u32) -> u32 {
                $take(first, second, pending)
            }

            #[inline(always)]
            fn rival(flow: u32, direction: u32, mine: u32, bucket: u32) -> u32 {
                $rival(flow, direction, mine, bucket)
            }
        }
    };
}

index!(V4, add_key4, take4, rival4);
index!(V6, add_key6, take6, rival6);
