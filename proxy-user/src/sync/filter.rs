//! Which bits of the filter are set, who needs them, and when those that nobody needs may go.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proxy_common::filter::{FILTER_WORDS, Role, position};

use crate::maps::{Backend, FrontendKey, Write};

/// A bit: (word, mask).
pub type Bit = (u32, u64);

/// The bit of a frontend.
pub fn frontend_bit(key: &FrontendKey) -> Bit {
    bit(Role::Frontend, key.addr, key.port, key.proto)
}

/// The bit of an endpoint.
pub fn backend_bit(row: &Backend) -> Bit {
    bit(Role::Backend, row.addr, row.port, row.proto)
}

fn bit(role: Role, addr: IpAddr, port: u16, proto: u8) -> Bit {
    match addr {
        IpAddr::V4(addr) => position(role, &addr.octets(), port, proto),
        IpAddr::V6(addr) => position(role, &addr.octets(), port, proto),
    }
}

/// The filter as it is in the map, and the entries behind each bit.
#[derive(Clone, Debug)]
pub struct Filter {
    words: Vec<u64>,
    owners: BTreeMap<Bit, u32>,
    idle: BTreeMap<Bit, Instant>,
    hold: Duration,
}

impl Filter {
    /// No bit is set; one that loses its last owner stays for `hold`.
    pub fn new(hold: Duration) -> Self {
        Self { words: vec![0; FILTER_WORDS as usize], owners: BTreeMap::new(), idle: BTreeMap::new(), hold }
    }

    /// Takes over the bits found in the map. Call [`Filter::found`] when their owners are known.
    pub fn restore(&mut self, words: &[u64]) {
        for (known, found) in self.words.iter_mut().zip(words) {
            *known = *found;
        }
    }

    /// Lets the bits without owner begin to rest; those in `idle_before` go on resting.
    pub fn found(&mut self, now: Instant, idle_before: &BTreeMap<Bit, Instant>) {
        for (number, word) in self.words.iter().enumerate() {
            let mut rest = *word;
            while rest != 0 {
                let mask = rest & rest.wrapping_neg();
                rest &= !mask;
                let bit = (number as u32, mask);
                if !self.owners.contains_key(&bit) {
                    self.idle.insert(bit, idle_before.get(&bit).copied().unwrap_or(now));
                }
            }
        }
    }

    /// Since when the bits without owner rest.
    pub fn idle(&self) -> &BTreeMap<Bit, Instant> {
        &self.idle
    }

    /// The words as they should be in the map.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether the bit is set in the map.
    pub fn is_set(&self, (word, mask): Bit) -> bool {
        self.words.get(word as usize).is_some_and(|word| word & mask != 0)
    }

    /// A write to the map succeeded.
    pub fn written(&mut self, write: &Write) {
        match *write {
            Write::FilterSet(word, mask) => {
                if let Some(word) = self.words.get_mut(word as usize) {
                    *word |= mask;
                }
            }
            Write::FilterClear(word, mask) => {
                if let Some(word) = self.words.get_mut(word as usize) {
                    *word &= !mask;
                }
                self.idle.remove(&(word, mask));
            }
            _ => {}
        }
    }

    /// One entry more needs the bit.
    pub fn add(&mut self, bit: Bit) {
        *self.owners.entry(bit).or_default() += 1;
        self.idle.remove(&bit);
    }

    /// One entry less needs it.
    pub fn remove(&mut self, bit: Bit, now: Instant) {
        if let Some(owners) = self.owners.get_mut(&bit) {
            *owners -= 1;
            if *owners == 0 {
                self.owners.remove(&bit);
                self.idle.insert(bit, now);
            }
        }
    }

    /// A bit that was set for an entry which then was not written.
    pub fn unused(&mut self, bit: Bit, now: Instant) {
        if !self.owners.contains_key(&bit) && self.is_set(bit) {
            self.idle.entry(bit).or_insert(now);
        }
    }

    /// Bits that have rested.
    pub fn rested(&self, now: Instant) -> Vec<Bit> {
        self.idle.iter().filter(|(_, since)| now >= **since + self.hold).map(|(bit, _)| *bit).collect()
    }

    /// When the next bit has rested.
    pub fn next_rested(&self) -> Option<Instant> {
        self.idle.values().min().map(|since| *since + self.hold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_hours(24);

    #[test]
    fn a_bit_rests_after_its_last_owner() {
        let now = Instant::now();
        let mut filter = Filter::new(HOLD);
        let bit = (3, 8);
        filter.written(&Write::FilterSet(3, 8));
        filter.add(bit);
        filter.add(bit);
        filter.remove(bit, now);
        assert_eq!(filter.next_rested(), None);
        filter.remove(bit, now);
        assert_eq!(filter.rested(now + HOLD / 2), []);
        assert_eq!(filter.rested(now + HOLD), [bit]);
        filter.add(bit);
        assert_eq!(filter.rested(now + HOLD), []);
    }

    #[test]
    fn bits_found_without_owner_rest_from_the_start() {
        let now = Instant::now();
        let mut filter = Filter::new(HOLD);
        let mut words = vec![0; FILTER_WORDS as usize];
        words[5] = 0b101;
        filter.restore(&words);
        filter.add((5, 1));
        filter.found(now, &BTreeMap::new());
        assert_eq!(filter.rested(now + HOLD), [(5, 4)]);
        filter.written(&Write::FilterClear(5, 4));
        assert!(filter.is_set((5, 1)) && !filter.is_set((5, 4)));
        assert_eq!(filter.next_rested(), None);
    }
}
