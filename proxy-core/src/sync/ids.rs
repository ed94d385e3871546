//! The allocator of ids. An id stays with its key, and is in quarantine before another key gets it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::index::Index;

/// The start of a quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quarantine {
    /// Time of the start.
    pub since: Instant,
    /// Number of the sync that started it.
    pub sync: u64,
}

impl Quarantine {
    /// Whether the quarantine is over: never in the sync that started it, so that no earlier reader is left.
    pub fn is_over(self, now: Instant, sync: u64, hold: Duration) -> bool {
        sync > self.sync && now >= self.since + hold
    }
}

/// The error if every id is in use or in quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    /// The number of ids.
    pub limit: u32,
}

/// Up to this number of forgotten ids, none is reused while ids that were never used are left.
const FEW_FREE: usize = 1024;
/// The queue may have this many places of ids that are no longer in quarantine, and as many as ids that are.
const STALE: usize = 1024;

/// Ids from 1 to one less than the capacity of their table; 0 is "none".
///
/// A retired key keeps its id until it is forgotten, and has the same id again if it returns in time. A new key gets the id
/// that was forgotten longest ago if many are forgotten ([`IdAllocator::reuses`]) or no other id is left, else an id that
/// was never used.
#[derive(Clone, Debug)]
pub struct IdAllocator<K, I = BTreeMap<K, u32>> {
    capacity: u32,
    by_key: I,
    quarantined: BTreeMap<K, Quarantine>,
    queue: VecDeque<(K, Quarantine)>,
    /// Ids without a key that an entry of a map uses.
    reserved: BTreeSet<u32>,
    /// Ids taken over so far during a restore.
    found: BTreeSet<u32>,
    /// The lowest id above all ids that were ever used.
    fresh: u32,
    free: VecDeque<u32>,
    hold: Duration,
}

impl<K: Ord + Clone, I: Index<K>> IdAllocator<K, I> {
    /// Creates an allocator of ids below `capacity`. A retired id stays in quarantine for `hold`, and at least until the
    /// next sync.
    pub fn new(capacity: u32, hold: Duration) -> Self {
        Self {
            capacity,
            by_key: I::default(),
            quarantined: BTreeMap::new(),
            queue: VecDeque::new(),
            reserved: BTreeSet::new(),
            found: BTreeSet::new(),
            fresh: 1,
            free: VecDeque::new(),
            hold,
        }
    }

    /// Rebuilds the index compactly, after many keys were added.
    pub fn pack(&mut self) {
        self.by_key.pack();
    }

    /// Returns the id of `key`, quarantined or not.
    pub fn get(&self, key: &K) -> Option<u32> {
        self.by_key.find(key)
    }

    /// Returns every key with its id, quarantined or not.
    pub fn iter(&self) -> impl Iterator<Item = (K, u32)> {
        self.by_key.all()
    }

    /// Returns the index of ids by key, quarantined ones included.
    pub fn index(&self) -> &I {
        &self.by_key
    }

    /// Whether the key is retired, so its id is in quarantine.
    pub fn is_quarantined(&self, key: &K) -> bool {
        self.quarantined.contains_key(key)
    }

    /// Returns the highest id ever used plus one.
    pub fn high_water(&self) -> u32 {
        self.fresh
    }

    /// Returns the number of ids in use or in quarantine.
    pub fn used(&self) -> usize {
        self.by_key.count() + self.reserved.len()
    }

    /// Ends the quarantine of `key`.
    pub fn keep(&mut self, key: &K) {
        self.quarantined.remove(key);
    }

    /// Returns the id of `key`: its current id, or a new one.
    pub fn acquire(&mut self, key: &K) -> Result<u32, Exhausted> {
        if let Some(id) = self.get(key) {
            self.quarantined.remove(key);
            return Ok(id);
        }
        let is_fresh = self.fresh < self.capacity && !self.reuses();
        let id = if is_fresh { None } else { self.free.pop_front() };
        let id = match id {
            Some(id) => id,
            None if self.fresh < self.capacity => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return Err(self.exhausted()),
        };
        self.by_key.put(key.clone(), id);
        Ok(id)
    }

    /// Gives the id of a key to another key, which has none.
    pub fn rename(&mut self, from: &K, to: &K) {
        if self.get(to).is_none()
            && let Some(id) = self.by_key.take(from)
        {
            self.quarantined.remove(from);
            self.by_key.put(to.clone(), id);
        }
    }

    /// Returns the error for a key without an id.
    pub fn exhausted(&self) -> Exhausted {
        Exhausted { limit: self.capacity.saturating_sub(1) }
    }

    /// Whether a forgotten id is reused though never used ids are left. So tables indexed by id grow with the number of
    /// keys, not with the number of all keys so far, and an id is still reused as late as possible.
    fn reuses(&self) -> bool {
        self.free.len() > FEW_FREE.max(self.by_key.count() / 4)
    }

    /// Frees an id that was never written to a map.
    pub fn undo(&mut self, key: &K) {
        if let Some(id) = self.by_key.take(key) {
            self.quarantined.remove(key);
            self.free.push_front(id);
        }
    }

    /// Starts the quarantine of the id of `key`, which was removed for now.
    pub fn retire(&mut self, key: &K, now: Instant, sync: u64) {
        if self.get(key).is_some() && !self.quarantined.contains_key(key) {
            let quarantine = Quarantine { since: now, sync };
            self.quarantined.insert(key.clone(), quarantine);
            self.enqueue(key, quarantine);
        }
    }

    /// Adds a quarantine to the queue. Endpoints that come back leave their old places behind, which are removed here: a row
    /// that stays at the front for long must not keep them all.
    fn enqueue(&mut self, key: &K, quarantine: Quarantine) {
        if self.queue.len() > STALE + 2 * self.quarantined.len() {
            let Self { queue, quarantined, .. } = self;
            queue.retain(|(key, quarantine)| quarantined.get(key) == Some(quarantine));
        }
        self.queue.push_back((key.clone(), quarantine));
    }

    /// Returns the keys that are out of quarantine, with their ids, in the order of their quarantine.
    pub fn quarantine_over(&self, now: Instant, sync: u64) -> Vec<(K, u32)> {
        let still = |(key, quarantine): &&(K, Quarantine)| self.quarantined.get(key) == Some(quarantine);
        let over = |(_, quarantine): &&(K, Quarantine)| quarantine.is_over(now, sync, self.hold);
        let with_id = |(key, _): &(K, Quarantine)| self.get(key).map(|id| (key.clone(), id));
        self.queue.iter().take_while(over).filter(still).filter_map(with_id).collect()
    }

    /// Restarts the quarantine of a retired `key` that is still in use.
    pub fn restart_quarantine(&mut self, key: &K, now: Instant, sync: u64) {
        if let Some(quarantine) = self.quarantined.get_mut(key) {
            *quarantine = Quarantine { since: now, sync };
            let quarantine = *quarantine;
            self.enqueue(key, quarantine);
        }
    }

    /// Returns the end of the quarantine that ends first.
    pub fn next_quarantine_end(&mut self) -> Option<Instant> {
        while let Some((key, quarantine)) = self.queue.front() {
            if self.quarantined.get(key) == Some(quarantine) {
                return Some(quarantine.since + self.hold);
            }
            self.queue.pop_front();
        }
        None
    }

    /// Frees the id of a retired `key`, to which no entry refers any more.
    pub fn forget(&mut self, key: &K) {
        if self.quarantined.remove(key).is_some()
            && let Some(id) = self.by_key.take(key)
        {
            self.free.push_back(id);
        }
    }

    /// Takes over an id found in the maps; `false` if the key or the id is known already, or the id is out of range.
    pub fn restore(&mut self, key: K, id: u32) -> bool {
        let takes = self.is_legal(id) && self.get(&key).is_none() && self.found.insert(id);
        if takes {
            self.reserved.remove(&id);
            self.by_key.put(key, id);
        }
        takes
    }

    /// Reserves an id that an unknown entry of the maps uses, unless a key has it. Call it only before the restore ends.
    pub fn reserve(&mut self, id: u32) {
        if self.is_legal(id) && !self.found.contains(&id) {
            self.reserved.insert(id);
        }
    }

    /// Frees a reserved id, after the unknown entry was removed.
    pub fn unreserve(&mut self, id: u32) {
        if self.reserved.remove(&id) {
            self.free.push_back(id);
        }
    }

    /// Ends a restore: frees the ids that were not found.
    pub fn restored(&mut self) {
        let mut used = std::mem::take(&mut self.found);
        used.extend(&self.reserved);
        self.fresh = used.last().map_or(1, |last| last + 1);
        self.free = (1..self.fresh).filter(|id| !used.contains(id)).collect();
    }

    fn is_legal(&self, id: u32) -> bool {
        id != 0 && id < self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOLD: Duration = Duration::from_mins(1);

    fn ids(capacity: u32) -> IdAllocator<u8> {
        IdAllocator::new(capacity, HOLD)
    }

    #[test]
    fn zero_is_never_an_id_and_the_end_is_an_error() {
        let mut ids = ids(3);
        assert_eq!([ids.acquire(&1), ids.acquire(&2)], [Ok(1), Ok(2)]);
        assert_eq!(ids.acquire(&3), Err(Exhausted { limit: 2 }));
    }

    #[test]
    fn a_key_that_returns_in_time_has_its_id_again() {
        let now = Instant::now();
        let mut ids = ids(10);
        let id = ids.acquire(&1).unwrap();
        ids.retire(&1, now, 1);
        assert_eq!(ids.acquire(&1), Ok(id));
        assert_eq!(ids.quarantine_over(now + HOLD * 2, 9), []);
        assert_eq!(ids.next_quarantine_end(), None);
    }

    #[test]
    fn the_queue_stays_short_while_endpoints_flap_behind_one_that_left() {
        let now = Instant::now();
        let mut ids = ids(10);
        assert!((1..=3).all(|key| ids.acquire(&key).is_ok()));
        ids.retire(&1, now, 1);
        for sync in 2..20_000 {
            for key in [2, 3] {
                ids.retire(&key, now, sync);
                assert!(ids.acquire(&key).is_ok());
            }
        }
        assert!(ids.queue.len() < 2 * STALE, "{}", ids.queue.len());
        assert_eq!(ids.next_quarantine_end(), Some(now + HOLD));
    }

    #[test]
    fn released_id_is_quarantined_for_one_sync_and_the_period() {
        let now = Instant::now();
        let mut ids = ids(10);
        let id = ids.acquire(&1).unwrap();
        ids.retire(&1, now, 1);
        assert_eq!(ids.quarantine_over(now + HOLD, 1), []);
        assert_eq!(ids.quarantine_over(now + HOLD / 2, 2), []);
        assert_eq!(ids.quarantine_over(now + HOLD, 2), [(1, id)]);
        assert_eq!(ids.next_quarantine_end(), Some(now + HOLD));
    }

    #[test]
    fn id_with_the_longest_quarantine_is_reused_first() {
        let now = Instant::now();
        let mut ids = ids(4);
        for key in [1, 2, 3] {
            ids.acquire(&key).unwrap();
        }
        for key in [2, 1, 3] {
            ids.retire(&key, now, 1);
        }
        for (key, _) in ids.quarantine_over(now + HOLD, 2) {
            ids.forget(&key);
        }
        assert_eq!([ids.acquire(&7), ids.acquire(&8), ids.acquire(&9)], [Ok(2), Ok(1), Ok(3)]);
    }

    #[test]
    fn gaps_are_free_after_a_restore_and_reserved_ids_are_not() {
        let mut ids = ids(6);
        assert!(ids.restore(1, 3));
        assert!(!ids.restore(2, 3) && !ids.restore(1, 2) && !ids.restore(9, 0) && !ids.restore(9, 6));
        ids.reserve(5);
        ids.restored();
        assert_eq!([ids.acquire(&4), ids.acquire(&5), ids.acquire(&6)], [Ok(1), Ok(2), Ok(4)]);
        assert!(ids.acquire(&7).is_err());
        ids.unreserve(5);
        assert_eq!(ids.acquire(&7), Ok(5));
    }

    #[test]
    fn id_of_a_key_is_not_freed_with_an_unknown_entry() {
        let mut ids = ids(4);
        assert!(ids.restore(1, 1));
        ids.reserve(1);
        ids.reserve(2);
        assert!(ids.restore(2, 2));
        ids.restored();
        assert_eq!(ids.used(), 2);
        ids.unreserve(1);
        ids.unreserve(2);
        assert_eq!([ids.acquire(&3), ids.acquire(&4)], [Ok(3), Err(Exhausted { limit: 3 })]);
    }

    #[test]
    fn ids_grow_with_what_there_is() {
        let (mut now, mut ids) = (Instant::now(), IdAllocator::<u32>::new(1 << 20, HOLD));
        for key in 0..5000 {
            ids.acquire(&key).unwrap();
            if let Some(gone) = key.checked_sub(100) {
                ids.retire(&gone, now, u64::from(key));
            }
            now += Duration::from_secs(1);
            for (key, _) in ids.quarantine_over(now, u64::from(key) + 1) {
                ids.forget(&key);
            }
            ids.next_quarantine_end();
        }
        assert!(ids.high_water() < 1500, "{}", ids.high_water());
    }

    proptest! {
        #[test]
        fn no_id_has_two_owners_and_none_is_reused_too_soon(
            steps in prop::collection::vec((0u8..12, 0u8..3, 0u64..40), 1..200),
        ) {
            let start = Instant::now();
            let (mut now, mut sync) = (start, 1);
            let mut ids = ids(8);
            let mut left: BTreeMap<u32, (u8, Instant, u64)> = BTreeMap::new();
            for (key, action, seconds) in steps {
                now += Duration::from_secs(seconds);
                sync += u64::from(seconds > 20);
                match action {
                    0 => if let Ok(id) = ids.acquire(&key) {
                        prop_assert!((1..8).contains(&id));
                        if let Some((owner, since, at)) = left.remove(&id) {
                            prop_assert!(owner == key || (now >= since + HOLD && sync > at));
                        }
                    },
                    1 => if let Some(id) = ids.get(&key).filter(|_| !ids.is_quarantined(&key)) {
                        ids.retire(&key, now, sync);
                        left.insert(id, (key, now, sync));
                    },
                    _ => for (key, _) in ids.quarantine_over(now, sync) { ids.forget(&key); },
                }
                let mut all: Vec<u32> = ids.iter().map(|(_, id)| id).collect();
                all.sort_unstable();
                prop_assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
            }
        }
    }
}
