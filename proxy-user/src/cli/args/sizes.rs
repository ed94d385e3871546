//! Sizes of the maps.

use proxy_common::map_names;

use crate::cli::value;
use crate::programs::Capacities;

/// One flag for each: what it counts, its field here and among the capacities, its variable, its default.
macro_rules! sizes {
    ($($(#[doc = $doc:literal])+ $name:ident is $capacity:ident, $variable:literal, $default:ident;)+) => {
        /// How large the maps are.
        #[derive(Clone, Copy, Debug, clap::Args)]
        pub struct SizeArgs {
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $variable, value_name = "N", default_value_t = map_names::$default,
                    value_parser = value::capacity, help_heading = "Sizes")]
                pub $name: u32,
            )+
        }

        impl From<SizeArgs> for Capacities {
            fn from(args: SizeArgs) -> Self {
                Self { $($capacity: args.$name,)+ ..Self::default() }
            }
        }
    };
}

sizes! {
    /// How many Service ports there may be (each address family counts).
    max_services is services, "BALLAST_MAX_SERVICES", DEFAULT_SERVICES;
    /// How many addresses of Services there may be, in each address family.
    max_frontends is frontends, "BALLAST_MAX_FRONTENDS", DEFAULT_FRONTENDS;
    /// How many endpoints all addresses together may list. A change needs room for the old and the new list.
    max_slots is slots, "BALLAST_MAX_SLOTS", DEFAULT_SLOTS;
    /// How many endpoints there may be; one that stands behind two Service ports counts twice.
    max_backends is backends, "BALLAST_MAX_BACKENDS", DEFAULT_BACKENDS;
    /// How many connections the packet path follows, in each address family.
    max_flows is flows, "BALLAST_MAX_FLOWS", DEFAULT_FLOWS;
    /// How many sockets are remembered, in each address family.
    max_sockets is sockets, "BALLAST_MAX_SOCKETS", DEFAULT_SOCKETS;
}
