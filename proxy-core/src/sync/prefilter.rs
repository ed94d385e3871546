//! The bits of the prefilter: which are set, how many entries need each, and when unused ones may be cleared.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proxy_common::prefilter::{PREFILTER_WORDS, Role, position};

use crate::store::{Backend, FrontendKey, Write};

/// A bit: (word, mask).
use crate::store::FilterBit as Bit;

/// By how much the quarantine of a bit is extended that a connection still needs.
const IN_USE: Duration = Duration::from_hours(1);

/// Returns the bit of a frontend.
pub fn frontend_bit(key: &FrontendKey) -> Bit {
    bit(Role::Frontend, key.addr, key.port, key.proto)
}

/// Returns the bit of an endpoint.
pub fn backend_bit(row: &Backend) -> Bit {
    bit(Role::Backend, row.addr, row.port, row.proto)
}

fn bit(role: Role, addr: IpAddr, port: u16, proto: u8) -> Bit {
    match addr {
        IpAddr::V4(addr) => position(role, &addr.octets(), port, proto),
        IpAddr::V6(addr) => position(role, &addr.octets(), port, proto),
    }
}

/// The mirror of the filter in the map, and how many entries need each bit.
#[derive(Clone, Debug)]
pub struct Prefilter {
    words: Vec<u64>,
    owners: Owners,
    idle: Idle,
    hold: Duration,
}

/// The number of entries that need each bit. Nearly all bits have one, so only further ones are counted.
#[derive(Clone, Debug)]
struct Owners {
    /// Bits that at least one entry needs.
    needed: Vec<u64>,
    /// The number of further entries that need a bit.
    more: BTreeMap<Bit, u32>,
}

impl Owners {
    fn new() -> Self {
        Self { needed: vec![0; PREFILTER_WORDS as usize], more: BTreeMap::new() }
    }

    fn has(&self, (word, mask): Bit) -> bool {
        self.needed.get(word as usize).is_some_and(|word| word & mask != 0)
    }

    fn add(&mut self, bit: Bit) {
        if self.has(bit) {
            *self.more.entry(bit).or_default() += 1;
        } else if let Some(word) = self.needed.get_mut(bit.0 as usize) {
            *word |= bit.1;
        }
    }

    /// Removes one entry of a bit; returns whether it was the last one.
    fn remove(&mut self, bit: Bit) -> bool {
        if let Entry::Occupied(mut more) = self.more.entry(bit) {
            *more.get_mut() -= 1;
            if *more.get() == 0 {
                more.remove();
            }
            return false;
        }
        let was_needed = self.has(bit);
        if let Some(word) = self.needed.get_mut(bit.0 as usize) {
            *word &= !bit.1;
        }
        was_needed
    }
}

/// Bits that are set and that no entry needs, with the end of the quarantine of each.
#[derive(Clone, Debug, Default)]
struct Idle {
    until: BTreeMap<Bit, Instant>,
    order: BTreeSet<(Instant, Bit)>,
}

impl Idle {
    fn insert(&mut self, bit: Bit, until: Instant) {
        if let Some(old) = self.until.insert(bit, until) {
            self.order.remove(&(old, bit));
        }
        self.order.insert((until, bit));
    }

    fn remove(&mut self, bit: Bit) {
        if let Some(old) = self.until.remove(&bit) {
            self.order.remove(&(old, bit));
        }
    }
}

impl Prefilter {
    /// Creates a prefilter without bits. A bit that no entry needs any more stays in quarantine for `hold`.
    pub fn new(hold: Duration) -> Self {
        Self { words: vec![0; PREFILTER_WORDS as usize], owners: Owners::new(), idle: Idle::default(), hold }
    }

    /// Takes over the bits found in the map. Call [`Prefilter::start_quarantines`] once the entries that need them are known.
    pub fn restore(&mut self, words: &[u64]) {
        for (known, found) in self.words.iter_mut().zip(words) {
            *known = *found;
        }
    }

    /// Starts the quarantine of the bits that no entry needs; for bits in `idle_before`, it ends at the time given there.
    pub fn start_quarantines(&mut self, now: Instant, idle_before: &BTreeMap<Bit, Instant>) {
        for (number, word) in self.words.iter().enumerate() {
            let mut rest = *word;
            while rest != 0 {
                let mask = rest & rest.wrapping_neg();
                rest &= !mask;
                let bit = (number as u32, mask);
                if !self.owners.has(bit) {
                    self.idle.insert(bit, idle_before.get(&bit).copied().unwrap_or(now + self.hold));
                }
            }
        }
    }

    /// Returns the bits in quarantine, each with its end.
    pub fn idle(&self) -> &BTreeMap<Bit, Instant> {
        &self.idle.until
    }

    /// Returns the words that the map should hold.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether the bit is set in the map.
    pub fn is_set(&self, (word, mask): Bit) -> bool {
        self.words.get(word as usize).is_some_and(|word| word & mask != 0)
    }

    /// Notes that a write to the map succeeded.
    pub fn written(&mut self, write: &Write) {
        match *write {
            Write::PrefilterSet(word, mask) => {
                if let Some(word) = self.words.get_mut(word as usize) {
                    *word |= mask;
                }
            }
            Write::PrefilterClear(word, mask) => {
                if let Some(word) = self.words.get_mut(word as usize) {
                    *word &= !mask;
                }
                self.idle.remove((word, mask));
            }
            _ => {}
        }
    }

    /// Adds an entry that needs the bit.
    pub fn add(&mut self, bit: Bit) {
        self.owners.add(bit);
        self.idle.remove(bit);
    }

    /// Removes an entry that needed the bit; the last one starts its quarantine.
    pub fn remove(&mut self, bit: Bit, now: Instant) {
        if self.owners.remove(bit) {
            self.idle.insert(bit, now + self.hold);
        }
    }

    /// Starts the quarantine of a bit that was set for an entry, if the entry was not written afterwards.
    pub fn unused(&mut self, bit: Bit, now: Instant) {
        if !self.owners.has(bit) && self.is_set(bit) && !self.idle.until.contains_key(&bit) {
            self.idle.insert(bit, now + self.hold);
        }
    }

    /// Returns the bits whose quarantine is over, in their order.
    pub fn quarantine_over(&self, now: Instant) -> BTreeSet<Bit> {
        self.idle.order.iter().take_while(|(until, _)| *until <= now).map(|(_, bit)| *bit).collect()
    }

    /// Extends the quarantine of a bit that a connection still needs.
    pub fn is_in_use(&mut self, bit: Bit, now: Instant) {
        if self.idle.until.contains_key(&bit) {
            self.idle.insert(bit, now + IN_USE);
        }
    }

    /// Returns the end of the quarantine that ends first.
    pub fn next_quarantine_end(&self) -> Option<Instant> {
        self.idle.order.first().map(|(until, _)| *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_hours(24);

    #[test]
    fn bit_is_quarantined_after_its_last_owner() {
        let now = Instant::now();
        let mut prefilter = Prefilter::new(HOLD);
        let bit = (3, 8);
        prefilter.written(&Write::PrefilterSet(3, 8));
        prefilter.add(bit);
        prefilter.add(bit);
        prefilter.remove(bit, now);
        assert_eq!(prefilter.next_quarantine_end(), None);
        prefilter.remove(bit, now);
        assert_eq!(prefilter.quarantine_over(now + HOLD / 2), BTreeSet::new());
        assert_eq!(prefilter.quarantine_over(now + HOLD), [bit].into());
        prefilter.add(bit);
        assert_eq!(prefilter.quarantine_over(now + HOLD), BTreeSet::new());
    }

    #[test]
    fn quarantine_of_a_bit_in_use_is_extended_by_an_hour() {
        let now = Instant::now();
        let mut prefilter = Prefilter::new(HOLD);
        for bit in [(3, 8), (3, 16)] {
            prefilter.written(&Write::PrefilterSet(bit.0, bit.1));
            prefilter.add(bit);
            prefilter.remove(bit, now);
        }
        prefilter.is_in_use((3, 8), now + HOLD);
        prefilter.is_in_use((9, 1), now + HOLD);
        assert_eq!(prefilter.quarantine_over(now + HOLD), [(3, 16)].into());
        assert_eq!(prefilter.quarantine_over(now + HOLD + IN_USE), [(3, 8), (3, 16)].into());
        prefilter.written(&Write::PrefilterClear(3, 16));
        assert_eq!(prefilter.next_quarantine_end(), Some(now + HOLD + IN_USE));
    }

    #[test]
    fn restored_bits_without_owner_start_in_quarantine() {
        let now = Instant::now();
        let mut prefilter = Prefilter::new(HOLD);
        let mut words = vec![0; PREFILTER_WORDS as usize];
        words[5] = 0b101;
        prefilter.restore(&words);
        prefilter.add((5, 1));
        prefilter.start_quarantines(now, &BTreeMap::new());
        assert_eq!(prefilter.quarantine_over(now + HOLD), [(5, 4)].into());
        prefilter.written(&Write::PrefilterClear(5, 4));
        assert!(prefilter.is_set((5, 1)) && !prefilter.is_set((5, 4)));
        assert_eq!(prefilter.next_quarantine_end(), None);
    }
}
