//! Sizes of the maps.

use clap::builder::FalseyValueParser;

use crate::config::sizes::Sizes;
use proxy_cli::value;

/// Defines one flag for each size: its help text, its field here and in `Sizes`, its environment variable.
macro_rules! sizes {
    ($($(#[doc = $doc:literal])+ $name:ident is $size:ident, $variable:literal;)+) => {
        /// How large the maps are.
        #[derive(Clone, Copy, Debug, Default, clap::Args)]
        pub struct SizeArgs {
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $variable, value_name = "N", value_parser = value::capacity, help_heading = "Map sizes")]
                pub $name: Option<u32>,
            )+
            /// Maximum memory of all maps together, when each has grown to its ceiling, as a number of bytes or with a suffix
            /// (`200Mi`, `1Gi`). The sizes that no flag gives are lowered until it suffices. Default: no limit but the sizes.
            #[arg(
                long, env = "BALLAST_MAX_MEMORY", value_name = "BYTES", value_parser = value::bytes,
                help_heading = "Map sizes"
            )]
            pub max_memory: Option<u64>,
            /// Measure how long endpoints take to answer a SYN, and count refused and retransmitted SYNs, by Service and endpoint
            /// (`ballast service show`, `ballast_connect_latency_seconds`). Costs memory (16 bytes for each flow, plus 4 MiB)
            /// and about 100 ns for each new connection.
            #[arg(
                long, env = "BALLAST_CONNECT_LATENCY", num_args = 0..=1, default_missing_value = "true",
                require_equals = true, value_parser = FalseyValueParser::new(), help_heading = "Map sizes"
            )]
            pub connect_latency: Option<bool>,
        }

        impl From<SizeArgs> for Sizes {
            fn from(args: SizeArgs) -> Self {
                Self {
                    $($size: args.$name,)+
                    memory: args.max_memory,
                    connect_latency: args.connect_latency.unwrap_or_default(),
                }
            }
        }
    };
}

sizes! {
    /// Maximum number of Service ports (each address family counts). Default: 32768; twice as many with at least 12 GiB of
    /// memory, four times as many with at least 48 GiB.
    max_services is services, "BALLAST_MAX_SERVICES";
    /// Maximum number of frontends (addresses and ports of Services), for each address family. Default: 65536, more on nodes
    /// with more memory.
    max_frontends is frontends, "BALLAST_MAX_FRONTENDS";
    /// Maximum number of slots: the endpoints of all frontends together. A change needs room for the old and the new slots of
    /// a frontend. Default: 524288, more on nodes with more memory.
    max_slots is slots, "BALLAST_MAX_SLOTS";
    /// Words of eight bytes for Maglev tables: a table of 5 endpoints takes 134 words, one of 100 endpoints about 2,100. A
    /// change needs room for the old and the new table.
    max_maglev_words is maglev_words, "BALLAST_MAX_MAGLEV_WORDS";
    /// Maximum number of backends; an endpoint of two Service ports counts twice. Default: 262144, more on nodes with more
    /// memory.
    max_backends is backends, "BALLAST_MAX_BACKENDS";
    /// Maximum number of flows (connections that the packet programs track), for each address family; the table grows up to
    /// it. Default: 32768 for each CPU, at least 131072, and at most a sixty-fourth of the memory; or kube-proxy's
    /// `conntrack.maxPerCore` and `conntrack.min`.
    max_flows is flows, "BALLAST_MAX_FLOWS";
    /// Maximum number of translated sockets that Ballast keeps, for each address family. Default: 131072.
    max_sockets is sockets, "BALLAST_MAX_SOCKETS";
    /// Maximum number of source ranges of load balancers, for each address family. Frontends with the same ranges share them;
    /// a change needs room for the old and the new ranges. Unused ones take no memory. Default: 65536.
    max_source_ranges is source_ranges, "BALLAST_MAX_SOURCE_RANGES";
}
