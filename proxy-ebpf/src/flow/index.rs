//! The index of the flows: a set-associative hash table in an array.
//!
//! Two CPUs may create the same flow at the same time, and exactly one flow must remain. A key is therefore added in three
//! steps: the CPU writes the key as *pending* into a free slot; it searches all slots where the key may be for the same
//! key; it makes the slot valid. Of two pending slots with the same key, the slot at the lower position stays, and its CPU
//! removes the other slot; a valid slot always stays. Each step is a compare-and-exchange that fails if another CPU has
//! changed the slot, and each CPU writes its slot before it searches, so at least one of the two CPUs sees the other's
//! slot. The mark that the second bucket is in use follows the same rule: it is written before a key is written to the
//! second bucket.

use proxy_common::Family;
use proxy_common::config::{FlowSize, NodeConfig};
use proxy_common::flow::{
    BUCKET_WORDS, DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, NO_POSITION, SLOT_PENDING, SLOT_TAG,
    STATE_CLAIMED, STATE_USED, bits_of, buckets_of, flow_of, generation_of, slot_of, tag,
};

use super::bucket::BucketRef;
use super::memory::EntryRef as _;
use crate::env::{FlowTable, Words};
use crate::shared::{Exchange, Shared as _, opaque};

/// Returned instead of an index if there is no flow.
pub const NO_FLOW: u32 = u32::MAX;

/// Returned instead of an index and a generation if there is no flow. No index is that high.
pub const NO_FLOW_GENERATION: u64 = u64::MAX;

/// Runs `$body` for each slot of a bucket. In programs it is unrolled: in a loop the states differ by the slot number, so
/// the verifier soon forgets the states that it has checked, and walks through the rest again for each branch. On the host
/// it is a loop.
#[cfg(not(target_arch = "bpf"))]
macro_rules! each_slot {
    ($maps:ident, $number:ident, $body:block) => {
        for $number in 0..$maps::SLOTS $body
    };
}

/// The unrolled form for programs.
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

/// Returns the size of the handle's flow table.
#[inline(always)]
pub fn size<M: FlowTable>(config: &NodeConfig) -> FlowSize {
    config.flows[(<M::Family as Family>::INDEX & 1) as usize]
}

/// Returns the slot at a position, or `None` if the position is beyond the index.
#[inline(always)]
fn at<M: FlowTable>(maps: M, position: u32) -> Option<impl Exchange<Value = u32>> {
    maps.bucket(position / BUCKET_WORDS).map(|bucket| bucket.slot(position))
}

/// Whether keys whose first bucket is this one may be in their second bucket.
#[inline(always)]
fn overflows<M: FlowTable>(maps: M, bucket: u32) -> bool {
    maps.bucket(bucket).is_some_and(BucketRef::overflows)
}

/// Returns index and generation (upper half) of the flow that a slot refers to, if that flow has the key; otherwise
/// [`NO_FLOW_GENERATION`]. A claimed entry holds no flow: the flow is being created or removed. The state word is read before the
/// tuple: while the generation is unchanged, the entry holds the same flow.
#[inline(always)]
fn holder<M: FlowTable>(maps: M, slot: u32, key: &FlowKey<Words<M>>) -> u64 {
    let index = flow_of(slot);
    let Some(entry) = maps.entry(index) else { return NO_FLOW_GENERATION };
    let state = entry.state().load();
    // One branch for both conditions: each further branch doubles the paths that the verifier walks, for each slot.
    let unused = u64::from(bits_of(state) & (STATE_USED | STATE_CLAIMED) ^ STATE_USED);
    if unused | entry.after(state).differs_from(key) == 0 {
        u64::from(generation_of(state)) << 32 | u64::from(index)
    } else {
        NO_FLOW_GENERATION
    }
}

/// Searches one bucket for the key. Returns index and generation of its flow, or [`NO_FLOW_GENERATION`].
#[inline(always)]
pub fn find_in<M: FlowTable>(maps: M, bucket: u32, tag: u32, key: &FlowKey<Words<M>>) -> u64 {
    let Some(bucket) = maps.bucket(bucket) else { return NO_FLOW_GENERATION };
    each_slot!(M, number, {
        let slot = bucket.slot(number).load();
        if slot & (SLOT_TAG | SLOT_PENDING) == tag {
            let found = holder(maps, slot, key);
            if found != NO_FLOW_GENERATION {
                return found;
            }
        }
    });
    NO_FLOW_GENERATION
}

/// Returns the first valid slot of a bucket that has the tag, or 0 if there is none.
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

/// Returns the flow of a packet's key: its index, and its generation in the upper half; [`NO_FLOW_GENERATION`] if there is no flow.
#[inline(always)]
pub fn find<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64) -> u64 {
    let Some(config) = maps.config() else { return NO_FLOW_GENERATION };
    let [number, other] = size::<M>(config).searched;
    let [first, second] = buckets_of(hash, number);
    let tag = tag(hash);
    // The first slot with the tag nearly always has the key: two keys have the same tag with a probability of 1 in 127.
    let slot = first_tagged(maps, first, tag);
    if slot != 0 {
        let mut found = holder(maps, slot, key);
        if found == NO_FLOW_GENERATION {
            found = maps.find_in(first, tag, key);
        }
        if found != NO_FLOW_GENERATION {
            return found;
        }
    }
    if overflows(maps, first) {
        let found = maps.find_in(second, tag, key);
        if found != NO_FLOW_GENERATION {
            return found;
        }
    }
    if other == 0 { NO_FLOW_GENERATION } else { find_by(maps, key, hash, other) }
}

/// Returns the same as [`find`], by another number of buckets, while the index grows.
#[inline(always)]
fn find_by<M: FlowTable>(maps: M, key: &FlowKey<Words<M>>, hash: u64, buckets: u32) -> u64 {
    let [first, second] = buckets_of(hash, buckets);
    let found = maps.find_in(first, tag(hash), key);
    if found == NO_FLOW_GENERATION { maps.find_in(second, tag(hash), key) } else { found }
}

/// Prefetches the first bucket of a key with this hash, which is seldom in a cache.
#[inline(always)]
pub fn prefetch<M: FlowTable>(maps: M, hash: u64, config: &NodeConfig) {
    let [first, _] = buckets_of(hash, size::<M>(config).searched[0]);
    if let Some(bucket) = maps.bucket(first) {
        bucket.prefetch();
    }
}

/// Whether the slot at the position that the flow stores for this direction still refers to the flow.
#[inline(always)]
pub fn is_linked<M: FlowTable>(maps: M, index: u32, entry: M::Entry, direction: u8) -> bool {
    let (position, tag) = entry.position(direction);
    at(maps, position).is_some_and(|slot| slot.load() == slot_of(tag, index))
}

/// Removes the key of a direction from the index. `index` is the number of the claimed `entry`. A slot of another flow has
/// another value, and stays.
#[inline(always)]
pub fn remove_key<M: FlowTable>(maps: M, index: u32, entry: M::Entry, direction: u8) {
    let (position, tag) = entry.position(direction);
    if let Some(slot) = at(maps, position) {
        slot.compare_exchange(slot_of(tag, index), 0);
    }
}

/// Whether the index grows: then a key may be in two places, of which its entry stores one.
#[inline(always)]
pub fn grows<M: FlowTable>(config: &NodeConfig) -> bool {
    size::<M>(config).searched[1] != 0
}

/// Removes the forward key of the claimed entry `index`, which keeps its flow, and notes that the key is not in the index: a growth
/// would add it again.
#[inline(always)]
pub fn remove_forward_key<M: FlowTable>(maps: M, index: u32, entry: M::Entry) {
    remove_key(maps, index, entry, DIRECTION_FORWARD);
    let (_, tag) = entry.position(DIRECTION_FORWARD);
    entry.set_position(DIRECTION_FORWARD, NO_POSITION, tag);
}

/// Removes both keys of the claimed entry `index` from the index.
#[inline(always)]
pub fn unlink<M: FlowTable>(maps: M, index: u32) {
    if let Some(entry) = maps.entry(index) {
        remove_key(maps, index, entry, DIRECTION_FORWARD);
        remove_key(maps, index, entry, DIRECTION_REPLY);
    }
}

/// Whether a slot is stale: its flow is not in use, or does not store this position.
#[inline(always)]
fn is_stale<M: FlowTable>(maps: M, slot: u32, position: u32) -> bool {
    if slot & SLOT_PENDING != 0 {
        return false;
    }
    let Some(entry) = maps.entry(flow_of(slot)) else { return true };
    let in_use = bits_of(entry.state().load()) & STATE_USED != 0;
    !in_use || (entry.position(0).0 != position && entry.position(1).0 != position)
}

/// Writes a pending slot into a bucket that has room, and returns its position, or [`NO_POSITION`]. Without `stale` only
/// free slots are used; with it, stale slots too, which costs a lookup of the flow for each slot.
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

/// Writes a pending slot into the second bucket, or in the place of a stale slot of either bucket, and returns its
/// position; [`NO_POSITION`] if there is no room. Called only if the first bucket is full.
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

/// Returns the number of slots of a bucket that have the tag. Without branches: each would double the paths that the
/// verifier walks.
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

/// Searches a bucket for another slot with the key of the claimed flow `index`, whose own pending slot is at position
/// `own`. Returns the flow of the other slot if that flow keeps the key; otherwise removes the other slot. Of two pending
/// slots, the slot at the lower position stays. Returns [`NO_FLOW`] if no other slot has the key, or none is left.
#[inline(always)]
pub fn conflicting_entry<M: FlowTable>(maps: M, index: u32, direction: u32, own: u32, number: u32) -> u32 {
    let (Some(entry), Some(bucket)) = (maps.entry(index), maps.bucket(number)) else { return NO_FLOW };
    let (_, tag) = entry.position(direction as u8);
    each_slot!(M, slot, {
        let (word, position) = (bucket.slot(slot), number * BUCKET_WORDS + slot);
        let found = word.load();
        let other_index = flow_of(found);
        // The flow's own key of the other direction may have the same tag, and is no conflict.
        if found & SLOT_TAG == tag && position != own && other_index != index {
            let Some(other) = maps.entry(other_index) else { return NO_FLOW };
            let state = other.state().load();
            // An entry that another CPU has claimed counts, too: the keys are written to the entry before they are added to
            // the index.
            let in_use = bits_of(state) & STATE_USED != 0;
            if in_use && other.after(state).differs_from_entry(entry, direction as u8) == 0 {
                let yields = found & SLOT_PENDING != 0 && own < position;
                if !yields || word.compare_exchange(found, 0) == found & !SLOT_PENDING {
                    return other_index;
                }
                // The other slot is removed: by this CPU, or by the CPU that wrote it, which has found our slot.
            }
        }
    });
    NO_FLOW
}

/// Does the same as [`conflicting_entry`] in all buckets where the key may be.
#[inline(always)]
fn conflict<M: FlowTable>(
    maps: M,
    index: u32,
    direction: u32,
    own: u32,
    hash: u64,
    searched: [u32; 2],
) -> u32 {
    let mut found = NO_FLOW;
    let mut turn = 0;
    while turn < 2 {
        // The second number is 0 unless the index grows.
        if found == NO_FLOW && searched[turn] != 0 {
            let [first, second] = buckets_of(hash, searched[turn]);
            found = maps.conflicting_entry(index, direction, own, first);
            if found == NO_FLOW && overflows(maps, first) {
                found = maps.conflicting_entry(index, direction, own, second);
            }
        }
        turn += 1;
    }
    found
}

/// Adds a key of a flow to the index. `index` is the flow's number, `hash` the key's hash; the flow's entry must be claimed
/// and filled. Returns the flow that the key refers to: this flow, or another flow that already has the key; [`NO_FLOW`] if
/// all slots are taken.
#[inline(always)]
pub fn add<M: FlowTable>(maps: M, index: u32, direction: u32, hash: u64) -> u32 {
    let Some(config) = maps.config() else { return NO_FLOW };
    let FlowSize { buckets, searched, .. } = size::<M>(config);
    let [first, second] = buckets_of(hash, buckets);
    // `opaque` makes the compiler compute the tag and the valid slot from `pending` again, instead of keeping them on the
    // stack.
    let pending = opaque(u64::from(slot_of(tag(hash), index) | SLOT_PENDING)) as u32;
    let mut own = take_slot_in(maps, first, pending, false);
    if own == NO_POSITION {
        own = take_slot(maps, first, second, pending);
    }
    let (Some(slot), Some(entry)) = (at(maps, own), maps.entry(index)) else { return NO_FLOW };
    entry.set_position(direction as u8, own, pending & SLOT_TAG);
    let mut other = NO_FLOW;
    // The flow's own slot is one of those with the tag.
    if searched[1] != 0 || count_tags(maps, first, pending & SLOT_TAG) != 1 || overflows(maps, first) {
        other = conflict(maps, index, direction, own, hash, searched);
    }
    let wanted = if other == NO_FLOW { pending & !SLOT_PENDING } else { 0 };
    // Fails if another CPU has removed the pending slot, which then does not become valid.
    let stood = slot.compare_exchange(pending, wanted);
    if other != NO_FLOW {
        other
    } else if stood == pending {
        index
    } else {
        // The CPU that removed our slot has added the key for its own flow.
        conflict(maps, index, direction, NO_POSITION, hash, searched)
    }
}

const _: () = assert!(DIRECTION_FORWARD == 0, "positions and tags are by direction");
