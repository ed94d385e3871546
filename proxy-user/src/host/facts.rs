//! Reads the state of this machine that Services depend on: devices, addresses, default routes, and the rules of another proxy.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ipnet::IpNet;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use super::cgroup;
use super::devices::Device;
use super::netfilter::kube_proxy_rules::KubeProxyRules;
use super::netfilter::masquerade::Masquerade;
use super::netlink::Netlink;
use super::seen::{Entry, Present};
use super::selection::Pattern;
use super::xfrm;
use super::{lock, ports};
use proxy_core::model::net::IpFamily;
use proxy_core::model::{DefaultRoute, DeviceKind, DeviceRole, HostDevice, HostView};

/// `RT_TABLE_LOCAL` (include/uapi/linux/rtnetlink.h).
const RT_TABLE_LOCAL: u8 = 255;
/// The size of tables of `iptables-legacy` in bytes above which they are read rarely.
const LARGE: usize = 1 << 20;
/// `SO_NETNS_COOKIE` (include/uapi/asm-generic/socket.h, Linux 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The settings with which the state of the machine is read.
#[derive(Clone, Debug, Default)]
pub struct HostFacts {
    /// Patterns of uplinks, in addition to those that are found.
    pub uplinks: Vec<Pattern>,
    /// Patterns of local devices (behind them are only pods and virtual machines of this node), whatever else is known.
    pub local_devices: Vec<Pattern>,
    /// The loopback device shall accept packets of this node's own addresses (`accept_local`), by which the programs give
    /// packets to the stack.
    pub opens_loopback: bool,
    /// The rule by which netfilter masquerades; `None`: netfilter is not touched.
    pub masquerade: Option<Masquerade>,
    /// Who ends sockets of pods; `None`: not known.
    pub sockets: Option<EndsSockets>,
    /// The cgroup to which the socket programs are attached; `None`: the cgroups of pods are not looked for.
    pub cgroup: Option<PathBuf>,
}

/// Who ends connected UDP sockets of pods whose endpoint is removed.
#[derive(Clone, Debug)]
pub enum EndsSockets {
    /// `ballast end-udp-sockets`, which locks this folder while it succeeds.
    Helper(PathBuf),
    /// This agent; whether its last attempt has failed.
    Agent(Arc<AtomicBool>),
}

impl EndsSockets {
    fn fails(&self) -> bool {
        match self {
            Self::Helper(folder) => !lock::is_held(folder),
            Self::Agent(fails) => fails.load(Ordering::Relaxed),
        }
    }
}

impl HostFacts {
    /// Reads `what`; the rest is copied from `known`. Blocks for a few milliseconds, and longer if there are many routes
    /// and `what` includes them.
    pub(super) fn read(&self, host: &Host, known: &HostView, what: FactsToRead) -> io::Result<HostView> {
        let Host { devices, addresses } = host;
        let mut on_devices = Addresses::new();
        for (device, own) in addresses.iter() {
            on_devices.entry(*device).or_default().push(*own);
        }
        let addresses = on_devices;
        let (defaults, local_routes) = if what.routes {
            match routes(&mut Netlink::open()?, &addresses) {
                // Changes have interrupted each attempt; there are notifications of changes, or the next period.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    (known.defaults.clone(), known.local_routes.clone())
                }
                found => found?,
            }
        } else {
            (known.defaults.clone(), known.local_routes.clone())
        };
        let devices = devices.iter().map(|device| self.device(device, &addresses)).collect();
        let (has_kube_proxy_rules, masquerades, pod_cgroups, pod_sockets_stay) = if what.unnotified {
            // What cannot be read is as it was: without these, connections of another proxy would be reset.
            let are_rules_due =
                what.large_tables || are_rules_cheap(known.has_kube_proxy_rules, KubeProxyRules::legacy_size);
            let has_rules = match are_rules_due.then(KubeProxyRules::read) {
                Some(Ok(found)) if found.may_have_connections() => true,
                Some(Ok(found)) if !found.is_incomplete => false,
                Some(_) | None => known.has_kube_proxy_rules,
            };
            let pod_cgroups = match self.cgroup.as_deref().map(cgroup::of_pods) {
                Some(found) => found.unwrap_or(known.pod_cgroups),
                None => Default::default(),
            };
            let stay = self.sockets.as_ref().is_some_and(EndsSockets::fails);
            (has_rules, self.masquerades(&known.masquerades), pod_cgroups, stay)
        } else {
            let masquerades = known.masquerades.clone();
            (known.has_kube_proxy_rules, masquerades, known.pod_cgroups, known.pod_sockets_stay)
        };
        // At the start, nothing is known: sockets of this namespace would count as those of others.
        let netns_cookie = match netns_cookie() {
            Err(_) if known.netns_cookie != 0 => known.netns_cookie,
            found => found?,
        };
        let local_ports = ports::local().unwrap_or_else(|| known.local_ports.clone());
        let loopback_is_closed = !xfrm::is_loopback_open(self.opens_loopback);
        let is_interrupted = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
        let policies = match xfrm::policies() {
            Err(error) if is_interrupted(&error) => known.ipsec.keys().copied().collect(),
            found => found?,
        };
        let (has_policy_routes, mark_routes) = match policy_routes() {
            Err(error) if is_interrupted(&error) => (known.has_policy_routes, known.mark_routes.clone()),
            found => found?,
        };
        let mut ipsec: BTreeMap<_, _> = policies.into_iter().map(|policy| (policy, true)).collect();
        let missed = known.ipsec.iter().filter(|(_, is_found)| **is_found);
        let missed: Vec<_> = missed.map(|(policy, _)| *policy).collect();
        for policy in missed {
            ipsec.entry(policy).or_insert(false);
        }
        Ok(HostView {
            devices,
            leftovers: BTreeSet::new(),
            pod_cgroups,
            defaults,
            local_routes,
            netns_cookie,
            has_kube_proxy_rules,
            local_ports,
            ipsec,
            has_policy_routes,
            mark_routes,
            masquerades,
            pod_sockets_stay,
            loopback_is_closed,
        })
    }

    /// Creates the rule of netfilter that masquerades, if it is wanted and missing; returns the families that have one; `known` if
    /// the rules cannot be read.
    fn masquerades(&self, known: &BTreeSet<IpFamily>) -> BTreeSet<IpFamily> {
        let Some(masquerade) = &self.masquerade else { return BTreeSet::new() };
        let families = masquerade.ensure().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the rules of netfilter");
            known.clone()
        });
        if masquerade.is_wanted() { families } else { BTreeSet::new() }
    }

    fn device(&self, device: &Device, addresses: &Addresses) -> (u32, HostDevice) {
        let Device { ifindex, ref name, kind, no_header, ethernet, is_down, mac, master, below, .. } =
            *device;
        let is_here = below.is_some() && !device.below_elsewhere;
        let own = || addresses.get(&ifindex).into_iter().flatten();
        let is_among = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
        let role = if is_among(&self.local_devices) {
            DeviceRole::Local
        } else if is_among(&self.uplinks) {
            DeviceRole::Uplink
        } else {
            DeviceRole::Guessed
        };
        let host = HostDevice {
            role,
            no_header,
            unknown_header: !ethernet && !no_header,
            is_down,
            mac,
            kind,
            parent: below.filter(|_| kind == DeviceKind::Stacked),
            both_ends: kind == DeviceKind::Veth && is_here,
            master,
            addresses: own().map(|own| own.address).collect(),
            masquerade: [false, true].into_iter().filter_map(|is_v6| source(own(), is_v6)).collect(),
            subnets: own().filter_map(Own::subnet).collect(),
            name: name.clone(),
        };
        (ifindex, host)
    }
}

/// Whether the rules of netfilter are read each time. Tables of `iptables-legacy` above [`LARGE`] make it rare while the rules
/// of another proxy are known.
fn are_rules_cheap(known: bool, legacy_size: impl FnOnce() -> usize) -> bool {
    !known || legacy_size() <= LARGE
}

/// Returns whether rules for routes make a difference, and the families in which packets with a mark have routes of their own.
fn policy_routes() -> io::Result<(bool, BTreeSet<IpFamily>)> {
    let rules = match Netlink::open()?.dump(RouteNetlinkMessage::GetRule(RuleMessage::default())) {
        // A kernel without CONFIG_IP_MULTIPLE_TABLES.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Vec::new(),
        found => found?,
    };
    let rule = |answer| if let RouteNetlinkMessage::NewRule(rule) = answer { Some(rule) } else { None };
    let rules: Vec<_> = rules.into_iter().filter_map(rule).collect();
    let mut families = BTreeSet::new();
    for (family, table) in rules.iter().filter_map(of_mark) {
        if routes_packets(family, table)? {
            families.insert(family);
        }
    }
    Ok((!rules.iter().all(is_kernels), families))
}

/// Whether a rule makes no difference: it is one of the kernel's own three (tables local, main, default), or only names one of
/// these tables.
fn is_kernels(rule: &RuleMessage) -> bool {
    let RuleHeader { src_len, dst_len, table, .. } = rule.header;
    let selects = rule.attributes.iter().any(|attribute| {
        matches!(attribute, RuleAttribute::FwMark(_) | RuleAttribute::Iifname(_) | RuleAttribute::Oifname(_))
    });
    src_len == 0 && dst_len == 0 && !selects && matches!(table, 253..=255)
}

/// Returns the family and the table of a rule that sends packets with a mark to a table besides the kernel's own three.
fn of_mark(rule: &RuleMessage) -> Option<(IpFamily, u32)> {
    let has_mark = rule.attributes.iter().any(|one| matches!(one, RuleAttribute::FwMark(mark) if *mark != 0));
    let given = rule.attributes.iter().find_map(|one| match one {
        RuleAttribute::Table(table) => Some(*table),
        _ => None,
    });
    let table = given.unwrap_or_else(|| rule.header.table.into());
    let is_sent = rule.header.action == RuleAction::ToTable && !rule.header.flags.contains(RuleFlags::Invert);
    let family = match rule.header.family {
        AddressFamily::Inet => IpFamily::V4,
        AddressFamily::Inet6 => IpFamily::V6,
        _ => return None,
    };
    (has_mark && is_sent && !matches!(table, 0 | 253..=255)).then_some((family, table))
}

/// Whether a table has routes to other machines. Those of transparent proxies have only local routes.
fn routes_packets(family: IpFamily, table: u32) -> io::Result<bool> {
    let mut request = RouteMessage::default();
    request.header.address_family = match family {
        IpFamily::V4 => AddressFamily::Inet,
        IpFamily::V6 => AddressFamily::Inet6,
    };
    request.attributes.push(RouteAttribute::Table(table));
    let routes = |answer: &_| match answer {
        RouteNetlinkMessage::NewRoute(route) => route.header.kind == RouteType::Unicast,
        _ => false,
    };
    match Netlink::open_strict()?.dump_some(RouteNetlinkMessage::GetRoute(request), routes) {
        // The table is empty.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        found => Ok(!found?.is_empty()),
    }
}

/// The devices and addresses that are there.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub devices: Present<Device>,
    pub addresses: Present<Placed>,
}

/// What is read in addition to devices and addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FactsToRead {
    /// The default routes and the routes of local addresses, for which all routes are read.
    pub routes: bool,
    /// What the follower gets no notification of: the rules of netfilter, and the cgroups of pods.
    pub unnotified: bool,
    /// With `unnotified`: rules of another proxy that are known, in large tables of `iptables-legacy`.
    pub large_tables: bool,
}

impl FactsToRead {
    /// Reads everything.
    pub const ALL: Self = Self { routes: true, unnotified: true, large_tables: true };
}

/// Whether a route is a default route of the main table.
pub(super) fn is_default_route(header: &RouteHeader) -> bool {
    header.destination_prefix_length == 0 && header.table == RouteHeader::RT_TABLE_MAIN
}

/// Whether a route makes addresses local (`ip route add local`, and the kernel's own for each address).
pub(super) fn is_local_route(header: &RouteHeader) -> bool {
    header.kind == RouteType::Local && header.table == RT_TABLE_LOCAL
}

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Own {
    pub address: IpAddr,
    secondary: bool,
    /// No new connection should have this source (`preferred_lft 0`).
    deprecated: bool,
    prefix: u8,
}

impl Own {
    /// Returns the address with its prefix, if that is shorter than the address.
    fn subnet(&self) -> Option<IpNet> {
        IpNet::new(self.address, self.prefix).ok().filter(|net| net.prefix_len() < net.max_prefix_len())
    }
}

/// Returns the address of a device that its packets should have as source: the first one, but an address that is deprecated, or
/// of no subnet, only if there is no other. Load balancers add such addresses (kube-vip, keepalived), and they may move to
/// another node.
fn source<'a>(own: impl Iterator<Item = &'a Own>, is_v6: bool) -> Option<IpAddr> {
    let of_family = own.filter(|own| own.address.is_ipv6() == is_v6 && !own.secondary);
    of_family.min_by_key(|own| (own.deprecated, own.subnet().is_none())).map(|own| own.address)
}

/// The addresses by index of the device, in the kernel's order.
type Addresses = BTreeMap<u32, Vec<Own>>;

/// An address, and the index of its device.
pub(super) type Placed = (u32, Own);

impl Entry for Placed {
    type Key = (u32, IpAddr);

    fn key(&self) -> (u32, IpAddr) {
        (self.0, self.1.address)
    }
}

/// Returns all addresses that count, in the kernel's order.
pub(super) fn addresses() -> io::Result<Vec<Placed>> {
    let answers = Netlink::open()?.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
    let placed = |answer: &_| match answer {
        RouteNetlinkMessage::NewAddress(message) => place(message),
        _ => None,
    };
    Ok(answers.iter().filter_map(placed).collect())
}

/// Returns the address of a message of the kernel, if it counts.
pub(super) fn place(message: &AddressMessage) -> Option<Placed> {
    read_address(message).map(|own| (message.header.index, own))
}

/// Returns the address; `None` for a link-local address, and for an IPv6 address that is not usable (yet).
fn read_address(message: &AddressMessage) -> Option<Own> {
    let (mut own, mut shown) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            // `Address` of a point-to-point device is the address of the other end; `Local` is the device's own address.
            AddressAttribute::Address(address) => shown = Some(*address),
            AddressAttribute::Local(address) => own = Some(*address),
            _ => {}
        }
    }
    let address = own.or(shown)?;
    let flags = message.header.flags;
    let usable = match address {
        IpAddr::V4(v4) => !v4.is_link_local(),
        IpAddr::V6(v6) => {
            !v6.is_unicast_link_local()
                && !flags.intersects(AddressHeaderFlags::Dadfailed | AddressHeaderFlags::Tentative)
        }
    };
    let secondary = flags.contains(AddressHeaderFlags::Secondary);
    let deprecated = flags.contains(AddressHeaderFlags::Deprecated);
    usable.then_some(Own { address, secondary, deprecated, prefix: message.header.prefix_len })
}

/// Returns the default routes in the order of their metrics, and the ranges that are local by a route alone.
fn routes(netlink: &mut Netlink, addresses: &Addresses) -> io::Result<(Vec<DefaultRoute>, BTreeSet<IpNet>)> {
    let matters = |answer: &_| match answer {
        RouteNetlinkMessage::NewRoute(RouteMessage { header, .. }) => {
            is_default_route(header) || is_local_route(header)
        }
        _ => false,
    };
    let answers = netlink.dump_some(RouteNetlinkMessage::GetRoute(RouteMessage::default()), matters)?;
    let own = addresses.values().flatten().map(|own| own.address).collect();
    let (mut defaults, mut local) = (Vec::new(), BTreeSet::new());
    for answer in answers {
        if let RouteNetlinkMessage::NewRoute(route) = answer {
            defaults.extend(read_route(&route, addresses));
            local.extend(read_local(&route, &own));
        }
    }
    defaults.sort_by_key(|(metric, _)| *metric);
    Ok((defaults.into_iter().map(|(_, route)| route).collect(), local))
}

/// Returns the range of a route of local addresses, unless it is an address of a device (`own`), a loopback or a link-local
/// one.
fn read_local(message: &RouteMessage, own: &BTreeSet<IpAddr>) -> Option<IpNet> {
    if !is_local_route(&message.header) {
        return None;
    }
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })?;
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let range = IpNet::new(address, message.header.destination_prefix_length).ok()?;
    let is_devices = range.prefix_len() == range.max_prefix_len() && own.contains(&address);
    (!is_link_local && !is_devices && !address.is_loopback()).then_some(range)
}

/// Returns metric and route for each device of the route; nothing if it is not a default route.
fn read_route(message: &RouteMessage, addresses: &Addresses) -> Vec<(u32, DefaultRoute)> {
    let RouteHeader { kind, address_family, .. } = message.header;
    if !is_default_route(&message.header) || kind != RouteType::Unicast {
        return Vec::new();
    }
    let is_v6 = address_family == AddressFamily::Inet6;
    let (mut metric, mut source, mut devices) = (0, None, Vec::new());
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(device) => devices.push(*device),
            RouteAttribute::MultiPath(hops) => devices.extend(hops.iter().map(|hop| hop.interface_index)),
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::PrefSource(RouteAddress::Inet(address)) => source = Some(IpAddr::V4(*address)),
            RouteAttribute::PrefSource(RouteAddress::Inet6(address)) => source = Some(IpAddr::V6(*address)),
            _ => {}
        }
    }
    let of_device = |device: u32| self::source(addresses.get(&device).into_iter().flatten(), is_v6);
    devices
        .into_iter()
        .map(|device| (metric, DefaultRoute { device, source: source.or_else(|| of_device(device)) }))
        .collect()
}

/// Returns the cookie of this thread's network namespace. The socket takes no port: all may be in use.
fn netns_cookie() -> io::Result<u64> {
    let socket = UnixDatagram::unbound()?;
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `cookie`; `length` is the size of `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests;
