//! The index of the flows: a set-associative hash table in an array.
//!
//! Two CPUs may begin the same flow at once, and both must end up with one. So a key is added in three steps. It is written
//! as *pending* into a free slot; then all slots where it may stand are looked at for the same key; then it is made valid.
//! Of two pending slots with one key the one in the lower position stays, and its CPU removes the other; a valid one always
//! stays. Each step is an exchange that fails if another CPU was there before, and each CPU writes before it looks, so at
//! least one of the two sees the other. The same holds for the second bucket: that it counts is written before anything
//! stands in it.

use proxy_common::flow::{
    BUCKET_WORDS, DIRECTION_FORWARD, FlowKey, NO_POSITION, SLOT_PENDING, SLOT_TAG, STATE_CLAIMED, STATE_USED,
    bits_of, buckets_of, flow_of, generation_of, slot_of, tag,
};

use super::bucket::BucketRef;
use super::memory::EntryRef as _;
use crate::env::{FlowTable, Words};
use crate::shared::{Exchange, Shared as _, opaque};

/// No flow.
pub const NONE: u32 = u32::MAX;

/// No flow, and no generation; an index is never that high.
pub const NOTHING: u64 = u64::MAX;

/// Does the same for each slot of a bucket, without a loop: in one, the verifier soon forgets the states that it has
/// checked, since each differs by the number, and walks through the rest again for each branch. On the host it is a loop.
#[cfg(not(target_arch = "bpf"))]
macro_rules! each_slot {
    ($maps:ident, $number:ident, $body:block) => {
        for $number in 0..$maps::SLOTS $body
    };
}

/// The same, for the verifier.
#[cfg(target_arch = "bpf")]
macro_rules! each_slot {
    ($maps:ident, $number:ident, $body:block) => {
        each_slot!($maps, $number, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    };
    ($maps:ident, $number:ident, $body:block, $($slot:literal)+) => {
        $(if $slot < $maps::SLOTS {
            let $number: u32 = $slot;
            $body
        })+
    };
}

/// The slot at a position.
#[inline(always)]
fn at<M: FlowTable>(maps: M, position: u32) -> Option<impl Exchange<Value = u32>> {
    maps.bucket(position / BUCKET_WORDS).map(|bucket| bucket.slot(position))
}

/// Whether keys that have this bucket first may stand in their second one.
#[inline(always)]
fn overflows<M: FlowTable>(maps: M, bucket: u32) -> bool {
    maps.bucket(bucket).is_some_and(BucketRef::overflows)
}

/// Index and generation (upper half) of the flow that holds a key, if the slot leads to one; else [`NOTHING`]. An entry that
/// a CPU has claimed is no flow, not yet or not any more. The state is read first: while its generation is the same, so is
/// the flow.
#[inline(always)]
fn holder<M: FlowTable>(maps: M, slot: u32, key: &FlowKey<Words<M>>) -> u64 {
    let index = flow_of(slot);
    let Some(entry) = maps.entry(index) else { return NOTHING };
    let state = entry.state().load();
    // In one branch: each more doubles what the verifier walks through, for each slot.
    let unused = u64::from(bits_of(state) & (STATE_USED | STATE_CLAIMED) ^ STATE_USED);
    if unused | entry.after(state).differs_from(key) == 0 {
        u64::from(generation_of(state)) << 32 | u64::from(index)
    } else {
        NOTHING
    }
}

/// Looks into one bucket.
#[inline(always)]
pub fn find_in<M: FlowTable>(maps: M, bucket: u32, tag: u32, key: &FlowKey<Words<M>>) -> u64 {
    let Some(bucket) = maps.bucket(bucket) else { return NOTHING };
    each_slot!(M, number, {
        let slot = bucket.slot(number).load();
        if slot & (SLOT_TAG | SLOT_PENDING) == tag {
            let found = holder(maps, slot, key);
            if found != NOTHING {
                return found;
            }
        }
    });
    NOTHING
}

/// The first slot of a bucket that has the tag; 0: there is none.
#[inline(always)]
fn first_tagged<M: FlowTable>(maps: M, bucket: u32, tag: u32) -> u32 {
    let Some(bucket) = maps.bucket(bucket) else { return 0 };
    let mut number = 0;
    while number < M::SLOTS {
        let slot = bucket.slot(number).load();
        if slot & (SLOT_TAG | SLOT_PENDING) == tag {
            return slot;
        }
        number += 1;
    }
    0
}

/// The flow that a packet's key leads to: its index, and its generation in the upper half; or [`NOTHING`].
#[inline(always)]
pub fn find<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64) -> u64 {
    let Some(config) = maps.config() else { return NOTHING };
    let [first, second] = buckets_of(hash, config.flow_buckets);
    let tag = tag(hash);
    // Nearly always it is the first slot with the tag: others may have the same one in 127.
    let slot = first_tagged(maps, first, tag);
    if slot != 0 {
        let mut found = holder(maps, slot, key);
        if found == NOTHING {
            found = maps.find_in(first, tag, key);
        }
        if found != NOTHING {
            return found;
        }
    }
    if overflows(maps, first) { maps.find_in(second, tag, key) } else { NOTHING }
}

/// Asks for the bucket where a key with this hash stands first, so that it is there when it is looked at: it seldom is in
/// a cache.
#[inline(always)]
pub fn prefetch<M: FlowTable>(maps: M, hash: u64, buckets: u32) {
    let [first, _] = buckets_of(hash, buckets);
    if let Some(bucket) = maps.bucket(first) {
        bucket.prefetch();
    }
}

/// Whether the flow's key of that direction stands where the flow says.
#[inline(always)]
pub fn is_linked<M: FlowTable>(maps: M, index: u32, entry: M::Entry, direction: u8) -> bool {
    let (position, tag) = entry.position(direction);
    at(maps, position).is_some_and(|slot| slot.load() == slot_of(tag, index))
}

/// Removes the key of a direction from the flow whose claimed entry has that number. Another flow's slot is not equal, and
/// stays.
#[inline(always)]
pub fn remove_key<M: FlowTable>(maps: M, index: u32, entry: M::Entry, direction: u8) {
    let (position, tag) = entry.position(direction);
    if let Some(slot) = at(maps, position) {
        slot.compare_exchange(slot_of(tag, index), 0);
    }
}

/// Whether a slot is stale: the flow it leads to knows nothing of it.
#[inline(always)]
fn is_stale<M: FlowTable>(maps: M, slot: u32, position: u32) -> bool {
    if slot & SLOT_PENDING != 0 {
        return false;
    }
    let Some(entry) = maps.entry(flow_of(slot)) else { return true };
    let in_use = bits_of(entry.state().load()) & STATE_USED != 0;
    !in_use || (entry.position(0).0 != position && entry.position(1).0 != position)
}

/// Writes a pending slot into a bucket that has room, and gives its position. Without `stale` only what is free is room;
/// with it, stale slots too, which costs a look at a flow for each slot.
#[inline(always)]
pub fn take_slot_in<M: FlowTable>(maps: M, number: u32, pending: u32, stale: bool) -> u32 {
    let Some(bucket) = maps.bucket(number) else { return NO_POSITION };
    each_slot!(M, slot, {
        let (word, position) = (bucket.slot(slot), number * BUCKET_WORDS + slot);
        let found = word.load();
        let is_room = if stale { is_stale(maps, found, position) } else { found == 0 };
        if is_room && word.compare_exchange(found, pending) == found {
            return position;
        }
    });
    NO_POSITION
}

/// Writes a pending slot into the second bucket, or into either in the place of a stale one, and gives its position;
/// [`NO_POSITION`] if there is no room. Asked once the first bucket was full.
#[inline(always)]
fn take_slot<M: FlowTable>(maps: M, first: u32, second: u32, pending: u32) -> u32 {
    let Some(bucket) = maps.bucket(first) else { return NO_POSITION };
    bucket.set_overflow();
    let mut position = maps.take_slot_in(second, pending, false);
    if position == NO_POSITION {
        position = maps.take_slot_in(first, pending, true);
    }
    if position == NO_POSITION {
        position = maps.take_slot_in(second, pending, true);
    }
    position
}

/// How many slots of a bucket have that tag. Without a branch: each would double what the verifier walks through.
#[inline(always)]
fn count_tags<M: FlowTable>(maps: M, number: u32, tag: u32) -> u64 {
    let Some(bucket) = maps.bucket(number) else { return 0 };
    let mut count = 0;
    let mut slot = 0;
    while slot < M::SLOTS {
        count += opaque(u64::from(bucket.slot(slot).load() & SLOT_TAG ^ tag)).wrapping_sub(1) >> 63;
        slot += 1;
    }
    count
}

/// Looks in a bucket for another slot that holds the key of the claimed flow `index`, which stands, pending, at `own`. Gives
/// the flow of that slot if it is to have the key; if not, removes it: of two that are pending the one in the lower
/// position stays. [`NONE`]: there is none (any more).
#[inline(always)]
pub fn conflicting_entry<M: FlowTable>(maps: M, index: u32, direction: u32, own: u32, number: u32) -> u32 {
    let (Some(entry), Some(bucket)) = (maps.entry(index), maps.bucket(number)) else { return NONE };
    let (_, tag) = entry.position(direction as u8);
    each_slot!(M, slot, {
        let (word, position) = (bucket.slot(slot), number * BUCKET_WORDS + slot);
        let found = word.load();
        let other_index = flow_of(found);
        // Its own other key may have the same tag, and is none that conflicts.
        if found & SLOT_TAG == tag && position != own && other_index != index {
            let Some(other) = maps.entry(other_index) else { return NONE };
            let state = other.state().load();
            // What others are filling counts here: its keys are written before they are added.
            let in_use = bits_of(state) & STATE_USED != 0;
            if in_use && other.after(state).differs_from_entry(entry, direction as u8) == 0 {
                let yields = found & SLOT_PENDING != 0 && own < position;
                if !yields || word.compare_exchange(found, 0) == found & !SLOT_PENDING {
                    return other_index;
                }
                // It is gone: removed here, or by its own CPU, which has seen ours.
            }
        }
    });
    NONE
}

/// The same in both buckets where the key may stand.
#[inline(always)]
fn conflict<M: FlowTable>(maps: M, index: u32, direction: u32, own: u32, [first, second]: [u32; 2]) -> u32 {
    let found = maps.conflicting_entry(index, direction, own, first);
    if found == NONE && overflows(maps, first) {
        maps.conflicting_entry(index, direction, own, second)
    } else {
        found
    }
}

/// Adds a key of a flow to the index: the flow's number, the direction, and the key's hash. The flow's entry must be claimed
/// and filled. Gives the flow that the key leads to: this one, or the other that has the key already; [`NONE`] if all
/// slots are taken.
#[inline(always)]
pub fn add<M: FlowTable>(maps: M, index: u32, direction: u32, hash: u64) -> u32 {
    let Some(config) = maps.config() else { return NONE };
    let buckets = buckets_of(hash, config.flow_buckets);
    let [first, second] = buckets;
    // Opaque: what can be made of it again needs no room on the stack.
    let pending = opaque(u64::from(slot_of(tag(hash), index) | SLOT_PENDING)) as u32;
    let mut own = take_slot_in(maps, first, pending, false);
    if own == NO_POSITION {
        own = take_slot(maps, first, second, pending);
    }
    let (Some(slot), Some(entry)) = (at(maps, own), maps.entry(index)) else { return NONE };
    entry.set_position(direction as u8, own, pending & SLOT_TAG);
    let mut other = NONE;
    // Its own slot is one.
    if count_tags(maps, first, pending & SLOT_TAG) != 1 || overflows(maps, first) {
        other = conflict(maps, index, direction, own, buckets);
    }
    let wanted = if other == NONE { pending & !SLOT_PENDING } else { 0 };
    // A pending slot that another CPU has removed does not become valid.
    let stood = slot.compare_exchange(pending, wanted);
    if other != NONE {
        other
    } else if stood == pending {
        index
    } else {
        // The CPU that removed our slot has inserted the key.
        conflict(maps, index, direction, NO_POSITION, buckets)
    }
}

const _: () = assert!(DIRECTION_FORWARD == 0, "positions and tags are by direction");
