//! The machine that the agent runs on, as the kernel describes it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proxy_common::config::PortRange;

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
    pub has_kube_proxy_rules: bool,
    /// Ports that the kernel gives to sockets (`net.ipv4.ip_local_port_range`); `None`: not known.
    pub local_ports: Option<PortRange>,
}

impl HostView {
    /// All addresses that other machines may know, of every device.
    pub fn addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.devices.values().flat_map(|device| &device.addresses).filter(|address| !address.is_loopback())
    }
}

/// What kind of device it is, as far as that says who is behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// A NIC: the kernel names no link kind, or one of real hardware.
    Physical,
    /// Several NICs as one: bond, team, HSR.
    Bond,
    /// It shares another device, its parent: VLAN, macvlan, ipvlan, `MACsec`.
    Stacked,
    /// It wraps packets for other machines: VXLAN, Geneve, GRE, IP-in-IP, `WireGuard`, XFRM, PPP.
    Tunnel,
    /// A bridge, which packets between its ports do not pass.
    Bridge,
    /// One end of a cable to a network namespace: veth, netkit.
    Veth,
    /// A process reads and writes its packets: tun, tap. Mostly a virtual machine.
    Tun,
    /// The loopback device.
    Loopback,
    /// It holds addresses, and no packet comes in by it.
    Dummy,
    /// Anything else: ports of Open vSwitch, VRFs.
    #[default]
    Other,
}

impl DeviceKind {
    /// Software makes it for one container or virtual machine.
    pub const fn is_virtual(self) -> bool {
        matches!(self, Self::Veth | Self::Tun)
    }
}

/// What the operator says of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceRole {
    /// Nothing: its kind, routes and addresses decide.
    #[default]
    Guessed,
    /// Other machines are behind it (`--uplinks`).
    Uplink,
    /// Pods and virtual machines of this node are (`--local-devices`).
    Local,
}

/// A network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostDevice {
    /// Its name.
    pub name: String,
    /// What the operator says of it.
    pub role: DeviceRole,
    /// Its packets have no link-layer header.
    pub no_header: bool,
    /// What kind of device it is.
    pub kind: DeviceKind,
    /// The device whose packets it carries apart: that of a VLAN, macvlan or ipvlan.
    pub parent: Option<u32>,
    /// The bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// Its addresses, without link-local ones.
    pub addresses: BTreeSet<IpAddr>,
    /// The addresses whose prefix makes a connected subnet: shorter than /32 or /128.
    pub in_subnets: BTreeSet<IpAddr>,
}

/// A route to everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The device that it leads over.
    pub device: u32,
    /// The address that packets from here have, as far as the route or its device says.
    pub source: Option<IpAddr>,
}
