//! The machine that the agent runs on, as the kernel describes it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Devices, addresses and default routes of the agent's network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostView {
    /// Its devices, by index.
    pub devices: BTreeMap<u32, HostDevice>,
    /// Its default routes, the preferred one of each family first.
    pub defaults: Vec<DefaultRoute>,
    /// The cookie of the namespace; 0 where the kernel has none (before Linux 5.14).
    pub netns_cookie: u64,
    /// Another proxy's rules are in netfilter, or were lately: connections may be there that it translates.
    pub has_old_proxy: bool,
}

impl HostView {
    /// All addresses that other machines may know, of every device.
    pub fn addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.devices.values().flat_map(|device| &device.addresses).filter(|address| !address.is_loopback())
    }
}

/// A network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostDevice {
    /// Its name.
    pub name: String,
    /// The operator says that the outside is behind it.
    pub uplink: bool,
    /// Its packets have no link-layer header.
    pub no_header: bool,
    /// It is a device that software makes for one machine or container: veth, tun, tap.
    pub is_virtual: bool,
    /// The device whose packets it carries apart: that of a VLAN, macvlan or ipvlan.
    pub parent: Option<u32>,
    /// The bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// Its addresses, without link-local ones.
    pub addresses: BTreeSet<IpAddr>,
}

/// A route to everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The device that it leads over.
    pub device: u32,
    /// The address that packets from here have, as far as the route or its device says.
    pub source: Option<IpAddr>,
}
