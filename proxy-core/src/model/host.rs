//! The machine that the agent runs on, as the kernel describes it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::config::{POD_CGROUPS, PortRange};

use super::net::IpFamily;

/// The device of kube-proxy's ipvs mode, which holds addresses of Services.
pub const IPVS_DEVICE: &str = "kube-ipvs0";
/// Devices that other proxies create for addresses of Services: kube-proxy's ipvs mode, kube-router.
pub const PROXY_DEVICES: [&str; 2] = [IPVS_DEVICE, "kube-dummy-if"];

/// Devices, addresses and default routes of the agent's network namespace.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, in every combination")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostView {
    /// Its devices, by index.
    pub devices: BTreeMap<u32, HostDevice>,
    /// Names of devices on which another proxy has left addresses of Services; [`Cluster`] finds them, and removes their
    /// addresses.
    ///
    /// [`Cluster`]: super::Cluster
    pub leftovers: BTreeSet<String>,
    /// Its default routes, the preferred one of each family first.
    pub defaults: Vec<DefaultRoute>,
    /// Ranges of addresses that are local by a route and not by a device, without loopback and link-local addresses.
    pub local_routes: BTreeSet<IpNet>,
    /// The cookie of the namespace; 0 if the kernel has none (before Linux 5.14).
    pub netns_cookie: u64,
    /// Ids of the cgroups below which the kubelet puts the cgroups of pods; unused places are 0.
    pub pod_cgroups: [u64; POD_CGROUPS],
    /// Another proxy's rules are in netfilter, or were recently: netfilter may translate existing connections.
    pub has_kube_proxy_rules: bool,
    /// Local ports that the kernel gives to sockets (`net.ipv4.ip_local_port_range` without
    /// `net.ipv4.ip_local_reserved_ports`); empty: not known.
    pub local_ports: Vec<PortRange>,
    /// The IPsec policies of the kernel for outgoing packets; false: the last read did not find the policy, and a second one
    /// removes it.
    pub ipsec: BTreeMap<IpsecPolicy, bool>,
    /// The kernel has rules for routes besides its own three (`ip rule`).
    pub has_policy_routes: bool,
    /// The families in which packets with a mark have routes of their own (`ip rule fwmark`), to other machines.
    pub mark_routes: BTreeSet<IpFamily>,
    /// The families in which netfilter masquerades the packets that the programs mark.
    pub masquerades: BTreeSet<IpFamily>,
    /// No process on this node ends connected UDP sockets of pods whose endpoint is removed.
    pub pod_sockets_stay: bool,
    /// The kernel drops packets of this node's own addresses that arrive on the loopback device (`accept_local` is off, and
    /// could not be set).
    pub loopback_is_closed: bool,
}

/// An IPsec policy (xfrm) for outgoing packets, by which the kernel encrypts, blocks or allows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IpsecPolicy {
    /// Source addresses of the packets.
    pub src: IpNet,
    /// Destination addresses of the packets, of the same family.
    pub dst: IpNet,
}

impl HostView {
    /// Returns the addresses of all devices, without loopback addresses.
    pub fn addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.devices.values().flat_map(|device| &device.addresses).filter(|address| !address.is_loopback())
    }
}

/// The kind of a device, as far as it indicates which machines are behind the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// A NIC: the kernel reports no link kind, or one of real hardware.
    Physical,
    /// Several NICs as one: bond, team, HSR.
    Bond,
    /// A device on top of another device, its parent: VLAN, macvlan, ipvlan, `MACsec`.
    Stacked,
    /// A device that encapsulates packets for other machines: VXLAN, Geneve, GRE, IP-in-IP, `WireGuard`, XFRM, PPP.
    Tunnel,
    /// A bridge; packets between its ports do not pass this device.
    Bridge,
    /// One end of a device pair that leads to a network namespace: veth, netkit.
    Veth,
    /// A device whose packets a process reads and writes, mostly for a virtual machine: tun, tap.
    Tun,
    /// The loopback device.
    Loopback,
    /// A device that holds addresses, and on which no packet arrives.
    Dummy,
    /// Anything else: ports of Open vSwitch, VRFs.
    #[default]
    Other,
}

impl DeviceKind {
    /// Whether the device is created by software for one container or virtual machine.
    pub const fn is_virtual(self) -> bool {
        matches!(self, Self::Veth | Self::Tun)
    }
}

/// The role that the operator gives to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceRole {
    /// None: the device's kind, routes and addresses determine the role.
    #[default]
    Guessed,
    /// Other machines are behind the device (`--uplinks`).
    Uplink,
    /// Pods and virtual machines of this node are behind the device (`--local-devices`).
    Local,
}

/// A network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that go with each other in every combination")]
pub struct HostDevice {
    /// Its name.
    pub name: String,
    /// The role that the operator gives to it.
    pub role: DeviceRole,
    /// Its packets have no link-layer header.
    pub no_header: bool,
    /// Its packets have a link-layer header that the programs do not know (IP over InfiniBand): it gets no programs.
    pub unknown_header: bool,
    /// It is switched off. A device without carrier is not: routes may still use it.
    pub is_down: bool,
    /// Its MAC address; 0 if it has none ([`proxy_common::node::mac`]).
    pub mac: u64,
    /// What kind of device it is.
    pub kind: DeviceKind,
    /// The parent device of a VLAN, macvlan or ipvlan.
    pub parent: Option<u32>,
    /// It is a veth whose other end is a device of this node, too: no pod is behind it.
    pub both_ends: bool,
    /// The bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// Its addresses, without link-local ones.
    pub addresses: BTreeSet<IpAddr>,
    /// The address in each family that netfilter's MASQUERADE chooses for packets that leave by the device: the first one
    /// that is no secondary address.
    pub masquerade: Vec<IpAddr>,
    /// The connected subnets: the addresses whose prefix is shorter than /32 or /128, with it.
    pub subnets: BTreeSet<IpNet>,
}

/// A default route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The index of its device.
    pub device: u32,
    /// The source address of this node's packets on the route, if the route or its device determines one.
    pub source: Option<IpAddr>,
}
