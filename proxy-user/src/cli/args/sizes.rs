//! Sizes of the maps.

use clap::builder::FalseyValueParser;

use crate::config::sizes::Sizes;
use crate::config::value;

/// One flag for each: what it counts, its field here and among the sizes, its variable.
macro_rules! sizes {
    ($($(#[doc = $doc:literal])+ $name:ident is $size:ident, $variable:literal;)+) => {
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

        impl From<SizeArgs> for Sizes {
            fn from(args: SizeArgs) -> Self {
                Self { $($size: args.$name,)+ connect_latency: args.connect_latency.unwrap_or_default() }
            }
        }
    };
}

sizes! {
    /// How many Service ports there may be (each address family counts). Default: 32768; twice as many from 12 GB of
    /// memory on, four times from 48 GB on.
    max_services is services, "BALLAST_MAX_SERVICES";
    /// How many addresses of Services there may be, in each address family. Default: 65536, more with the memory.
    max_frontends is frontends, "BALLAST_MAX_FRONTENDS";
    /// How many endpoints all addresses together may list. A change needs room for the old and the new list.
    /// Default: 524288, more with the memory.
    max_slots is slots, "BALLAST_MAX_SLOTS";
    /// Words of eight bytes for Maglev tables: one of five endpoints has 134 of them, one of a hundred some 4,150. A change
    /// needs room for the old and the new table.
    max_maglev_words is maglev_words, "BALLAST_MAX_MAGLEV_WORDS";
    /// How many endpoints there may be; one that stands behind two Service ports counts twice. Default: 262144, more
    /// with the memory.
    max_backends is backends, "BALLAST_MAX_BACKENDS";
    /// How many connections the packet path follows, in each address family. Default: 131072.
    max_flows is flows, "BALLAST_MAX_FLOWS";
    /// How many sockets are remembered, in each address family. Default: 131072.
    max_sockets is sockets, "BALLAST_MAX_SOCKETS";
}
