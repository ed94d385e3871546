//! Sizes of the maps.

use clap::builder::FalseyValueParser;
use proxy_common::flow::MAX_FLOWS;
use proxy_common::map_names::{DEFAULT_FLOWS, FIRST_FLOWS};
use proxy_common::stats::ServiceStats;

use super::error::ConfigError;
use crate::host::cpus::Cpus;
use crate::programs::Capacities;
use proxy_cli::value;
use proxy_core::model::settings::Conntrack;

/// The memory in bytes from which on the maps of Services are twice as large as by default, and four times as large.
const LARGER: [u64; 2] = [12 << 30, 48 << 30];

/// The requested sizes of the maps; `None`: the default.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[command(next_help_heading = "Map sizes")]
pub struct Sizes {
    /// Maximum number of Service ports (each address family counts). Default: 32768; twice as many with at least 12 GiB of
    /// memory, four times as many with at least 48 GiB.
    #[arg(long, env = "BALLAST_MAX_SERVICES", value_name = "N", value_parser = value::capacity)]
    pub max_services: Option<u32>,
    /// Maximum number of frontends (addresses and ports of Services), for each address family. Default: 65536, more on nodes
    /// with more memory.
    #[arg(long, env = "BALLAST_MAX_FRONTENDS", value_name = "N", value_parser = value::capacity)]
    pub max_frontends: Option<u32>,
    /// Maximum number of slots: the endpoints of all frontends together. A change needs room for the old and the new slots of
    /// a frontend. Default: 524288, more on nodes with more memory.
    #[arg(long, env = "BALLAST_MAX_SLOTS", value_name = "N", value_parser = value::capacity)]
    pub max_slots: Option<u32>,
    /// Words of eight bytes for Maglev tables: a table of 5 endpoints takes 134 words, one of 100 endpoints about 2,100. A
    /// change needs room for the old and the new table. Default: 786432, more on nodes with more memory.
    #[arg(long, env = "BALLAST_MAX_MAGLEV_WORDS", value_name = "N", value_parser = value::capacity)]
    pub max_maglev_words: Option<u32>,
    /// Maximum number of backends; an endpoint of two Service ports counts twice. Default: 262144, more on nodes with more
    /// memory.
    #[arg(long, env = "BALLAST_MAX_BACKENDS", value_name = "N", value_parser = value::capacity)]
    pub max_backends: Option<u32>,
    /// Maximum number of flows (connections that the packet programs track), for each address family; the table grows up to
    /// it. Default: 32768 for each CPU, at least 131072, and at most a sixty-fourth of the memory; or kube-proxy's
    /// `conntrack.maxPerCore` and `conntrack.min`.
    #[arg(long, env = "BALLAST_MAX_FLOWS", value_name = "N", value_parser = value::capacity)]
    pub max_flows: Option<u32>,
    /// Maximum number of peers of unconnected UDP sockets, for each address family. Default: 131072.
    #[arg(long, env = "BALLAST_MAX_SOCKETS", value_name = "N", value_parser = value::capacity)]
    pub max_sockets: Option<u32>,
    /// Maximum number of source ranges of load balancers, for each address family. Frontends with the same ranges share them;
    /// a change needs room for the old and the new ranges. Unused ones take no memory. Default: 65536.
    #[arg(long, env = "BALLAST_MAX_SOURCE_RANGES", value_name = "N", value_parser = value::capacity)]
    pub max_source_ranges: Option<u32>,
    /// Maximum memory of all maps together, when each has grown to its ceiling, as a number of bytes or with a suffix
    /// (`200Mi`, `1Gi`). The sizes that no flag gives are lowered until it suffices. Default: no limit but the sizes.
    #[arg(long, env = "BALLAST_MAX_MEMORY", value_name = "BYTES", value_parser = value::bytes)]
    pub max_memory: Option<u64>,
    /// Measure how long endpoints take to answer a SYN, and count refused and retransmitted SYNs, by Service and endpoint
    /// (`ballast service show`, `ballast_connect_latency_seconds`). Costs memory (16 bytes for each flow, plus 4 MiB)
    /// and about 100 ns for each new connection.
    #[arg(
        long,
        env = "BALLAST_CONNECT_LATENCY",
        num_args = 0..=1,
        default_missing_value = "true",
        require_equals = true,
        value_parser = FalseyValueParser::new()
    )]
    pub connect_latency: Option<bool>,
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
        let connect_latency = self.connect_latency.unwrap_or_default();
        let of_service = 208 + u64::from(cpus.possible) * size_of::<ServiceStats>() as u64;
        let of_flow = FLOW_BYTES + if connect_latency { 16 } else { 0 };
        let flows = flows(memory, cpus.online, conntrack);
        let mut all = Capacities { flows, connect_latency, by_memory, ..Capacities::default() };
        let mut parts = [
            Part::new(&mut all.services, self.max_services, by_memory, of_service),
            Part::new(&mut all.frontends, self.max_frontends, by_memory, 80 + 96 + 2 * BUCKET),
            Part::new(&mut all.slots, self.max_slots, by_memory, 4),
            Part::new(&mut all.maglev_words, self.max_maglev_words, by_memory, 8),
            Part::new(&mut all.backends, self.max_backends, by_memory, 72),
            Part::new(&mut all.sockets, self.max_sockets, 1, 96 + 128 + 2 * BUCKET),
            Part::new(&mut all.source_ranges, self.max_source_ranges, 1, 2 * (64 + 80)),
            Part { least: FIRST_FLOWS, ..Part::new(&mut all.flows, self.max_flows, 1, of_flow) },
        ];
        if let Some(limit) = self.max_memory {
            lower(limit, &mut parts)?;
        }
        Ok(all)
    }
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
    /// Sets the size, which is the default: to the given one, or to so many times the default.
    fn new(size: &'a mut u32, given: Option<u32>, times: u32, bytes: u64) -> Self {
        let least = *size / LEAST;
        *size = given.unwrap_or(*size * times);
        Self { size, is_given: given.is_some(), bytes, least }
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
    let wanted = scaled.max(conntrack.min.unwrap_or(DEFAULT_FLOWS)).min(MAX_FLOWS);
    if given {
        return wanted.max(FIRST_FLOWS);
    }
    let affordable = memory.unwrap_or_default() / FLOW_PART / FLOW_BYTES;
    wanted.min(u32::try_from(affordable).unwrap_or(u32::MAX)).max(DEFAULT_FLOWS)
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
        let given = Sizes { max_flows: Some(1_000), ..Sizes::default() };
        assert_eq!(given.resolve(memory, cpus(cores), &conntrack).unwrap().flows, 1_000);
    }

    #[test]
    fn sizes_from_flags_override_the_computed_ones() {
        let args = Sizes { max_backends: Some(1000), max_flows: Some(2000), ..Sizes::default() };
        let sizes = args.resolve(Some(64 * GB), cpus(2), &Conntrack::default()).unwrap();
        assert_eq!((sizes.backends, sizes.flows), (1000, 2000));
        assert_eq!(sizes.services, 4 * Capacities::default().services);
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
        let of = |max_memory| {
            let sizes = Sizes { max_memory, max_backends: Some(1_000_000), ..Sizes::default() };
            sizes.resolve(Some(64 * GB), cpus(8), &Conntrack::default())
        };
        let all =
            |of: Capacities| [of.services, of.frontends, of.slots, of.maglev_words, of.flows, of.sockets];
        let mut before = all(of(None).unwrap());
        for limit in [300 << 20, 200 << 20, 120 << 20] {
            let sizes = of(Some(limit)).unwrap();
            assert_eq!(sizes.backends, 1_000_000, "it is given");
            assert!(sizes.flows >= FIRST_FLOWS);
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
            let sizes = Sizes { max_memory: Some(150 << 20), ..Sizes::default() };
            sizes.resolve(Some(4 * GB), cpus, &Conntrack::default()).unwrap()
        };
        let (few, many) = (of(cpus(8)), of(Cpus { online: 8, possible: 128 }));
        assert!(many.services < few.services, "{many:?}");
    }

    #[test]
    fn max_memory_beyond_all_ceilings_changes_nothing() {
        let sizes = Sizes { max_memory: Some(64 * GB), ..Sizes::default() };
        let plain = Sizes::default().resolve(Some(64 * GB), cpus(8), &Conntrack::default()).unwrap();
        assert_eq!(sizes.resolve(Some(64 * GB), cpus(8), &Conntrack::default()).unwrap(), plain);
    }
}
