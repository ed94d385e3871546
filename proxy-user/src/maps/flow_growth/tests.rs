use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

use proxy_common::flow::{
    BUCKET_SLOTS, BUCKET_WORDS, Bucket, FlowEntry, MAX_FLOWS, NO_POSITION, SLOT_PENDING, STATE_CLAIMED,
    STATE_USED, TAG_SHIFT, bits_of, buckets_of, claimed, flow_of, slot_of, tag, with_bits,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::keys::Keys;
use super::{Mapping, larger};

type Flow = FlowEntry<[u8; 4]>;

/// Half as many keys as the old buckets have slots: this test moves no key to make room.
const ENTRIES: u32 = 1_900;
const OLD: u32 = 512;
const NEW: u32 = 2_048;
const SEED: u32 = 0x5eed;

/// Returns an array in a file in memory.
fn array(value_size: usize, len: u32) -> Mapping {
    let file = memfd_create("flow-growth", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, (value_size * len as usize) as u64).unwrap();
    Mapping::new(file.as_fd(), value_size, len as usize).unwrap()
}

/// A flow table, which this test changes by the rules of the programs.
struct Table {
    flows: Mapping,
    buckets: Mapping,
    /// The number of buckets by which keys are added.
    adds_by: AtomicU32,
}

impl Table {
    fn new() -> Self {
        Self {
            flows: array(size_of::<Flow>(), ENTRIES),
            buckets: array(size_of::<Bucket>(), NEW),
            adds_by: AtomicU32::new(OLD),
        }
    }

    fn keys(&self) -> Keys<'_> {
        Keys { flows: &self.flows, buckets: &self.buckets, number: NEW, seed: SEED }
    }

    fn state(&self, index: u32) -> &AtomicU64 {
        self.flows.word64(index as usize).unwrap()
    }

    fn slot(&self, position: u32) -> &AtomicU32 {
        self.buckets.word32((position / BUCKET_WORDS) as usize, (position % BUCKET_WORDS) as usize).unwrap()
    }

    fn flow(&self, index: u32) -> Flow {
        self.flows.read(index as usize).unwrap()
    }

    /// Adds a key to a bucket with room, and returns its position.
    fn add(&self, hash: u64, index: u32) -> u32 {
        let [first, second] = buckets_of(hash, self.adds_by.load(Ordering::SeqCst));
        let slot = slot_of(tag(hash), index);
        for bucket in [first, second] {
            for position in (0..BUCKET_SLOTS).map(|slot| bucket * BUCKET_WORDS + slot) {
                if self.slot(position).compare_exchange(0, slot, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    return position;
                }
            }
        }
        NO_POSITION
    }

    /// Ends the flow of an entry if there is one, and begins the flow with this number there.
    fn begin(&self, index: u32, number: u32) {
        let state = self.state(index);
        let before = state.load(Ordering::SeqCst);
        let owned = claimed(before);
        state.compare_exchange(before, owned, Ordering::SeqCst, Ordering::SeqCst).unwrap();
        let old = self.flow(index);
        if bits_of(before) != 0 {
            for (position, tag) in old.positions.into_iter().zip(old.tags) {
                if position != NO_POSITION {
                    let slot = slot_of(u32::from(tag) << TAG_SHIFT, index);
                    let _ = self.slot(position).compare_exchange(slot, 0, Ordering::SeqCst, Ordering::SeqCst);
                }
            }
        }
        let flow = Flow { state: owned, ..flow(number) };
        let hashes = [0, 1].map(|direction| flow.key(direction).hash(SEED));
        let flow = Flow {
            positions: hashes.map(|hash| self.add(hash, index)),
            tags: hashes.map(|hash| (tag(hash) >> TAG_SHIFT) as u8),
            ..flow
        };
        // SAFETY: an entry consists of words without padding.
        let words: [u32; size_of::<Flow>() / 4] = unsafe { std::mem::transmute(flow) };
        for (word, value) in words.into_iter().enumerate().skip(2) {
            self.flows.word32(index as usize, word).unwrap().store(value, Ordering::SeqCst);
        }
        state.store(with_bits(owned, STATE_USED), Ordering::SeqCst);
    }

    /// Returns the entry to which the key of a flow leads by this number of buckets.
    fn find(&self, hash: u64, number: u32, index: u32) -> bool {
        buckets_of(hash, number).into_iter().any(|bucket| {
            let mut slots = (0..BUCKET_SLOTS).map(|slot| self.slot(bucket * BUCKET_WORDS + slot));
            slots.any(|slot| slot.load(Ordering::SeqCst) == slot_of(tag(hash), index))
        })
    }

    /// Checks that every flow is found by this number of buckets.
    fn all_are_found(&self, number: u32) {
        for index in 0..ENTRIES {
            let flow = self.flow(index);
            for direction in [0, 1] {
                let hash = flow.key(direction).hash(SEED);
                assert!(self.find(hash, number, index), "flow {index}, direction {direction}, {flow:?}");
            }
        }
    }

    fn used_slots(&self) -> usize {
        let all = (0..NEW).flat_map(|bucket| (0..BUCKET_SLOTS).map(move |slot| bucket * BUCKET_WORDS + slot));
        all.filter(|position| flow_of(self.slot(*position).load(Ordering::SeqCst)) != u32::MAX).count()
    }
}

fn flow(number: u32) -> Flow {
    let [a, b, c, d] = number.to_be_bytes();
    Flow {
        client: [10, b, c, d],
        frontend: [10, 96, 0, 1],
        backend: [10, 244, a, 7],
        source: [10, b, c, d],
        client_port: 40_000,
        frontend_port: 80,
        backend_port: 8080,
        source_port: 40_000,
        proto: 6,
        ..Flow::default()
    }
}

#[test]
fn keys_are_found_by_both_numbers_until_they_are_cleared() {
    let table = Table::new();
    (0..ENTRIES).for_each(|index| table.begin(index, index));
    table.all_are_found(OLD);
    let keys = table.keys();
    let pass = keys.pass::<[u8; 4]>(ENTRIES, true);
    assert!(pass.moved > ENTRIES as usize && pass.missed == 0, "{pass:?}");
    table.all_are_found(OLD);
    table.all_are_found(NEW);
    assert!(keys.pass::<[u8; 4]>(ENTRIES, true).is_done());
    keys.settle::<[u8; 4]>(NEW);
    table.all_are_found(NEW);
    assert_eq!(table.used_slots(), 2 * ENTRIES as usize);
    // Positions lead to the slots: a flow that ends leaves nothing behind.
    (0..ENTRIES).for_each(|index| table.begin(index, ENTRIES + index));
    assert_eq!(table.used_slots(), 2 * ENTRIES as usize);
}

#[test]
fn slots_without_a_flow_are_freed_and_a_pending_slot_of_a_flow_becomes_valid() {
    let table = Table::new();
    (0..ENTRIES).for_each(|index| table.begin(index, index));
    let pending = table.slot(table.flow(3).positions[1]);
    let valid = pending.fetch_or(SLOT_PENDING, Ordering::SeqCst);
    let free = (0..NEW * BUCKET_WORDS)
        .find(|at| *at % BUCKET_WORDS < BUCKET_SLOTS && table.slot(*at).load(Ordering::SeqCst) == 0);
    table.slot(free.unwrap()).store(valid, Ordering::SeqCst);
    table.keys().settle::<[u8; 4]>(NEW);
    assert_eq!(table.used_slots(), 2 * ENTRIES as usize);
    table.all_are_found(OLD);
}

#[test]
fn a_key_that_stays_in_its_second_bucket_is_found_by_the_mark_of_the_first() {
    let table = Table::new();
    let hash = |number| flow(number).key(0).hash(SEED);
    let stays = |number: &u32| {
        let [old, new] = [OLD, NEW].map(|buckets| buckets_of(hash(*number), buckets));
        old[1] == new[1] && old[0] != new[0] && old[1] != old[0]
    };
    let number = (0..1_000_000).find(stays).unwrap();
    table.begin(0, number);
    let [first, second] = buckets_of(hash(number), NEW);
    let (slot, position) = (table.flow(0).positions[0], second * BUCKET_WORDS);
    table.slot(position).store(table.slot(slot).swap(0, Ordering::SeqCst), Ordering::SeqCst);
    let word = std::mem::offset_of!(Flow, positions) / size_of::<u32>();
    table.flows.word32(0, word).unwrap().store(position, Ordering::SeqCst);
    table.keys().pass::<[u8; 4]>(1, true);
    assert_eq!(table.flow(0).positions[0], position);
    assert_ne!(table.slot(first * BUCKET_WORDS + BUCKET_SLOTS).load(Ordering::SeqCst), 0);
}

#[test]
fn a_claimed_entry_is_left_to_its_owner() {
    let table = Table::new();
    (0..ENTRIES).for_each(|index| table.begin(index, index));
    let state = table.state(7).load(Ordering::SeqCst);
    table.state(7).store(with_bits(state, STATE_USED | STATE_CLAIMED), Ordering::SeqCst);
    let before = table.flow(7);
    let pass = table.keys().pass::<[u8; 4]>(ENTRIES, true);
    assert_eq!((pass.missed, table.flow(7)), (1, before));
    table.state(7).store(state, Ordering::SeqCst);
    assert!(table.keys().pass::<[u8; 4]>(ENTRIES, true).missed == 0);
    table.all_are_found(NEW);
}

#[test]
fn flows_that_begin_meanwhile_are_found_too() {
    let (table, ends) = (Table::new(), AtomicBool::new(false));
    (0..ENTRIES).for_each(|index| table.begin(index, index));
    table.adds_by.store(NEW, Ordering::SeqCst);
    let keys = table.keys();
    thread::scope(|scope| {
        let (table, ends) = (&table, &ends);
        let begun = scope.spawn(move || {
            let mut number = ENTRIES;
            while !ends.load(Ordering::SeqCst) {
                table.begin(number.wrapping_mul(0x9e37_79b1) % ENTRIES, number);
                number += 1;
            }
            number - ENTRIES
        });
        for _ in 0..200 {
            keys.pass::<[u8; 4]>(ENTRIES, true);
        }
        ends.store(true, Ordering::SeqCst);
        assert!(begun.join().unwrap() > 1_000);
    });
    assert!(keys.pass::<[u8; 4]>(ENTRIES, true).missed == 0);
    keys.settle::<[u8; 4]>(NEW);
    table.all_are_found(NEW);
    assert_eq!(table.used_slots(), 2 * ENTRIES as usize);
}

#[test]
fn a_limit_that_is_no_power_of_two_is_reached() {
    assert_eq!(larger(131_072, 65_537, 196_608), 196_608, "32,768 for each of six cores");
    assert_eq!(larger(16_384, 4_097, 20_000), 20_000);
    assert_eq!(larger(16_384, 4_097, 1 << 20), 65_536);
    assert_eq!(larger(65_536, 30_000, 1 << 20), 131_072);
    assert_eq!(larger(8_388_608, 5_000_000, MAX_FLOWS), MAX_FLOWS.min(16_777_216));
    assert_eq!(larger(1 << 30, u32::MAX, u32::MAX), u32::MAX);
}
