//! Sizes of the maps.

use proxy_common::flow::MAX_FLOWS;
use proxy_common::map_names;

use crate::model::settings::Conntrack;
use crate::programs::Capacities;

/// kube-proxy's default of `conntrack.maxPerCore`.
const MAX_PER_CORE: u32 = 32_768;

/// The memory in bytes from which on the maps of Services are twice as large as by default, and four times as large.
const LARGER: [u64; 2] = [12 << 30, 48 << 30];

/// Defines the size of each map: its name among the capacities, its default, and whether the default grows with the
/// node's memory.
macro_rules! sizes {
    ($($capacity:ident is $default:ident, $grows:literal;)+) => {
        /// The requested sizes of the maps; `None`: the default.
        #[derive(Clone, Copy, Debug, Default)]
        #[expect(missing_docs, reason = "the capacities of these names tell")]
        pub struct Sizes {
            $(pub $capacity: Option<u32>,)+
            pub flows: Option<u32>,
            pub connect_latency: bool,
        }

        impl Sizes {
            /// Returns the sizes for a node with this memory in bytes (`None`: it is not known) and this number of cores,
            /// with these settings of kube-proxy.
            pub fn resolve(self, memory: Option<u64>, cores: u32, conntrack: &Conntrack) -> Capacities {
                let by_memory = growth(memory);
                Capacities {
                    $($capacity: self.$capacity.unwrap_or_else(|| {
                        map_names::$default * if $grows { by_memory } else { 1 }
                    }),)+
                    flows: self.flows.unwrap_or_else(|| flows(memory, cores, conntrack)),
                    by_memory,
                    connect_latency: self.connect_latency,
                    ..Capacities::default()
                }
            }
        }
    };
}

sizes! {
    services is DEFAULT_SERVICES, true;
    frontends is DEFAULT_FRONTENDS, true;
    slots is DEFAULT_SLOTS, true;
    maglev_words is DEFAULT_MAGLEV_WORDS, false;
    backends is DEFAULT_BACKENDS, true;
    sockets is DEFAULT_SOCKETS, false;
    source_ranges is DEFAULT_SRC_RANGES, false;
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
    let scaled = conntrack.max_per_core.unwrap_or(MAX_PER_CORE).saturating_mul(cores).min(MOST_BY_CORES);
    let wanted = scaled.max(conntrack.min.unwrap_or(map_names::DEFAULT_FLOWS)).min(MAX_FLOWS);
    if given {
        return wanted.max(map_names::FIRST_FLOWS);
    }
    let affordable = memory.unwrap_or_default() / FLOW_PART / FLOW_BYTES;
    wanted.min(u32::try_from(affordable).unwrap_or(u32::MAX)).max(map_names::DEFAULT_FLOWS)
}

/// Returns the factor by which the maps of Services may be larger than by default. If they are full, they take 200 bytes for
/// each address, 60 for each endpoint, 40 for each Service port and CPU: less than 1 % of the memory of a node of up to 64
/// CPUs.
fn growth(memory: Option<u64>) -> u32 {
    let bytes = memory.unwrap_or_default();
    LARGER.iter().fold(1, |times, from| if bytes >= *from { 2 * times } else { times })
}

#[cfg(test)]
mod tests {
    use proxy_common::stats::ServiceStats;
    use rstest::rstest;

    use super::*;

    const GB: u64 = 1 << 30;

    #[rstest]
    #[case::unknown(None, 1)]
    #[case::small(Some(2 * GB), 1)]
    #[case::below(Some(12 * GB - 1), 1)]
    #[case::twice(Some(12 * GB), 2)]
    #[case::four_times(Some(48 * GB), 4)]
    #[case::never_more(Some(2048 * GB), 4)]
    fn maps_of_services_grow_with_the_memory(#[case] memory: Option<u64>, #[case] times: u32) {
        let sizes = Sizes::default().resolve(memory, 2, &Conntrack::default());
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
        assert_eq!(Sizes::default().resolve(memory, cores, &conntrack).flows, flows);
        let given = Sizes { flows: Some(1_000), ..Sizes::default() };
        assert_eq!(given.resolve(memory, cores, &conntrack).flows, 1_000);
    }

    #[test]
    fn what_the_operator_says_holds() {
        let args = Sizes { backends: Some(1000), flows: Some(2000), ..Sizes::default() };
        let sizes = args.resolve(Some(64 * GB), 2, &Conntrack::default());
        assert_eq!((sizes.backends, sizes.flows), (1000, 2000));
        assert_eq!(sizes.services, 4 * map_names::DEFAULT_SERVICES);
    }

    /// The maps whose memory is allocated at once: both `services`, `slots`, both `backends`, `backend_stats`, `service_stats`.
    #[test]
    fn growth_takes_less_than_a_hundredth_of_the_memory() {
        for (memory, cpus) in [(12 * GB, 16), (48 * GB, 64)] {
            let sizes = Sizes::default().resolve(Some(memory), 2, &Conntrack::default());
            let [slots, backends] = [sizes.slots, sizes.backends].map(u64::from);
            let [services, frontends] = [sizes.services, sizes.frontends].map(u64::from);
            let bytes = frontends * 200
                + slots * 8
                + backends * (16 + 28 + 8)
                + services * cpus * size_of::<ServiceStats>() as u64;
            assert!(bytes < memory / 100, "{bytes} bytes of {memory}");
        }
    }
}
