//! The index of a flow table, which is the same in both layouts. Keys are added and removed by the rules of the programs
//! (`proxy-ebpf/src/flow/index.rs`), while programs do the same.

use std::sync::atomic::{AtomicU32, Ordering};

use proxy_common::flow::{
    BUCKET_SLOTS, BUCKET_WORDS, SLOT_PENDING, SLOT_TAG, buckets_of, flow_of, slot_of, tag,
};

use crate::maps::mapping::Mapping;

/// Value of a bucket's last word if keys of the bucket may be in their second bucket.
const OVERFLOWS: u32 = {
    let [a, b] = 1u16.to_ne_bytes();
    u32::from_ne_bytes([a, b, 0, 0])
};

/// `flow_index` or `flow_index6`.
pub(super) struct Index {
    words: Mapping,
    buckets: u32,
}

impl Index {
    pub(super) fn new(words: Mapping, buckets: u32) -> Self {
        Self { words, buckets }
    }

    fn slot(&self, position: u32) -> Option<&AtomicU32> {
        self.words.word32((position / BUCKET_WORDS) as usize, (position % BUCKET_WORDS) as usize)
    }

    fn slots_of(&self, bucket: u32) -> impl Iterator<Item = (u32, &AtomicU32)> {
        let positions = (0..BUCKET_SLOTS).map(move |slot| bucket * BUCKET_WORDS + slot);
        positions.filter_map(|position| Some((position, self.slot(position)?)))
    }

    fn overflow(&self, bucket: u32) -> Option<&AtomicU32> {
        self.slot(bucket * BUCKET_WORDS + BUCKET_WORDS - 1)
    }

    /// Returns the slots where a key with this hash may be.
    fn slots(&self, hash: u64) -> impl Iterator<Item = (u32, &AtomicU32)> {
        let [first, second] = buckets_of(hash, self.buckets);
        let overflows = self.overflow(first).is_some_and(|word| word.load(Ordering::SeqCst) & OVERFLOWS != 0);
        [Some(first), overflows.then_some(second)].into_iter().flatten().flat_map(|b| self.slots_of(b))
    }

    /// Returns the flows with a valid slot that may be that of the key with this hash.
    pub(super) fn candidates(&self, hash: u64) -> impl Iterator<Item = u32> {
        let loaded = self.slots(hash).map(|(_, word)| word.load(Ordering::SeqCst));
        loaded.filter(move |slot| slot & (SLOT_TAG | SLOT_PENDING) == tag(hash)).map(flow_of)
    }

    /// Removes the key with this tag of a flow. If the slot at the position is another flow's, it stays.
    pub(super) fn remove(&self, position: u32, tag: u32, flow: u32) {
        if let Some(slot) = self.slot(position) {
            exchange(slot, slot_of(tag, flow), 0);
        }
    }

    /// Writes a pending key of a flow to a free or stale slot, and returns its position; `None` if there is no room.
    /// `is_stale` tells whether a flow does not refer to a position.
    pub(super) fn take(&self, hash: u64, flow: u32, is_stale: impl Fn(u32, u32) -> bool) -> Option<u32> {
        let pending = slot_of(tag(hash), flow) | SLOT_PENDING;
        let [first, second] = buckets_of(hash, self.buckets);
        let take = |bucket: u32, or_stale: bool| {
            let taken = self.slots_of(bucket).find(|(position, word)| {
                let found = word.load(Ordering::SeqCst);
                let is_stale = || found & SLOT_PENDING == 0 && is_stale(flow_of(found), *position);
                (found == 0 || or_stale && is_stale()) && exchange(word, found, pending)
            });
            taken.map(|(position, _)| position)
        };
        if let Some(taken) = take(first, false) {
            return Some(taken);
        }
        exchange(self.overflow(first)?, 0, OVERFLOWS);
        take(second, false).or_else(|| take(first, true)).or_else(|| take(second, true))
    }

    /// Makes the pending key at `position` valid, or removes it if another flow has the same key; returns whether the key is
    /// valid. `has_key` tells whether a flow has the key. Of two pending keys, the one at the lower position stays.
    pub(super) fn settle(&self, hash: u64, flow: u32, position: u32, has_key: impl Fn(u32) -> bool) -> bool {
        let conflicts = self.slots(hash).any(|(other_position, word)| {
            let found = word.load(Ordering::SeqCst);
            let other = flow_of(found);
            // The two keys of one flow may have the same tag: another slot of this flow is no conflict.
            let may_have = found & SLOT_TAG == tag(hash) && other_position != position && other != flow;
            // A pending slot that yields is removed.
            let yields =
                || found & SLOT_PENDING != 0 && position < other_position && exchange(word, found, 0);
            may_have && has_key(other) && !yields()
        });
        let valid = slot_of(tag(hash), flow);
        let settled = self
            .slot(position)
            .is_some_and(|slot| exchange(slot, valid | SLOT_PENDING, if conflicts { 0 } else { valid }));
        settled && !conflicts
    }
}

fn exchange(word: &AtomicU32, old: u32, new: u32) -> bool {
    word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
