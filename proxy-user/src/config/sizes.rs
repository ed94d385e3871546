//! Sizes of the maps.

use proxy_common::flow::MAX_FLOWS;
use proxy_common::map_names;
use proxy_common::stats::ServiceStats;

use super::error::ConfigError;
use crate::host::cpus::Cpus;
use crate::programs::Capacities;
use proxy_core::model::settings::Conntrack;

/// The memory in bytes from which on the maps of Services are twice as large as by default, and four times as large.
const LARGER: [u64; 2] = [12 << 30, 48 << 30];

/// Defines the size of each map: its name among the capacities, its default, whether the default grows with the node's
/// memory, and the bytes of one in all maps, from the number of possible CPUs.
macro_rules! sizes {
    ($($capacity:ident is $default:ident, $grows:literal, $bytes:expr;)+) => {
        /// The requested sizes of the maps; `None`: the default.
        #[derive(Clone, Copy, Debug, Default)]
        #[expect(missing_docs, reason = "the capacities of these names tell")]
        pub struct Sizes {
            $(pub $capacity: Option<u32>,)+
            pub flows: Option<u32>,
            /// Bytes of all maps when each has reached its ceiling.
            pub memory: Option<u64>,
            pub connect_latency: bool,
        }

        impl Sizes {
            /// Returns the sizes for a node with this memory in bytes (`None`: it is not known) and these CPUs, with these
            /// settings of kube-proxy.
            pub fn resolve(
                self,
                memory: Option<u64>,
                cpus: Cpus,
                conntrack: &Conntrack,
            ) -> Result<Capacities, ConfigError> {
                let by_memory = growth(memory);
                let mut capacities = Capacities {
                    $($capacity: self.$capacity.unwrap_or_else(|| {
                        map_names::$default * if $grows { by_memory } else { 1 }
                    }),)+
                    flows: self.flows.unwrap_or_else(|| flows(memory, cpus.online, conntrack)),
                    by_memory,
                    connect_latency: self.connect_latency,
                    ..Capacities::default()
                };
                if let Some(limit) = self.memory {
                    let cpus = u64::from(cpus.possible);
                    let of_flow = FLOW_BYTES + if self.connect_latency { 16 } else { 0 };
                    lower(limit, &mut [
                        $(Part::new(&mut capacities.$capacity, self.$capacity, ($bytes)(cpus), map_names::$default),)+
                        Part::new(&mut capacities.flows, self.flows, of_flow, map_names::FIRST_FLOWS * LEAST),
                    ])?;
                }
                Ok(capacities)
            }
        }
    };
}

sizes! {
    services is DEFAULT_SERVICES, true, |cpus: u64| 208 + cpus * size_of::<ServiceStats>() as u64;
    frontends is DEFAULT_FRONTENDS, true, |_| 80 + 96 + 2 * BUCKET;
    slots is DEFAULT_SLOTS, true, |_| 4;
    maglev_words is DEFAULT_MAGLEV_WORDS, true, |_| 8;
    backends is DEFAULT_BACKENDS, true, |_| 72;
    sockets is DEFAULT_SOCKETS, false, |_| 96 + 128 + 2 * BUCKET;
    source_ranges is DEFAULT_SRC_RANGES, false, |_| 2 * (64 + 80);
}

/// Bytes that a hash has for each entry before it is added.
const BUCKET: u64 = 16;
/// Bytes of the maps that no setting changes, when they are full: affinity, events, filters, the node's own tables.
const OTHERS: u64 = 24 << 20;
/// `--max-memory` lowers a size to one part in this many of its default at most.
const LEAST: u32 = 32;

/// A size that `--max-memory` may lower.
struct Part<'a> {
    size: &'a mut u32,
    is_given: bool,
    /// Bytes of one in all maps.
    bytes: u64,
    least: u32,
}

impl<'a> Part<'a> {
    fn new(size: &'a mut u32, given: Option<u32>, bytes: u64, default: u32) -> Self {
        Self { size, is_given: given.is_some(), bytes, least: default / LEAST }
    }

    fn total(&self) -> u64 {
        self.bytes * u64::from(*self.size)
    }

    fn can_be_lowered(&self) -> bool {
        !self.is_given && *self.size / 2 >= self.least
    }
}

/// Halves the size that takes the most memory, until all maps together take no more than `limit` bytes. Sizes that are given
/// stay.
fn lower(limit: u64, parts: &mut [Part<'_>]) -> Result<(), ConfigError> {
    loop {
        let needed = OTHERS + parts.iter().map(Part::total).sum::<u64>();
        if needed <= limit {
            return Ok(());
        }
        let largest = parts.iter_mut().filter(|part| part.can_be_lowered()).max_by_key(|part| part.total());
        match largest {
            Some(part) => *part.size /= 2,
            None => return Err(ConfigError::MaxMemory { limit, needed }),
        }
    }
}

/// kube-proxy's upper limit of the number that it computes from the cores.
const MOST_BY_CORES: u32 = 1 << 20;
/// Bytes of a flow of each family, with its keys in the index.
const FLOW_BYTES: u64 = 64 + 112 + 4 * 32;
/// The default ceiling of the flows takes one part in this many of the memory at most, when it is reached.
const FLOW_PART: u64 = 64;

/// Returns the ceiling of the flows of each family: kube-proxy's number of connections, `conntrack.maxPerCore` for each core
/// and at least `conntrack.min`. Unless these are given, the memory limits it, too.
fn flows(memory: Option<u64>, cores: u32, conntrack: &Conntrack) -> u32 {
    let given = conntrack.max_per_core.is_some() || conntrack.min.is_some();
    let scaled =
        conntrack.max_per_core.unwrap_or(Conntrack::MAX_PER_CORE).saturating_mul(cores).min(MOST_BY_CORES);
    let wanted = scaled.max(conntrack.min.unwrap_or(map_names::DEFAULT_FLOWS)).min(MAX_FLOWS);
    if given {
        return wanted.max(map_names::FIRST_FLOWS);
    }
    let affordable = memory.unwrap_or_default() / FLOW_PART / FLOW_BYTES;
    wanted.min(u32::try_from(affordable).unwrap_or(u32::MAX)).max(map_names::DEFAULT_FLOWS)
}

/// Returns the factor by which the maps of Services may be larger than by default. If they are full, they take 200 bytes for
/// each address, 60 for each endpoint, 40 for each Service port and possible CPU: less than 1 % of the memory of a node of up to 64
/// CPUs.
fn growth(memory: Option<u64>) -> u32 {
    let bytes = memory.unwrap_or_default();
    LARGER.iter().fold(1, |times, from| if bytes >= *from { 2 * times } else { times })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const GB: u64 = 1 << 30;

    const fn cpus(number: u32) -> Cpus {
        Cpus { online: number, possible: number }
    }

    #[rstest]
    #[case::unknown(None, 1)]
    #[case::small(Some(2 * GB), 1)]
    #[case::below(Some(12 * GB - 1), 1)]
    #[case::twice(Some(12 * GB), 2)]
    #[case::four_times(Some(48 * GB), 4)]
    #[case::never_more(Some(2048 * GB), 4)]
    fn maps_of_services_grow_with_the_memory(#[case] memory: Option<u64>, #[case] times: u32) {
        let sizes = Sizes::default().resolve(memory, cpus(2), &Conntrack::default()).unwrap();
        let plain = Capacities::default();
        assert_eq!(
            [sizes.services, sizes.frontends, sizes.slots, sizes.backends],
            [plain.services, plain.frontends, plain.slots, plain.backends].map(|size| size * times)
        );
        assert_eq!((sizes.flows, sizes.sockets), (plain.flows, plain.sockets));
    }

    #[rstest]
    #[case::small(Some(2 * GB), 2, None, None, 131_072)]
    #[case::cores(Some(256 * GB), 64, None, None, 1 << 20)]
    #[case::memory(Some(16 * GB), 64, None, None, (16 * GB / 64 / 304) as u32)]
    #[case::per_core(Some(2 * GB), 8, Some(100_000), None, 800_000)]
    #[case::min(Some(2 * GB), 8, None, Some(500_000), 500_000)]
    #[case::little(Some(2 * GB), 1, Some(7), Some(9), 16_384)]
    fn kube_proxys_number_of_connections_is_the_ceiling_of_flows(
        #[case] memory: Option<u64>,
        #[case] cores: u32,
        #[case] max_per_core: Option<u32>,
        #[case] min: Option<u32>,
        #[case] flows: u32,
    ) {
        let conntrack = Conntrack { max_per_core, min, ..Conntrack::default() };
        assert_eq!(Sizes::default().resolve(memory, cpus(cores), &conntrack).unwrap().flows, flows);
        let given = Sizes { flows: Some(1_000), ..Sizes::default() };
        assert_eq!(given.resolve(memory, cpus(cores), &conntrack).unwrap().flows, 1_000);
    }

    #[test]
    fn sizes_from_flags_override_the_computed_ones() {
        let args = Sizes { backends: Some(1000), flows: Some(2000), ..Sizes::default() };
        let sizes = args.resolve(Some(64 * GB), cpus(2), &Conntrack::default()).unwrap();
        assert_eq!((sizes.backends, sizes.flows), (1000, 2000));
        assert_eq!(sizes.services, 4 * map_names::DEFAULT_SERVICES);
    }

    /// The maps whose memory is allocated at once: both `services`, `slots`, both `backends`, `backend_stats`, `service_stats`.
    #[test]
    fn growth_takes_less_than_a_hundredth_of_the_memory() {
        for (memory, possible) in [(12 * GB, 16), (48 * GB, 64)] {
            let sizes = Sizes::default().resolve(Some(memory), cpus(2), &Conntrack::default()).unwrap();
            let [slots, backends] = [sizes.slots, sizes.backends].map(u64::from);
            let [services, frontends] = [sizes.services, sizes.frontends].map(u64::from);
            let bytes = frontends * 200
                + slots * 8
                + backends * (16 + 28 + 8)
                + services * possible * size_of::<ServiceStats>() as u64;
            assert!(bytes < memory / 100, "{bytes} bytes of {memory}");
        }
    }

    #[test]
    fn max_memory_lowers_the_largest_sizes_that_are_not_given() {
        let of = |memory| {
            let sizes = Sizes { memory, backends: Some(1_000_000), ..Sizes::default() };
            sizes.resolve(Some(64 * GB), cpus(8), &Conntrack::default())
        };
        let all =
            |of: Capacities| [of.services, of.frontends, of.slots, of.maglev_words, of.flows, of.sockets];
        let mut before = all(of(None).unwrap());
        for limit in [300 << 20, 200 << 20, 120 << 20] {
            let sizes = of(Some(limit)).unwrap();
            assert_eq!(sizes.backends, 1_000_000, "it is given");
            assert!(sizes.flows >= map_names::FIRST_FLOWS);
            let now = all(sizes);
            assert!(now != before && now.iter().zip(before).all(|(now, before)| *now <= before), "{now:?}");
            before = now;
        }
        let refused = of(Some(64 << 20));
        assert!(matches!(refused, Err(ConfigError::MaxMemory { needed, .. }) if needed > 1_000_000 * 72));
    }

    #[test]
    fn max_memory_counts_the_possible_cpus() {
        let of = |cpus| {
            let sizes = Sizes { memory: Some(150 << 20), ..Sizes::default() };
            sizes.resolve(Some(4 * GB), cpus, &Conntrack::default()).unwrap()
        };
        let (few, many) = (of(cpus(8)), of(Cpus { online: 8, possible: 128 }));
        assert!(many.services < few.services, "{many:?}");
    }

    #[test]
    fn max_memory_beyond_all_ceilings_changes_nothing() {
        let sizes = Sizes { memory: Some(64 * GB), ..Sizes::default() };
        let plain = Sizes::default().resolve(Some(64 * GB), cpus(8), &Conntrack::default()).unwrap();
        assert_eq!(sizes.resolve(Some(64 * GB), cpus(8), &Conntrack::default()).unwrap(), plain);
    }
}
