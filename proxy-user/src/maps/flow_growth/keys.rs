//! Moves the keys of flows to the buckets by another number of buckets, by the rules of the programs
//! (`proxy-ebpf/src/flow/index.rs`), while programs do the same.
//!
//! A flow can be found by either place of its key all the time. Only the owner of a claimed entry writes its positions; this
//! module changes them by compare-and-exchange, and takes the change back if the entry's generation has changed meanwhile: then
//! the entry holds another flow.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

use proxy_common::Address;
use proxy_common::flow::{
    BUCKET_SLOTS, BUCKET_WORDS, FlowEntry, NO_POSITION, SLOT_PENDING, STATE_CLAIMED, STATE_USED, bits_of,
    buckets_of, flow_of, slot_of, tag,
};

use super::Mapping;

/// Value of a bucket's last word if keys of the bucket may be in their second bucket.
const OVERFLOWS: u32 = {
    let [a, b] = 1u16.to_ne_bytes();
    u32::from_ne_bytes([a, b, 0, 0])
};

/// The flows and the index of one family.
pub(super) struct Keys<'a> {
    pub flows: &'a Mapping,
    pub buckets: &'a Mapping,
    /// The number of buckets by which the keys shall be found.
    pub number: u32,
    pub seed: u32,
}

/// What one pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pass {
    /// Keys that moved.
    pub moved: usize,
    /// Keys that could not be moved now, and entries that a program owned.
    pub missed: usize,
}

impl Pass {
    /// Whether all keys are where they are to be.
    pub(super) fn is_done(self) -> bool {
        self.moved == 0 && self.missed == 0
    }
}

impl Keys<'_> {
    /// Moves the keys that are in other buckets. `waits`: an entry that a program owns counts as missed: for a moment, unless
    /// the program was killed.
    pub(super) fn pass<A: Address>(&self, entries: u32, waits: bool) -> Pass {
        let mut pass = Pass::default();
        for index in 0..entries {
            let Some(state) = self.state(index) else { break };
            if bits_of(state) & STATE_USED == 0 {
                continue;
            }
            if bits_of(state) & STATE_CLAIMED != 0 {
                pass.missed += usize::from(waits);
                continue;
            }
            let Some(flow) = self.flows.read::<FlowEntry<A>>(index as usize) else { break };
            if !self.is_same(index, state) {
                pass.missed += 1;
                continue;
            }
            for (direction, old) in [0u8, 1].into_iter().zip(flow.positions) {
                let hash = flow.key(direction).hash(self.seed);
                let [first, second] = buckets_of(hash, self.number);
                match old / BUCKET_WORDS {
                    _ if old == NO_POSITION => continue,
                    bucket if bucket == first => continue,
                    // By the old number, another bucket may have been the first, and has the mark for this one.
                    bucket if bucket == second => {
                        self.mark_overflow(first);
                        continue;
                    }
                    _ => {}
                }
                if self.move_key::<A>(index, state, direction, old, hash) {
                    pass.moved += 1;
                } else {
                    pass.missed += 1;
                }
            }
        }
        pass
    }

    /// Frees the slots of these buckets to which no flow refers: those that keys have left, and those that a flow which ended
    /// meanwhile could not free. A pending slot to which a flow refers becomes valid: an agent was killed before it did that.
    pub(super) fn settle<A: Address>(&self, buckets: u32) {
        for position in
            (0..buckets).flat_map(|bucket| (0..BUCKET_SLOTS).map(move |at| bucket * BUCKET_WORDS + at))
        {
            let Some(slot) = self.slot(position) else { return };
            let value = slot.load(Ordering::SeqCst);
            if value == 0 {
                continue;
            }
            let index = flow_of(value);
            // The owner of an entry frees its slots itself, or leaves them to the next flow that finds no free one.
            let Some(state) = self.state(index).filter(|state| bits_of(*state) & STATE_CLAIMED == 0) else {
                continue;
            };
            let refers = bits_of(state) & STATE_USED != 0
                && self
                    .flows
                    .read::<FlowEntry<A>>(index as usize)
                    .is_some_and(|flow| flow.positions.contains(&position));
            let settled = if refers { value & !SLOT_PENDING } else { 0 };
            if settled != value && self.state(index) == Some(state) {
                exchange(slot, value, settled);
            }
        }
    }

    fn state(&self, index: u32) -> Option<u64> {
        self.flows.word64(index as usize).map(|word| word.load(Ordering::SeqCst))
    }

    /// Whether the entry still holds the flow that it held with this state, and no program owns it.
    fn is_same(&self, index: u32, state: u64) -> bool {
        let now = self.state(index).unwrap_or_default();
        now >> 32 == state >> 32 && bits_of(now) & (STATE_USED | STATE_CLAIMED) == STATE_USED
    }

    fn slot(&self, position: u32) -> Option<&AtomicU32> {
        self.buckets.word32((position / BUCKET_WORDS) as usize, (position % BUCKET_WORDS) as usize)
    }

    /// Adds a second slot for a key, and makes the flow refer to it; returns whether it did.
    fn move_key<A: Address>(&self, index: u32, state: u64, direction: u8, old: u32, hash: u64) -> bool {
        let valid = slot_of(tag(hash), index);
        let Some(new) = self.take(hash, valid | SLOT_PENDING) else { return false };
        let word = offset_of!(FlowEntry<A>, positions) / size_of::<u32>() + usize::from(direction);
        let (Some(position), Some(slot)) = (self.flows.word32(index as usize, word), self.slot(new)) else {
            return false;
        };
        if !exchange(position, old, new) {
            exchange(slot, valid | SLOT_PENDING, 0);
            return false;
        }
        // Fails if a program with the same key has removed the pending slot.
        let is_valid = self.is_same(index, state) && exchange(slot, valid | SLOT_PENDING, valid);
        if is_valid && self.is_same(index, state) {
            return true;
        }
        exchange(position, new, old);
        exchange(slot, if is_valid { valid } else { valid | SLOT_PENDING }, 0);
        false
    }

    /// Writes a pending slot into a free one, and returns its position; `None` if both buckets are full.
    fn take(&self, hash: u64, pending: u32) -> Option<u32> {
        let [first, second] = buckets_of(hash, self.number);
        let free = |bucket: u32| {
            let mut positions = (0..BUCKET_SLOTS).map(|slot| bucket * BUCKET_WORDS + slot);
            positions.find(|at| self.slot(*at).is_some_and(|slot| exchange(slot, 0, pending)))
        };
        free(first).or_else(|| {
            self.mark_overflow(first);
            free(second)
        })
    }

    /// Notes that keys of this bucket may be in their second bucket.
    fn mark_overflow(&self, bucket: u32) {
        if let Some(word) = self.slot(bucket * BUCKET_WORDS + BUCKET_SLOTS) {
            exchange(word, 0, OVERFLOWS);
        }
    }
}

fn exchange(word: &AtomicU32, old: u32, new: u32) -> bool {
    word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
