//! The tables that the agent writes.

use std::net::IpAddr;

use ipnet::IpNet;

/// A map that this module writes.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    strum::Display,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub enum Table {
    /// IPv4 frontends.
    Services,
    /// IPv6 frontends.
    Services6,
    /// Extents of backend ids.
    Slots,
    /// IPv4 endpoints.
    Backends,
    /// IPv6 endpoints.
    Backends6,
    /// The prefilter: the bitmap that lets foreign packets pass.
    Prefilter,
    /// Maglev tables.
    Maglev,
    /// Names of Service ports.
    Names,
    /// IPv4 source ranges of load balancers.
    SrcRanges,
    /// IPv6 source ranges of load balancers.
    SrcRanges6,
    /// The IPv4 settings of this node.
    Node,
    /// The IPv6 settings of this node.
    Node6,
    /// IPv4 addresses of this node.
    NodeAddrs,
    /// IPv6 addresses of this node.
    NodeAddrs6,
    /// Other nodes, by number.
    Tunnels,
    /// Network devices.
    Devices,
    /// Settings of the programs.
    Config,
}

impl Table {
    /// All tables.
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Returns the table of frontends with such an address.
    pub const fn services(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Services,
            IpAddr::V6(_) => Self::Services6,
        }
    }

    /// Returns the table of endpoints with such an address.
    pub const fn backends(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Backends,
            IpAddr::V6(_) => Self::Backends6,
        }
    }

    /// Returns the table of this node's addresses of that family.
    pub const fn node_addrs(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::NodeAddrs,
            IpAddr::V6(_) => Self::NodeAddrs6,
        }
    }

    /// Returns the table of a source range.
    pub const fn source_ranges(range: IpNet) -> Self {
        match range {
            IpNet::V4(_) => Self::SrcRanges,
            IpNet::V6(_) => Self::SrcRanges6,
        }
    }

    /// Whether the table is an array, of which parts can be read.
    pub const fn is_array(self) -> bool {
        matches!(self, Self::Slots | Self::Backends | Self::Backends6 | Self::Prefilter | Self::Maglev)
    }

    /// Returns the name of the map.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the flag that sets the size of the table; empty if there is none.
    pub const fn setting(self) -> &'static str {
        match self {
            Self::Services | Self::Services6 => "--max-frontends",
            Self::Slots => "--max-slots",
            Self::Backends | Self::Backends6 => "--max-backends",
            Self::Maglev => "--max-maglev-words",
            Self::Names => "--max-services",
            Self::SrcRanges | Self::SrcRanges6 => "--max-source-ranges",
            Self::Prefilter
            | Self::Node
            | Self::Node6
            | Self::NodeAddrs
            | Self::NodeAddrs6
            | Self::Tunnels
            | Self::Devices
            | Self::Config => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_maps() {
        assert!(Table::ALL.iter().all(|table| proxy_common::map_names::ALL.contains(&table.name())));
    }
}
