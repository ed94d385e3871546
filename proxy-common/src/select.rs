//! Selects the slot of a Service for a new connection, and its source port.

use crate::Address;
use crate::connections::{self, answer_time, base_time};
use crate::flow::{FlowKey, mix};
use crate::prefilter::SPREAD;

macro_rules! algorithms {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal, $label:literal;)+) => {
        /// How a Service selects endpoints: the schedulers of IPVS, random, and latency. `services` stores the number.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Algorithm {
            #[default]
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl Algorithm {
            /// All algorithms, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns the name in settings, annotations, tables and JSON: that of IPVS, if IPVS has the algorithm.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }

            /// Returns a description for users, in one sentence.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),+),)+ }
            }
        }
    };
}

algorithms! {
    /// Each connection goes to any endpoint, by weight, as in kube-proxy's iptables and nftables modes.
    Random = 0, "random";
    /// Round robin: endpoints take turns; weights do not count.
    RoundRobin = 1, "rr";
    /// Weighted round robin: endpoints take turns, as many as their weights say.
    WeightedRoundRobin = 2, "wrr";
    /// Source hash: a client's address has one endpoint, by a Maglev table.
    SourceHash = 3, "sh";
    /// Destination hash: a destination address has one endpoint, by a Maglev table.
    DestinationHash = 4, "dh";
    /// Maglev: client, address and ports have one endpoint, the same on all nodes.
    Maglev = 5, "mh";
    /// Least connections: of two endpoints taken at random, the one with fewer open connections; weights do not count.
    LeastConnections = 6, "lc";
    /// Weighted least connections: of two endpoints taken at random, the one with fewer open connections for its weight.
    WeightedLeastConnections = 7, "wlc";
    /// Shortest expected delay: as `wlc`, with the new connection counted among the open ones.
    ShortestExpectedDelay = 8, "sed";
    /// Never queue: of two endpoints taken at random, one without open connections; if there is none, as `sed`.
    NeverQueue = 9, "nq";
    /// Latency: of three endpoints taken at random, the one with the smallest product of open connections and time to the first answer.
    Latency = 10, "latency";
}

impl Algorithm {
    /// Returns the algorithm with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether the algorithm needs a Maglev table.
    pub const fn is_hash(self) -> bool {
        matches!(self, Self::SourceHash | Self::DestinationHash | Self::Maglev)
    }

    /// Whether the number of an endpoint's slots follows its weight.
    pub const fn repeats_slots(self) -> bool {
        matches!(
            self,
            Self::Random
                | Self::WeightedRoundRobin
                | Self::WeightedLeastConnections
                | Self::ShortestExpectedDelay
                | Self::NeverQueue
                | Self::Latency
        )
    }

    /// Whether the algorithm selects by open connections.
    pub const fn is_by_load(self) -> bool {
        is_by_load(self as u8)
    }

    /// Returns the weighted variant of an algorithm that ignores weights; any other algorithm as it is.
    #[must_use]
    pub const fn weighted(self) -> Self {
        match self {
            Self::RoundRobin => Self::WeightedRoundRobin,
            Self::LeastConnections => Self::WeightedLeastConnections,
            other => other,
        }
    }
}

/// Whether the number is that of a round-robin algorithm.
#[inline(always)]
pub const fn is_round_robin(number: u8) -> bool {
    number == Algorithm::RoundRobin as u8 || number == Algorithm::WeightedRoundRobin as u8
}

/// Whether the number is that of an algorithm with a Maglev table.
#[inline(always)]
pub const fn is_by_table(number: u8) -> bool {
    number >= Algorithm::SourceHash as u8 && number <= Algorithm::Maglev as u8
}

/// Whether the number is that of an algorithm by open connections, whose Services count them.
#[inline(always)]
pub const fn is_by_load(number: u8) -> bool {
    by_load(number) != 0
}

/// [`is_by_load`] as 0 or 1, without branches: the verifier would walk through all that follows for each.
#[inline(always)]
pub const fn by_load(number: u8) -> u32 {
    const ALGORITHMS: u32 = Algorithm::Latency as u32 - Algorithm::LeastConnections as u32 + 1;
    // The sign of the difference.
    (number.wrapping_sub(Algorithm::LeastConnections as u8) as u32).wrapping_sub(ALGORITHMS)
        >> (u32::BITS - 1)
}

/// Whether the number is that of the algorithm by open connections and time to the first answer.
#[inline(always)]
pub const fn is_by_latency(number: u8) -> bool {
    number == Algorithm::Latency as u8
}

/// Load of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Its open connections; for [`Algorithm::Latency`], see [`Load::by_latency`].
    pub open: u32,
    /// Its weight, at least 1.
    pub weight: u32,
}

impl Load {
    /// The load of a backend that does not serve: every other one is less loaded, since it has a weight.
    pub const GONE: Self = Self { open: u32::MAX, weight: 0 };

    /// Returns the load of a backend. `word`: the value in `connections`.
    #[inline(always)]
    pub const fn new(word: u64, weight: u32) -> Self {
        let open = connections::open(word);
        Self { open: if open < 0 { 0 } else { open.cast_unsigned() }, weight }
    }

    /// Returns the load of a backend by latency at jiffies `now`: its open connections, with the new one, multiplied by the time to
    /// its first answer.
    #[inline(always)]
    pub const fn by_latency(word: u64, weight: u32, now: u32, hz: u32) -> Self {
        let time = answer_time(word, now, hz) + base_time(hz);
        let product = (Self::new(word, weight).open as u64 + 1) * time as u64;
        Self { open: if product > u32::MAX as u64 { u32::MAX } else { product as u32 }, weight }
    }
}

/// Whether `one` gets a new connection rather than `other`, by the algorithm with this number (`ip_vs_lc.c`, `ip_vs_wlc.c`,
/// `ip_vs_sed.c`, `ip_vs_nq.c`). Weights are multiplied crosswise, as in IPVS, which avoids a division.
#[inline(always)]
pub const fn is_less_loaded(algorithm: u8, one: Load, other: Load) -> bool {
    let (mut one_open, mut other_open) = (one.open as u64, other.open as u64);
    if algorithm == Algorithm::LeastConnections as u8 {
        return one_open < other_open;
    }
    if algorithm == Algorithm::NeverQueue as u8 && (one_open == 0) != (other_open == 0) {
        return one_open == 0;
    }
    if is_by_latency(algorithm) {
        // Endpoints that differ by less than a half are alike: the fastest one would get all connections of its pairs.
        one_open *= 3;
        other_open *= 2;
    } else if algorithm != Algorithm::WeightedLeastConnections as u8 {
        one_open += 1;
        other_open += 1;
    }
    one_open * (other.weight as u64) < other_open * (one.weight as u64)
}

/// Returns the number after `number` of a linear congruential generator (Numerical Recipes), which yields every 32-bit
/// number.
#[inline(always)]
pub const fn next_random(number: u32) -> u32 {
    number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)
}

/// Seed of the hashes that select endpoints: the same on all nodes, so that all nodes select the same endpoint.
const COMMON_SEED: u64 = 0x6d61_676c_6576_2121;

/// Returns the number that selects the backend of a client's packet: a hash of the fields that the algorithm uses, else
/// `random`.
#[inline(always)]
pub fn selector<A: Address>(algorithm: u8, key: &FlowKey<A>, random: u32) -> u32 {
    if algorithm == Algorithm::Maglev as u8 {
        upper(key.hash(COMMON_SEED as u32))
    } else if algorithm == Algorithm::SourceHash as u8 {
        address_hash(&key.src)
    } else if algorithm == Algorithm::DestinationHash as u8 {
        address_hash(&key.dst)
    } else {
        random
    }
}

/// Returns the number that selects the backend for a socket call. The socket has no address and port yet, so its network
/// namespace stands for the client.
#[inline(always)]
pub fn socket_selector<A: Address>(algorithm: u8, netns: u64, orig_dst: &A, random: u32) -> u32 {
    if algorithm == Algorithm::SourceHash as u8 {
        upper(mix(COMMON_SEED, netns))
    } else if algorithm == Algorithm::DestinationHash as u8 {
        address_hash(orig_dst)
    } else {
        random
    }
}

/// Returns the tag by which another node identifies one of its own endpoints in an encapsulated packet (DSR). The tag has
/// 16 bits, since each outer header carries it. It is the same on all nodes.
#[inline(always)]
pub fn tunnel_tag<A: Address>(addr: &A, port: u16) -> u16 {
    let [a, b, c, d] = addr.words();
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    (upper(mix(mix(mix(COMMON_SEED, pair(a, b)), pair(c, d)), u64::from(port))) >> 16) as u16
}

#[inline(always)]
fn address_hash<A: Address>(address: &A) -> u32 {
    let [a, b, c, d] = address.words();
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    upper(mix(mix(COMMON_SEED, pair(a, b)), pair(c, d)))
}

/// Returns the upper bits of a product, which depend on all bits of its factors.
#[inline(always)]
const fn upper(hash: u64) -> u32 {
    (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// Returns the slot, from 0 to `count` - 1, for a uniformly random `random`.
///
/// Multiplies and shifts instead of dividing: the bias is at most `count` / 2^32. `count` must not be 0.
#[inline(always)]
pub fn random_slot(random: u32, count: u32) -> u32 {
    ((u64::from(random) * u64::from(count)) >> 32) as u32
}

/// Returns the number of the SNAT port of a client's flow, unless another flow has that port: one of `count`, which must
/// not be 0.
///
/// The client's port is spread well enough, so no random number is needed.
#[inline(always)]
pub fn source_port(client_port: u16, count: u32) -> u32 {
    random_slot(u32::from(client_port).wrapping_mul(SPREAD), count)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::config::{NodeConfig, PortRange, SNAT_PORTS};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_slot_is_always_inside_the_extent(random: u32, count in 1u32..) {
            prop_assert!(random_slot(random, count) < count);
        }

        #[test]
        fn a_source_port_is_always_inside_its_ranges(client: u16, ranges: [(u16, u16); 2]) {
            let snat = ranges.map(|(one, other)| PortRange::new(one.min(other).max(1), one.max(other).max(1)));
            let config = NodeConfig { snat, ..NodeConfig::default() };
            let chosen = config.snat_port(source_port(client, config.snat_count()));
            prop_assert!(config.is_snat_port(chosen));
        }
    }

    #[test]
    fn algorithms_have_words_and_a_sentence() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_number(*algorithm as u8), Some(*algorithm));
            assert!(algorithm.explanation().ends_with('.'), "{}", algorithm.label());
        }
    }

    #[test]
    fn every_port_of_both_ranges_has_a_number() {
        let config = NodeConfig {
            snat: [PortRange::new(10, 12), PortRange::new(65_534, 65_535)],
            ..NodeConfig::default()
        };
        let ports: std::vec::Vec<_> =
            (0..config.snat_count()).map(|number| config.snat_port(number)).collect();
        assert_eq!(ports, [10, 11, 12, 65_534, 65_535]);
        assert!(![9, 13, 65_533, 0].iter().any(|port| config.is_snat_port(*port)));
        let none = NodeConfig { snat: [PortRange::new(5, 4), PortRange::new(0, 0)], ..NodeConfig::default() };
        assert_eq!(none.snat_count(), 0);
        assert!(!none.is_snat_port(0) && !none.is_snat_port(5));
    }

    #[test]
    fn clients_ports_in_a_row_get_source_ports_of_their_own() {
        let count = NodeConfig { snat: SNAT_PORTS, ..NodeConfig::default() }.snat_count();
        // The kernel gives every other port to the connections of one client.
        let chosen: std::collections::BTreeSet<_> =
            (0..1000).map(|n| source_port(32_768 + 2 * n, count)).collect();
        assert_eq!(chosen.len(), 1000);
    }

    #[test]
    fn algorithms_are_known_by_their_numbers() {
        for (number, algorithm) in (0..).zip(Algorithm::ALL.iter().copied()) {
            assert_eq!(Algorithm::from_number(number), Some(algorithm));
            let is = |names: &[&str]| names.contains(&algorithm.label());
            assert_eq!(is_round_robin(number), is(&["rr", "wrr"]), "{algorithm:?}");
            assert_eq!(is_by_table(number), is(&["sh", "dh", "mh"]), "{algorithm:?}");
            assert_eq!(algorithm.is_hash(), is(&["sh", "dh", "mh"]), "{algorithm:?}");
            assert_eq!(is_by_load(number), is(&["lc", "wlc", "sed", "nq", "latency"]), "{algorithm:?}");
            assert_eq!(algorithm.is_by_load(), is_by_load(number), "{algorithm:?}");
            assert_eq!(
                algorithm.repeats_slots(),
                is(&["random", "wrr", "wlc", "sed", "nq", "latency"]),
                "{algorithm:?}"
            );
        }
        let none = Algorithm::ALL.len() as u8;
        assert_eq!(Algorithm::from_number(none), None);
        assert!(!is_round_robin(none) && !is_by_table(none) && !is_by_load(none));
    }

    #[test]
    fn endpoints_that_are_alike_are_not_less_loaded_than_each_other() {
        for algorithm in &Algorithm::ALL[6..] {
            for load in [Load { open: 0, weight: 3 }, Load { open: 5, weight: 3 }] {
                assert!(!is_less_loaded(*algorithm as u8, load, load), "{algorithm:?} {load:?}");
            }
        }
        // One more open connection counts as much as the weight says: (0 + 1) / 1 is more than (1 + 1) / 3.
        let [idle, heavy] = [Load { open: 0, weight: 1 }, Load { open: 1, weight: 3 }];
        assert!(is_less_loaded(Algorithm::ShortestExpectedDelay as u8, heavy, idle));
        assert!(is_less_loaded(Algorithm::NeverQueue as u8, idle, heavy));
        assert!(!is_less_loaded(Algorithm::NeverQueue as u8, heavy, idle));
        assert!(is_less_loaded(Algorithm::WeightedLeastConnections as u8, idle, heavy));
    }

    /// Hashes that packets carry between nodes, and by which nodes of two versions have to select the same endpoint. The
    /// values were computed independently of this code, for a little-endian machine.
    #[cfg(target_endian = "little")]
    #[test]
    fn hashes_are_the_same_on_all_nodes_and_in_all_versions() {
        fn key<A>(src: A, dst: A) -> FlowKey<A> {
            FlowKey { src, dst, src_port: 1, dst_port: 2, proto: 6, direction: 0, reserved: 0 }
        }
        let four = [10u8, 244, 1, 7];
        let six = core::net::Ipv6Addr::new(0xfd00, 1, 2, 3, 4, 5, 6, 7).octets();
        assert_eq!([tunnel_tag(&four, 8080), tunnel_tag(&six, 8080)], [62_024, 26_137]);
        let by = |algorithm: Algorithm, src, dst| selector(algorithm as u8, &key(src, dst), 99);
        assert_eq!(by(Algorithm::SourceHash, four, [0; 4]), 3_449_292_514);
        assert_eq!(by(Algorithm::DestinationHash, [0; 4], four), 3_449_292_514);
        assert_eq!(selector(Algorithm::SourceHash as u8, &key(six, [0; 16]), 99), 2_717_637_216);
        assert_eq!(by(Algorithm::Random, four, four), 99);
        assert_ne!(by(Algorithm::Maglev, four, [0; 4]), by(Algorithm::Maglev, [0; 4], four));
        let by = |algorithm: Algorithm| socket_selector(algorithm as u8, 0x12_3456_7890, &four, 99);
        assert_eq!(by(Algorithm::SourceHash), 102_240_181);
        assert_eq!(by(Algorithm::DestinationHash), 3_449_292_514);
        assert_eq!(by(Algorithm::Maglev), 99);
    }

    /// The cost by the definition of each algorithm, as a fraction.
    fn cost(algorithm: Algorithm, load: Load) -> f64 {
        let (open, weight) = (f64::from(load.open), f64::from(load.weight));
        match algorithm {
            Algorithm::LeastConnections => open,
            Algorithm::WeightedLeastConnections => open / weight,
            Algorithm::NeverQueue if load.open == 0 => -1.0,
            _ => (open + 1.0) / weight,
        }
    }

    proptest! {
        #[test]
        fn the_endpoint_with_less_to_do_is_less_loaded(
            algorithm in prop::sample::select(&Algorithm::ALL[6..10]),
            loads in prop::array::uniform2((0..50_u32, 1..=1000_u32)),
        ) {
            let [one, other] = loads.map(|(open, weight)| Load { open, weight });
            let (first, second) = (cost(algorithm, one), cost(algorithm, other));
            // Of two idle endpoints, `nq` takes the heavier one, as `sed` does.
            let expected = if algorithm == Algorithm::NeverQueue && one.open == 0 && other.open == 0 {
                one.weight > other.weight
            } else {
                first < second
            };
            prop_assert_eq!(is_less_loaded(algorithm as u8, one, other), expected);
            prop_assert!(!(is_less_loaded(algorithm as u8, one, other) && is_less_loaded(algorithm as u8, other, one)));
        }
    }

    #[test]
    fn latency_product_below_two_thirds_is_less_loaded() {
        let is_less = |one, other| is_less_loaded(Algorithm::Latency as u8, one, other);
        let (hz, now) = (250, 77);
        // The smoothed time after one answer is an eighth of the answer's.
        let word = |open: u64, time: u32| connections::with_answer(0, 8 * time, now, hz) + open;
        let load = |open, weight, time| Load::by_latency(word(open, time), weight, now, hz);
        assert_eq!(base_time(hz), 15);
        assert!(is_less(load(0, 1, 0), load(0, 1, 8)) && !is_less(load(0, 1, 0), load(0, 1, 7)));
        // Of an idle endpoint and one that takes a tenth of its time, the fast one gets the first six connections, at least.
        assert!((0..6).all(|open| is_less(load(open, 1, 0), load(0, 1, 135))));
        assert!(is_less(load(0, 1, 135), load(15, 1, 0)));
        assert!(is_less(load(2, 4, 0), load(1, 1, 0)), "by weight");
    }

    #[test]
    fn backend_out_of_service_is_most_loaded() {
        for algorithm in Algorithm::ALL.iter().filter(|algorithm| algorithm.is_by_load()) {
            for open in [0, 1, 1 << 30] {
                let load = Load { open, weight: 1 };
                let number = *algorithm as u8;
                assert!(is_less_loaded(number, load, Load::GONE), "{algorithm:?} {open}");
                assert!(!is_less_loaded(number, Load::GONE, load), "{algorithm:?} {open}");
            }
        }
    }

    #[test]
    fn a_count_below_zero_is_none_and_large_ones_do_not_overflow() {
        assert_eq!(Load::new(u64::MAX, 3), Load { open: 0, weight: 3 });
        assert_eq!(Load::by_latency(u64::MAX >> 1, 3, 0, 1000).open, base_time(1000));
        assert_eq!(Load::by_latency(i32::MAX as u64, 3, 0, 1000).open, u32::MAX);
        let (most, idle) = (Load { open: u32::MAX, weight: 1 }, Load { open: 0, weight: 0xffff });
        for algorithm in Algorithm::ALL.iter().filter(|algorithm| algorithm.is_by_load()) {
            assert!(is_less_loaded(*algorithm as u8, idle, most), "{algorithm:?}");
        }
    }

    #[test]
    fn every_slot_is_reached_at_both_ends_of_the_range() {
        assert_eq!(random_slot(0, 3), 0);
        assert_eq!(random_slot(u32::MAX, 3), 2);
    }
}
