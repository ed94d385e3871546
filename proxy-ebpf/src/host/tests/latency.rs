//! The algorithm `latency` in time: clients with open connections to ten endpoints, of which two are slow, compared with `lc`.

#![expect(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "random times of a simulation")]

use std::collections::BTreeMap;

use proxy_common::select::{Algorithm, next_random};

use super::*;
use crate::select::load;

const ENDPOINTS: u32 = 10;
const SLOTS: u32 = 40;
/// Microseconds by which a slow endpoint answers later.
const SLOWED: u64 = 20_000;
const JIFFY: u64 = 1_000_000 / HZ as u64;
const SECOND: u64 = 1_000_000;

/// What happens to a connection.
enum Event {
    Answered { id: u32, after: u64 },
    Ended { id: u32, after: u64 },
}

/// A Service, its endpoints and its connections. Times are in microseconds.
struct World {
    maps: HostMaps<V4>,
    service: ServiceEntry,
    random: u64,
    now: u64,
    slow: [u32; 2],
    events: BTreeMap<(u64, u32), Event>,
    begun: u32,
}

impl World {
    fn new(algorithm: Algorithm) -> Self {
        let maps = maps::<V4>(BACKEND_LOCAL);
        for id in 1..=ENDPOINTS {
            let addr = V4::addr(id as u8);
            let (proto, state, flags) = (PROTO_TCP, BACKEND_ACTIVE, BACKEND_LOCAL);
            maps.set_backend(id, BackendEntry { addr, port: 80, proto, state, service: 1, flags });
        }
        maps.set_slots(SLOTS, &(1..=ENDPOINTS).collect::<Vec<_>>());
        let service = ServiceEntry {
            id: 1,
            slot_base: SLOTS,
            slot_count: ENDPOINTS,
            kind: KIND_CLUSTER_IP,
            algorithm: algorithm as u8,
            ..ServiceEntry::NONE
        };
        Self { maps, service, random: 7, now: 0, slow: [1, 2], events: BTreeMap::new(), begun: 0 }
    }

    fn random(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a random time with this mean, of a distribution without memory.
    fn about(&mut self, mean: f64) -> u64 {
        (-mean * (1.0 - self.random()).ln()) as u64
    }

    /// Lets `rate` connections a second begin, for `secs` seconds. Returns how long each took, in order, and how many each endpoint got.
    fn run(&mut self, rate: f64, secs: u64) -> (Vec<u64>, BTreeMap<u32, u32>) {
        let (mut took, mut shares) = (Vec::new(), BTreeMap::new());
        let end = self.now + secs * SECOND;
        let mut next = self.now;
        while next < end {
            while let Some(first) = self.events.first_entry()
                && first.key().0 <= next
            {
                let ((at, _), event) = first.remove_entry();
                self.advance(at);
                match event {
                    // As the packet path: in jiffies.
                    Event::Answered { id, after } => {
                        let created = ((at - after) / JIFFY) as u32;
                        load::count(
                            self.maps,
                            id,
                            0,
                            self.maps.now().wrapping_sub((at / JIFFY) as u32 - created),
                        );
                    }
                    Event::Ended { id, after } => {
                        load::ended(self.maps, id);
                        took.push(after);
                    }
                }
            }
            self.advance(next);
            let selector = (self.random() * f64::from(u32::MAX)) as u32;
            let id = load::first_id(self.maps, &self.service, next_random(selector));
            load::begun(self.maps, id);
            *shares.entry(id).or_default() += 1;
            let slowed = if self.slow.contains(&id) { SLOWED } else { 0 };
            let answered = 200 + self.about(100.0) + slowed;
            let ended = answered + 500 + self.about(1000.0);
            for (after, event) in [
                (answered, Event::Answered { id, after: answered }),
                (ended, Event::Ended { id, after: ended }),
            ] {
                self.begun += 1;
                self.events.insert((next + after, self.begun), event);
            }
            next += self.about(1e6 / rate);
        }
        took.sort_unstable();
        (took, shares)
    }

    fn advance(&mut self, to: u64) {
        self.maps.advance((to / JIFFY - self.now / JIFFY) as u32);
        self.now = to;
    }
}

fn p99(took: &[u64]) -> u64 {
    took[took.len() * 99 / 100]
}

#[test]
fn latency_with_two_slow_endpoints_halves_the_p99_of_lc() {
    for rate in [200.0, 2_000.0, 10_000.0] {
        let [by_count, by_latency] = [Algorithm::LeastConnections, Algorithm::Latency].map(|algorithm| {
            let mut world = World::new(algorithm);
            world.run(rate, 30);
            p99(&world.run(rate, 60).0)
        });
        std::println!("{rate}/s: lc {by_count} us, latency {by_latency} us");
        assert!(by_latency * 2 <= by_count, "{rate}/s: lc {by_count} us, latency {by_latency} us");
    }
}

#[test]
fn share_after_slow_endpoints_change_is_below_two() {
    let mut world = World::new(Algorithm::Latency);
    let mut most = 0.0f64;
    for slow in [[1, 2], [3, 4], [5, 1], [0, 0], [9, 10]] {
        world.slow = slow;
        for second in 0..60 {
            let (_, shares) = world.run(2_000.0, 1);
            let all: u32 = shares.values().sum();
            let share = f64::from(*shares.values().max().unwrap()) * f64::from(ENDPOINTS) / f64::from(all);
            most = most.max(share);
            assert!(share < 2.0, "{slow:?}, second {second}: {share} of {shares:?}");
        }
        // An endpoint that is fast again gets connections again.
        let (_, shares) = world.run(2_000.0, 5);
        let least = (1..=ENDPOINTS)
            .filter(|id| !slow.contains(id))
            .map(|id| shares.get(&id).copied().unwrap_or(0))
            .min();
        assert!(least.unwrap() > 400, "{slow:?}: {shares:?}");
    }
    std::println!("largest share {most}");
}
