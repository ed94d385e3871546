//! Sizes of the maps.

use clap::builder::FalseyValueParser;
use proxy_common::map_names;

use crate::cli::value;
use crate::programs::Capacities;

/// Bytes of memory from which maps of Services are twice as large as by default, and four times.
const LARGER: [u64; 2] = [12 << 30, 48 << 30];

/// One flag for each: what it counts, its field here and among the capacities, its variable, its default, and whether
/// that grows with the node's memory.
macro_rules! sizes {
    ($($(#[doc = $doc:literal])+ $name:ident is $capacity:ident, $variable:literal, $default:ident, $grows:literal;)+) => {
        /// How large the maps are.
        #[derive(Clone, Copy, Debug, Default, clap::Args)]
        pub struct SizeArgs {
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $variable, value_name = "N", value_parser = value::capacity, help_heading = "Sizes")]
                pub $name: Option<u32>,
            )+
            /// Measure how long endpoints take to answer the SYN of a connection, and count those that are refused or sent again,
            /// by Service and endpoint (`ballast service show`, `ballast_connect_latency_seconds`). Costs memory (16 bytes a
            /// flow and 4 MiB) and some 100 ns for each new connection.
            #[arg(
                long, env = "BALLAST_CONNECT_LATENCY", num_args = 0..=1, default_missing_value = "true",
                require_equals = true, value_parser = FalseyValueParser::new(), help_heading = "Sizes"
            )]
            pub connect_latency: Option<bool>,
        }

        impl SizeArgs {
            /// Those that hold on a node with so many bytes of memory; `None`: nobody knows.
            pub fn in_force(self, memory: Option<u64>) -> Capacities {
                let by_memory = growth(memory);
                Capacities {
                    $($capacity: self.$name.unwrap_or_else(|| {
                        map_names::$default * if $grows { by_memory } else { 1 }
                    }),)+
                    by_memory,
                    connect_latency: self.connect_latency.unwrap_or_default(),
                    ..Capacities::default()
                }
            }
        }
    };
}

sizes! {
    /// How many Service ports there may be (each address family counts). Default: 32768; twice as many from 12 GB of
    /// memory on, four times from 48 GB on.
    max_services is services, "BALLAST_MAX_SERVICES", DEFAULT_SERVICES, true;
    /// How many addresses of Services there may be, in each address family. Default: 65536, more with the memory.
    max_frontends is frontends, "BALLAST_MAX_FRONTENDS", DEFAULT_FRONTENDS, true;
    /// How many endpoints all addresses together may list. A change needs room for the old and the new list.
    /// Default: 524288, more with the memory.
    max_slots is slots, "BALLAST_MAX_SLOTS", DEFAULT_SLOTS, true;
    /// Words of eight bytes for Maglev tables: one of five endpoints has 134 of them, one of a hundred some 4,150. A change
    /// needs room for the old and the new table.
    max_maglev_words is maglev_words, "BALLAST_MAX_MAGLEV_WORDS", DEFAULT_MAGLEV_WORDS, false;
    /// How many endpoints there may be; one that stands behind two Service ports counts twice. Default: 262144, more
    /// with the memory.
    max_backends is backends, "BALLAST_MAX_BACKENDS", DEFAULT_BACKENDS, true;
    /// How many connections the packet path follows, in each address family. Default: 131072.
    max_flows is flows, "BALLAST_MAX_FLOWS", DEFAULT_FLOWS, false;
    /// How many sockets are remembered, in each address family. Default: 131072.
    max_sockets is sockets, "BALLAST_MAX_SOCKETS", DEFAULT_SOCKETS, false;
}

/// How many times as large as by default the maps of Services are. Their memory is taken at
/// once: 200 bytes an address, 60 an endpoint, 40 a Service port and CPU. So they take less than 1 % of the memory of a
/// node of up to 64 CPUs.
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
        let sizes = SizeArgs::default().in_force(memory);
        let plain = Capacities::default();
        assert_eq!(
            [sizes.services, sizes.frontends, sizes.slots, sizes.backends],
            [plain.services, plain.frontends, plain.slots, plain.backends].map(|size| size * times)
        );
        assert_eq!((sizes.flows, sizes.sockets), (plain.flows, plain.sockets));
    }

    #[test]
    fn what_the_operator_says_holds() {
        let args = SizeArgs { max_backends: Some(1000), max_flows: Some(2000), ..SizeArgs::default() };
        let sizes = args.in_force(Some(64 * GB));
        assert_eq!((sizes.backends, sizes.flows), (1000, 2000));
        assert_eq!(sizes.services, 4 * map_names::DEFAULT_SERVICES);
    }

    /// What takes its memory at once: both `services`, `slots`, both `backends`, `backend_stats`, `service_stats`.
    #[test]
    fn growth_takes_less_than_a_hundredth_of_the_memory() {
        for (memory, cpus) in [(12 * GB, 16), (48 * GB, 64)] {
            let sizes = SizeArgs::default().in_force(Some(memory));
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
