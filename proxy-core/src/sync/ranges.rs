//! The sets of source ranges in `src_ranges` and `src_ranges6`. A set is written before the first entry refers to it, and
//! is never changed: other ranges are another set. So frontends with the same ranges share a set, and a change of the
//! ranges takes effect with the commit of the entry.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::ids::{Exhausted, IdAllocator};
use crate::store::Table;

/// Source ranges of one family, sorted.
pub type RangeSet = Arc<[IpNet]>;

/// The mirror of the sets, and the allocator of their ids.
#[derive(Clone, Debug)]
pub struct RangeSets {
    ids: IdAllocator<RangeSet>,
    sets: BTreeMap<u32, RangeSet>,
    /// The ranges in the maps, by id. Only a set that is being written or removed differs from [`RangeSets::sets`].
    written: BTreeMap<u32, BTreeSet<IpNet>>,
    /// Number of entries of `services` that refer to each id.
    refs: BTreeMap<u32, u32>,
    /// The Service port that has asked for each set last, by its id.
    askers: BTreeMap<u32, u32>,
    /// Number of ranges in `src_ranges` and in `src_ranges6`.
    used: [usize; 2],
}

impl RangeSets {
    /// Creates an allocator for tables of `capacity` ranges. A released set stays in quarantine for `hold`, and at least
    /// until the next sync.
    pub(super) fn new(capacity: u32, hold: Duration) -> Self {
        // Each set has at least one range in one of the two tables; 0 is no id.
        let ids = IdAllocator::new(capacity.saturating_mul(2).saturating_add(1), hold);
        let (sets, written, refs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { ids, sets, written, refs, askers: BTreeMap::new(), used: [0, 0] }
    }

    /// Returns the id of a set for a Service port: its current id, or a new one.
    pub(super) fn acquire(&mut self, set: &RangeSet, port: u32) -> Result<u32, Exhausted> {
        let id = self.ids.acquire(set)?;
        self.askers.insert(id, port);
        self.sets.entry(id).or_insert_with(|| Arc::clone(set));
        Ok(id)
    }

    /// Frees the id of a set of which nothing was written.
    pub(super) fn undo(&mut self, id: u32) {
        let is_used = self.written.contains_key(&id) || self.refs.contains_key(&id);
        if !is_used && let Some(set) = self.sets.remove(&id) {
            self.ids.undo(&set);
            self.askers.remove(&id);
        }
    }

    /// Returns the ranges of a set that are not in the maps.
    pub(super) fn missing(&self, id: u32) -> impl Iterator<Item = IpNet> {
        let written = self.written.get(&id);
        let set = self.sets.get(&id).into_iter().flat_map(|set| set.iter().copied());
        set.filter(move |range| written.is_none_or(|written| !written.contains(range)))
    }

    /// Whether this range of a set is in the maps.
    pub(super) fn has(&self, id: u32, range: &IpNet) -> bool {
        self.written.get(&id).is_some_and(|ranges| ranges.contains(range))
    }

    /// Returns every range in the maps, with the id of its set.
    pub fn iter(&self) -> impl Iterator<Item = (u32, IpNet)> {
        self.written.iter().flat_map(|(id, ranges)| ranges.iter().map(|range| (*id, *range)))
    }

    /// Returns the number of ranges in a table of each set: (Service port, ranges). A set counts for the port that has asked
    /// for it last.
    pub(super) fn sizes(&self, table: Table) -> impl Iterator<Item = (u32, u32)> {
        let inside = move |ranges: &&BTreeSet<IpNet>| {
            ranges.first().is_some_and(|range| Table::source_ranges(*range) == table)
        };
        let sets = self.written.iter().filter(move |(_, ranges)| inside(ranges));
        sets.filter_map(|(id, ranges)| Some((*self.askers.get(id)?, ranges.len() as u32)))
    }

    /// Returns the number of ranges in a table.
    pub fn used(&self, table: Table) -> usize {
        self.used[usize::from(table == Table::SrcRanges6)]
    }

    /// Records a range that was written.
    pub(super) fn put(&mut self, id: u32, range: IpNet) {
        let is_new = self.written.entry(id).or_default().insert(range);
        self.used[usize::from(range.addr().is_ipv6())] += usize::from(is_new);
    }

    /// Records a range that was removed.
    pub(super) fn take(&mut self, id: u32, range: &IpNet) {
        let Some(ranges) = self.written.get_mut(&id) else { return };
        self.used[usize::from(range.addr().is_ipv6())] -= usize::from(ranges.remove(range));
        if ranges.is_empty() {
            self.written.remove(&id);
            self.unreserve(id);
        }
    }

    /// Records an entry of a Service port that refers to a set, which ends the quarantine of the set; 0 is the empty set,
    /// which has no rows.
    pub(super) fn reference(&mut self, id: u32, port: u32) {
        if id != 0 {
            self.askers.insert(id, port);
            *self.refs.entry(id).or_default() += 1;
            if let Some(set) = self.sets.get(&id) {
                self.ids.keep(set);
            }
        }
    }

    /// Records that an entry does not refer to a set any more. The quarantine of the set starts with the last reference.
    pub(super) fn release(&mut self, id: u32, now: Instant, sync: u64) {
        let Some(refs) = self.refs.get_mut(&id) else { return };
        *refs -= 1;
        if *refs == 0 {
            self.refs.remove(&id);
            self.retire(id, now, sync);
            self.unreserve(id);
        }
    }

    /// Starts the quarantine of a set to which no entry refers.
    pub(super) fn retire(&mut self, id: u32, now: Instant, sync: u64) {
        if let Some(set) = self.sets.get(&id).filter(|_| !self.refs.contains_key(&id)) {
            self.ids.retire(set, now, sync);
        }
    }

    /// Returns the ids whose quarantine is over, with the ranges that are left in the maps.
    pub(super) fn quarantine_over(&self, now: Instant, sync: u64) -> Vec<(u32, Vec<IpNet>)> {
        let left = |id| self.written.get(id).into_iter().flatten().copied().collect();
        self.ids.quarantine_over(now, sync).iter().map(|(_, id)| (*id, left(id))).collect()
    }

    /// Returns the end of the quarantine that ends first.
    pub(super) fn next_quarantine_end(&mut self) -> Option<Instant> {
        self.ids.next_quarantine_end()
    }

    /// Frees an id whose quarantine is over; returns `false` if one of its ranges is still in the maps.
    pub(super) fn forget(&mut self, id: u32) -> bool {
        let is_gone = !self.written.contains_key(&id);
        if is_gone && let Some(set) = self.sets.remove(&id) {
            self.ids.forget(&set);
            self.askers.remove(&id);
        }
        is_gone
    }

    /// Takes over the ranges found in the maps, after all entries of `services` are known; returns those of ids that no set
    /// can have. Of two ids with the same ranges, the one in use by entries wins: a set that was written in part can have
    /// the ranges of a complete one.
    pub(super) fn restore(&mut self, found: &BTreeSet<(u32, IpNet)>) -> Vec<(u32, IpNet)> {
        for (id, range) in found {
            self.put(*id, *range);
        }
        let mut invalid = Vec::new();
        let (first, then): (Vec<_>, Vec<_>) =
            self.written.iter().partition(|(id, _)| self.refs.contains_key(id));
        for (id, ranges) in first.into_iter().chain(then) {
            let set: RangeSet = ranges.iter().copied().collect();
            if self.ids.restore(Arc::clone(&set), *id) {
                self.sets.insert(*id, set);
            } else {
                self.ids.reserve(*id);
                invalid.extend(ranges.iter().map(|range| (*id, *range)));
            }
        }
        invalid
    }

    /// Ends a restore.
    pub(super) fn restored(&mut self, now: Instant, sync: u64) {
        for id in self.refs.keys().filter(|id| !self.sets.contains_key(*id)) {
            self.ids.reserve(*id);
        }
        self.ids.restored();
        for id in self.sets.keys().copied().collect::<Vec<_>>() {
            self.retire(id, now, sync);
        }
    }

    /// Frees an id that no set has, once neither a range nor an entry has it.
    fn unreserve(&mut self, id: u32) {
        let is_used = self.written.contains_key(&id) || self.refs.contains_key(&id);
        if !is_used && !self.sets.contains_key(&id) {
            self.askers.remove(&id);
            self.ids.unreserve(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_set_in_use_again_leaves_quarantine() {
        let (now, hold) = (Instant::now(), Duration::from_secs(1));
        let mut sets = RangeSets::new(8, hold);
        let set: RangeSet = ["10.0.0.0/8".parse().unwrap()].into();
        let id = sets.acquire(&set, 1).unwrap();
        sets.put(id, set[0]);
        sets.reference(id, 1);
        // In one sync, an entry with the set is removed before another entry with the set is written.
        sets.release(id, now, 1);
        sets.reference(id, 1);
        assert_eq!(sets.quarantine_over(now + 9 * hold, 9), []);
        sets.release(id, now, 9);
        assert_eq!(sets.quarantine_over(now + 9 * hold, 99), [(id, vec![set[0]])]);
    }

    #[test]
    fn restore_of_two_equal_sets_keeps_the_one_in_use() {
        let mut sets = RangeSets::new(8, Duration::from_secs(1));
        let range: IpNet = "10.0.0.0/8".parse().unwrap();
        sets.reference(2, 1);
        // The set 1 had another range, whose write failed.
        assert_eq!(sets.restore(&[(1, range), (2, range)].into()), [(1, range)]);
        sets.restored(Instant::now(), 1);
        assert_eq!(sets.acquire(&[range].into(), 1), Ok(2));
    }
}
