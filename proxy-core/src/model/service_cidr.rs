//! Ranges of Service addresses.

use ipnet::IpNet;

/// A `ServiceCIDR`: the cluster gives addresses in its ranges to Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    /// Its name.
    pub name: String,
    /// Its ranges, at most one of each family.
    pub ranges: Vec<IpNet>,
}
