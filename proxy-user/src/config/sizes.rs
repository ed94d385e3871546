//! Sizes of the maps.

use proxy_common::map_names;

use crate::programs::Capacities;

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
            pub connect_latency: bool,
        }

        impl Sizes {
            /// Returns the sizes for a node with this memory in bytes; `None`: the size of the memory is not known.
            pub fn resolve(self, memory: Option<u64>) -> Capacities {
                let by_memory = growth(memory);
                Capacities {
                    $($capacity: self.$capacity.unwrap_or_else(|| {
                        map_names::$default * if $grows { by_memory } else { 1 }
                    }),)+
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
    flows is DEFAULT_FLOWS, false;
    sockets is DEFAULT_SOCKETS, false;
    source_ranges is DEFAULT_SRC_RANGES, false;
}

/// Returns the factor by which the maps of Services are larger than by default. Their memory is allocated at once: 200
/// bytes for each address, 60 for each endpoint, 40 for each Service port and CPU. So they take less than 1 % of the
/// memory of a node of up to 64 CPUs.
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
        let sizes = Sizes::default().resolve(memory);
        let plain = Capacities::default();
        assert_eq!(
            [sizes.services, sizes.frontends, sizes.slots, sizes.backends],
            [plain.services, plain.frontends, plain.slots, plain.backends].map(|size| size * times)
        );
        assert_eq!((sizes.flows, sizes.sockets), (plain.flows, plain.sockets));
    }

    #[test]
    fn what_the_operator_says_holds() {
        let args = Sizes { backends: Some(1000), flows: Some(2000), ..Sizes::default() };
        let sizes = args.resolve(Some(64 * GB));
        assert_eq!((sizes.backends, sizes.flows), (1000, 2000));
        assert_eq!(sizes.services, 4 * map_names::DEFAULT_SERVICES);
    }

    /// The maps whose memory is allocated at once: both `services`, `slots`, both `backends`, `backend_stats`, `service_stats`.
    #[test]
    fn growth_takes_less_than_a_hundredth_of_the_memory() {
        for (memory, cpus) in [(12 * GB, 16), (48 * GB, 64)] {
            let sizes = Sizes::default().resolve(Some(memory));
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
