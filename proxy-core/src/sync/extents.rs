//! The allocator of the extents of `slots`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::ids::Quarantine;
use crate::model::pack;

/// The error if no free range of `slots` is long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Requested slots.
    pub wanted: u32,
    /// Slots in the longest free range.
    pub longest: u32,
    /// Free slots in total.
    pub free: u32,
}

/// An extent in use. It is written once, before any entry refers to it, and never changed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Extent {
    service: u32,
    /// Backend ids in the order of the slots; empty if writing them failed. For a Maglev table: the halves of its
    /// signature.
    ids: Box<[u32]>,
    len: u32,
    refs: u32,
    quarantine: Option<Quarantine>,
}

/// Allocates extents of `slots` by best fit, and frees them after their quarantine.
#[derive(Clone, Debug)]
pub struct ExtentAllocator {
    free: BTreeMap<u32, u32>,
    free_by_len: BTreeSet<(u32, u32)>,
    used: BTreeMap<u32, Extent>,
    /// Pairs of a Service port's id and the first slot of one of its extents.
    by_service: BTreeSet<(u32, u32)>,
    quarantined: BTreeSet<(Quarantine, u32)>,
    slots_used: u32,
    capacity: u32,
    hold: Duration,
}

impl ExtentAllocator {
    /// Creates an allocator of `capacity` free slots. A released extent stays in quarantine for `hold`, and at least until
    /// the next sync.
    pub fn new(capacity: u32, hold: Duration) -> Self {
        let mut extents = Self {
            free: BTreeMap::new(),
            free_by_len: BTreeSet::new(),
            used: BTreeMap::new(),
            by_service: BTreeSet::new(),
            quarantined: BTreeSet::new(),
            slots_used: 0,
            capacity,
            hold,
        };
        extents.add_free(0, capacity);
        extents
    }

    /// Rebuilds the trees compactly, after many allocations.
    pub fn pack(&mut self) {
        pack(&mut self.used);
        self.by_service = std::mem::take(&mut self.by_service).into_iter().collect();
    }

    /// Returns the number of slots in use, quarantined ones included.
    pub fn slots_used(&self) -> u32 {
        self.slots_used
    }

    /// Whether more than half of all slots are in use.
    pub const fn is_half_full(&self) -> bool {
        self.slots_used > self.capacity / 2
    }

    /// Returns the first slots of the extents of a Service port.
    fn of(&self, service: u32) -> impl Iterator<Item = u32> {
        self.by_service.range((service, 0)..=(service, u32::MAX)).map(|(_, base)| *base)
    }

    /// Returns an extent of this Service port that holds exactly these ids.
    pub fn find(&self, service: u32, ids: &[u32]) -> Option<u32> {
        let bases = || self.of(service);
        // Prefer a referenced extent, so that extents in quarantine can be freed.
        let holds = |base: &u32| self.used.get(base).is_some_and(|extent| *extent.ids == *ids);
        let lives = |base: &u32| self.used.get(base).is_some_and(|extent| extent.refs > 0);
        bases().filter(holds).find(lives).or_else(|| bases().find(holds))
    }

    /// Returns the ids in the extent at `base`; `None` if there is none of length `len`.
    pub fn ids(&self, base: u32, len: u32) -> Option<&[u32]> {
        self.used.get(&base).filter(|extent| extent.len == len).map(|extent| &*extent.ids)
    }

    /// Returns every extent: (first slot, Service port, length), those in quarantine included.
    pub fn sizes(&self) -> impl Iterator<Item = (u32, u32, u32)> {
        self.used.iter().map(|(base, extent)| (*base, extent.service, extent.len))
    }

    /// Returns every written extent: (first slot, ids).
    pub fn iter(&self) -> impl Iterator<Item = (u32, &[u32])> {
        self.from(0)
    }

    /// Returns the written extents that begin at slot `base` or later.
    pub fn from(&self, base: u32) -> impl Iterator<Item = (u32, &[u32])> {
        let written = self.used.range(base..).filter(|(_, extent)| !extent.ids.is_empty());
        written.map(|(base, extent)| (*base, &*extent.ids))
    }

    /// Returns the extents in quarantine: (Service port, first slot, ids).
    pub fn quarantined(&self) -> impl Iterator<Item = (u32, u32, &[u32])> {
        let extents = self.quarantined.iter().filter_map(|(_, base)| self.used.get_key_value(base));
        extents.map(|(base, extent)| (extent.service, *base, &*extent.ids))
    }

    /// Returns the backend ids in those extents of a Service port to which an entry refers.
    pub fn live_ids(&self, service: u32) -> BTreeSet<u32> {
        let extents = self.of(service).filter_map(|base| self.used.get(&base));
        let live = extents.filter(|extent| extent.refs > 0);
        live.flat_map(|extent| extent.ids.iter().copied()).collect()
    }

    /// Allocates an extent for these ids, at least one. No entry refers to it yet.
    pub fn allocate(&mut self, service: u32, ids: Vec<u32>) -> Result<u32, NoRoom> {
        let len = ids.len() as u32;
        self.allocate_for(service, ids, len)
    }

    /// Allocates an extent of `len` slots that is identified by `ids`: for a Maglev table, the halves of its signature.
    pub fn allocate_for(&mut self, service: u32, ids: Vec<u32>, len: u32) -> Result<u32, NoRoom> {
        let Some(&(free_len, base)) = self.free_by_len.range((len, 0)..).next() else {
            return Err(self.no_room(len));
        };
        self.take_free(base, free_len);
        self.add_free(base + len, free_len - len);
        self.insert(base, Extent { service, ids: ids.into(), len, refs: 0, quarantine: None });
        Ok(base)
    }

    /// Returns the error for an extent of `len` slots.
    pub fn no_room(&self, len: u32) -> NoRoom {
        let longest = self.free_by_len.last().map_or(0, |(len, _)| *len);
        NoRoom { wanted: len, longest, free: self.capacity - self.slots_used }
    }

    /// Takes over an extent found in the maps; `false` if it is outside of the table or overlaps another extent.
    pub fn restore(&mut self, service: u32, base: u32, ids: Vec<u32>) -> bool {
        let len = ids.len() as u32;
        self.restore_for(service, base, ids, len)
    }

    /// As [`ExtentAllocator::restore`], for an extent of `len` slots that is identified by `ids`.
    pub fn restore_for(&mut self, service: u32, base: u32, ids: Vec<u32>, len: u32) -> bool {
        if let Some(known) = self.used.get(&base) {
            return known.len == len && known.service == service;
        }
        let Some((&free_base, &free_len)) = self.free.range(..=base).next_back() else { return false };
        let (Some(end), free_end) = (base.checked_add(len), free_base + free_len) else { return false };
        if len == 0 || end > free_end {
            return false;
        }
        self.take_free(free_base, free_len);
        self.add_free(free_base, base - free_base);
        self.add_free(end, free_end - end);
        self.insert(base, Extent { service, ids: ids.into(), len, refs: 0, quarantine: None });
        true
    }

    /// Adds a reference from an entry of `services`; ends the quarantine of the extent.
    pub fn reference(&mut self, base: u32, len: u32) {
        if let Some(extent) = self.used.get_mut(&base).filter(|extent| extent.len == len) {
            extent.refs += 1;
            if let Some(quarantine) = extent.quarantine.take() {
                self.quarantined.remove(&(quarantine, base));
            }
        }
    }

    /// Removes a reference; the extent enters quarantine after the last one.
    pub fn release(&mut self, base: u32, len: u32, now: Instant, sync: u64) {
        if let Some(extent) = self.used.get_mut(&base).filter(|extent| extent.len == len) {
            extent.refs = extent.refs.saturating_sub(1);
            self.retire(base, now, sync);
        }
    }

    /// Starts the quarantine of the extent if no entry refers to it.
    pub fn retire(&mut self, base: u32, now: Instant, sync: u64) {
        if let Some(extent) =
            self.used.get_mut(&base).filter(|extent| extent.refs == 0 && extent.quarantine.is_none())
        {
            let quarantine = Quarantine { since: now, sync };
            extent.quarantine = Some(quarantine);
            self.quarantined.insert((quarantine, base));
        }
    }

    /// Starts the quarantine of all extents to which no entry refers.
    pub fn retire_unreferenced(&mut self, now: Instant, sync: u64) {
        let bases: Vec<u32> = self.used.keys().copied().collect();
        for base in bases {
            self.retire(base, now, sync);
        }
    }

    /// Marks an extent whose slots were not all written, so that no entry ever refers to it.
    pub fn spoil(&mut self, base: u32) {
        if let Some(extent) = self.used.get_mut(&base) {
            extent.ids = Box::default();
        }
    }

    /// Frees the extents whose quarantine is over; returns their number.
    pub fn free_after_quarantine(&mut self, now: Instant, sync: u64) -> usize {
        let mut freed = 0;
        while let Some((quarantine, base)) = self.quarantined.first().copied() {
            // The set is sorted by time, and of two syncs the one with the higher number is never earlier.
            if !quarantine.is_over(now, sync, self.hold) {
                break;
            }
            self.quarantined.pop_first();
            if let Some(extent) = self.used.remove(&base) {
                self.slots_used -= extent.len;
                self.by_service.remove(&(extent.service, base));
                self.merge_free(base, extent.len);
                freed += 1;
            }
        }
        freed
    }

    /// Returns the end of the quarantine that ends first.
    pub fn next_quarantine_end(&self) -> Option<Instant> {
        self.quarantined.first().map(|(quarantine, _)| quarantine.since + self.hold)
    }

    fn insert(&mut self, base: u32, extent: Extent) {
        self.slots_used += extent.len;
        self.by_service.insert((extent.service, base));
        self.used.insert(base, extent);
    }

    fn add_free(&mut self, base: u32, len: u32) {
        if len > 0 {
            self.free.insert(base, len);
            self.free_by_len.insert((len, base));
        }
    }

    fn take_free(&mut self, base: u32, len: u32) {
        self.free.remove(&base);
        self.free_by_len.remove(&(len, base));
    }

    fn merge_free(&mut self, mut base: u32, mut len: u32) {
        if let Some((&before, &before_len)) = self.free.range(..base).next_back()
            && before + before_len == base
        {
            self.take_free(before, before_len);
            (base, len) = (before, before_len + len);
        }
        if let Some((&after, &after_len)) = self.free.range(base + len..).next()
            && base + len == after
        {
            self.take_free(after, after_len);
            len += after_len;
        }
        self.add_free(base, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOLD: Duration = Duration::from_secs(1);

    fn whole(extents: &ExtentAllocator) -> Result<(), TestCaseError> {
        let mut parts: Vec<(u32, u32, bool)> =
            extents.used.iter().map(|(base, e)| (*base, e.len, true)).collect();
        parts.extend(extents.free.iter().map(|(base, len)| (*base, *len, false)));
        parts.sort_unstable();
        let mut end = 0;
        let mut free_before = false;
        for (base, len, used) in parts {
            prop_assert_eq!(base, end, "a hole or an overlap at {}", base);
            prop_assert!(used || !free_before, "two free neighbours at {}", base);
            (end, free_before) = (base + len, !used);
        }
        prop_assert_eq!(end, extents.capacity);
        prop_assert_eq!(extents.slots_used, extents.used.values().map(|e| e.len).sum::<u32>());
        prop_assert_eq!(extents.free.len(), extents.free_by_len.len());
        Ok(())
    }

    #[test]
    fn released_extent_is_quarantined_for_one_sync_and_the_period() {
        let now = Instant::now();
        let mut extents = ExtentAllocator::new(4, HOLD);
        let base = extents.allocate(1, vec![1, 2, 3]).unwrap();
        extents.reference(base, 3);
        extents.release(base, 3, now, 1);
        assert_eq!(extents.free_after_quarantine(now + HOLD, 1), 0);
        assert_eq!(extents.free_after_quarantine(now, 2), 0);
        assert_eq!(extents.allocate(1, vec![1, 2]), Err(NoRoom { wanted: 2, longest: 1, free: 1 }));
        assert_eq!(extents.next_quarantine_end(), Some(now + HOLD));
        assert_eq!(extents.free_after_quarantine(now + HOLD, 2), 1);
        assert_eq!(extents.allocate(1, vec![1, 2, 3, 4]), Ok(0));
    }

    #[test]
    fn quarantined_extent_is_found_again_unless_its_slots_differ() {
        let now = Instant::now();
        let mut extents = ExtentAllocator::new(9, HOLD);
        let base = extents.allocate(1, vec![1, 2, 3]).unwrap();
        extents.retire(base, now, 1);
        assert_eq!(extents.find(1, &[1, 2, 3]), Some(base));
        assert_eq!(extents.find(2, &[1, 2, 3]), None);
        extents.reference(base, 3);
        assert_eq!(extents.next_quarantine_end(), None);
        extents.spoil(base);
        assert_eq!(extents.find(1, &[1, 2, 3]), None);
    }

    #[test]
    fn overlapping_and_invalid_extents_are_not_restored() {
        let mut extents = ExtentAllocator::new(10, HOLD);
        assert!(extents.restore(1, 4, vec![1, 2, 3]));
        assert!(extents.restore(1, 4, vec![1, 2, 3]), "shared by two frontends of one port");
        for (service, base, len) in
            [(2, 4, 3), (1, 4, 2), (1, 6, 1), (1, 3, 2), (1, 9, 2), (1, u32::MAX, 2), (1, 0, 0)]
        {
            assert!(!extents.restore(service, base, vec![9; len]), "{service} {base} {len}");
        }
        assert!(extents.restore(2, 7, vec![9; 3]) && extents.restore(3, 0, vec![9; 4]));
    }

    proptest! {
        #[test]
        fn extents_never_overlap(steps in prop::collection::vec((0u8..4, 1usize..9, any::<prop::sample::Index>()), 1..120)) {
            let (mut now, mut sync) = (Instant::now(), 0);
            let mut extents = ExtentAllocator::new(40, HOLD);
            let mut live: Vec<(u32, u32)> = Vec::new();
            for (action, len, which) in steps {
                sync += 1;
                now += Duration::from_millis(400);
                match action {
                    0 | 1 => if let Ok(base) = extents.allocate(len as u32, vec![7; len]) {
                        extents.reference(base, len as u32);
                        live.push((base, len as u32));
                    },
                    2 if !live.is_empty() => {
                        let (base, len) = live.swap_remove(which.index(live.len()));
                        extents.release(base, len, now, sync);
                    },
                    _ => { extents.free_after_quarantine(now, sync); },
                }
                whole(&extents)?;
            }
        }
    }
}
