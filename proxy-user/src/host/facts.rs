//! What of this machine Services depend on: devices, addresses and default routes, followed as they change.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType};
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::mpsc::Sender;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::devices::{self, Device, Kind};
use super::manager::Background;
use super::netfilter::old_proxy::OldProxy;
use super::netlink::Netlink;
use super::selection::matches;
use crate::model::{DefaultRoute, Event, HostDevice, HostView};

/// A burst of changes makes one look.
const SETTLE: Duration = Duration::from_millis(50);
/// The look that needs no change.
const PERIOD: Duration = Duration::from_secs(10);
/// Between a failure and the next try.
const RETRY: Duration = Duration::from_secs(1);
/// What kube-proxy's ipvs mode leaves behind: it holds the addresses of Services, not the node's.
const IPVS_DEVICE: &str = "kube-ipvs0";
/// `SO_NETNS_COOKIE` (include/uapi/asm-generic/socket.h, Linux 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// How to look at the machine.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Patterns of devices that lead outside, beside those that are found.
    pub uplinks: Vec<String>,
}

impl Facts {
    /// Looks once. Blocks for a few milliseconds.
    pub fn look(&self) -> io::Result<HostView> {
        let mut netlink = Netlink::open()?;
        let addresses = addresses(&mut netlink)?;
        let defaults = default_routes(&mut netlink, &addresses)?;
        let devices = devices::list()?.into_iter().map(|device| self.device(device, &addresses)).collect();
        // Without the right to ask there is no way to attach programs either, and that is told elsewhere.
        let has_old_proxy = OldProxy::look().is_ok_and(|found| found.may_have_connections());
        Ok(HostView { devices, defaults, netns_cookie: netns_cookie(), has_old_proxy })
    }

    /// Sends what has changed since `known`, for ever; returns when the receiver is gone.
    pub async fn follow(self, mut known: HostView, events: Sender<Event>) {
        while !events.is_closed() {
            if let Err(error) = self.changes(&mut known, &events).await {
                tracing::warn!(%error, "cannot follow addresses and routes of this machine; trying again");
            }
            sleep(RETRY).await;
        }
    }

    /// Runs until the kernel stops telling, or nobody listens.
    async fn changes(&self, known: &mut HostView, events: &Sender<Event>) -> io::Result<()> {
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
        ];
        let (connection, _handle, mut changes) = new_multicast_connection(&groups)?;
        let _connection = Background::new(&tokio::spawn(connection));
        loop {
            let facts = self.clone();
            let now = spawn_blocking(move || facts.look()).await.map_err(io::Error::other)??;
            if now != *known {
                known.clone_from(&now);
                if events.send(Event::Host(now)).await.is_err() {
                    return Ok(());
                }
            }
            match timeout(PERIOD, changes.next()).await {
                Ok(None) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Ok(Some(_)) => {
                    sleep(SETTLE).await;
                    // One look reads everything, so it answers what came meanwhile.
                    while changes.next().now_or_never().flatten().is_some() {}
                }
                Err(_) if events.is_closed() => return Ok(()),
                Err(_) => {}
            }
        }
    }

    fn device(&self, device: Device, addresses: &Addresses) -> (u32, HostDevice) {
        let Device { ifindex, name, kind, no_header, master, below, .. } = device;
        let own = addresses.get(&ifindex).into_iter().flatten().map(|own| own.address);
        let host = HostDevice {
            uplink: self.uplinks.iter().any(|pattern| matches(pattern, &name)),
            no_header,
            is_virtual: kind == Kind::Virtual,
            parent: below.filter(|_| kind == Kind::Stacked),
            master,
            addresses: if name == IPVS_DEVICE { BTreeSet::new() } else { own.collect() },
            name,
        };
        (ifindex, host)
    }
}

/// An address of a device, in the kernel's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Own {
    address: IpAddr,
    secondary: bool,
}

/// By index of the device.
type Addresses = BTreeMap<u32, Vec<Own>>;

fn addresses(netlink: &mut Netlink) -> io::Result<Addresses> {
    let mut found = Addresses::new();
    for answer in netlink.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))? {
        if let RouteNetlinkMessage::NewAddress(message) = answer
            && let Some(own) = read_address(&message)
        {
            found.entry(message.header.index).or_default().push(own);
        }
    }
    Ok(found)
}

/// `None` for an address that nobody else can dial, or that is not there yet.
fn read_address(message: &AddressMessage) -> Option<Own> {
    let (mut own, mut shown) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            // That of a point-to-point device is the other end's; `Local` is ours.
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
    usable.then_some(Own { address, secondary })
}

/// Routes to everywhere, by preference.
fn default_routes(netlink: &mut Netlink, addresses: &Addresses) -> io::Result<Vec<DefaultRoute>> {
    let answers = netlink.dump(RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
    let mut routes: Vec<_> = answers
        .into_iter()
        .filter_map(|answer| match answer {
            RouteNetlinkMessage::NewRoute(route) => Some(read_route(&route, addresses)),
            _ => None,
        })
        .flatten()
        .collect();
    routes.sort_by_key(|(metric, _)| *metric);
    Ok(routes.into_iter().map(|(_, route)| route).collect())
}

/// Metric and route, one for each device of it; nothing if it does not lead everywhere.
fn read_route(message: &RouteMessage, addresses: &Addresses) -> Vec<(u32, DefaultRoute)> {
    let RouteHeader { destination_prefix_length, table, kind, address_family, .. } = message.header;
    if destination_prefix_length != 0 || table != RouteHeader::RT_TABLE_MAIN || kind != RouteType::Unicast {
        return Vec::new();
    }
    let is_v6 = address_family == rtnetlink::packet_route::AddressFamily::Inet6;
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
    let first = |device: u32| {
        let own = addresses.get(&device).into_iter().flatten();
        own.filter(|own| own.address.is_ipv6() == is_v6 && !own.secondary).map(|own| own.address).next()
    };
    devices
        .into_iter()
        .map(|device| (metric, DefaultRoute { device, source: source.or_else(|| first(device)) }))
        .collect()
}

/// The cookie of the network namespace that this process is in; 0 where the kernel has none.
fn netns_cookie() -> u64 {
    let Ok(socket) = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0")) else { return 0 };
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `cookie`, which has as many.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result == 0 { cookie } else { 0 }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::AddressFamily;

    use super::*;

    fn address(attributes: Vec<AddressAttribute>, flags: AddressHeaderFlags) -> Option<Own> {
        let mut message = AddressMessage::default();
        message.header.flags = flags;
        message.attributes = attributes;
        read_address(&message)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn our_end_of_a_point_to_point_device_counts() {
        let both = vec![AddressAttribute::Address(ip("10.0.0.2")), AddressAttribute::Local(ip("10.0.0.1"))];
        let own = address(both, AddressHeaderFlags::empty());
        assert_eq!(own, Some(Own { address: ip("10.0.0.1"), secondary: false }));
    }

    #[test]
    fn addresses_that_nobody_can_dial_do_not_count() {
        let one = |text, flags| address(vec![AddressAttribute::Address(ip(text))], flags);
        assert_eq!(one("169.254.0.1", AddressHeaderFlags::empty()), None);
        assert_eq!(one("fe80::1", AddressHeaderFlags::empty()), None);
        assert_eq!(one("2001:db8::1", AddressHeaderFlags::Dadfailed), None);
        assert_eq!(one("2001:db8::1", AddressHeaderFlags::Tentative), None);
        assert!(one("2001:db8::1", AddressHeaderFlags::empty()).is_some());
        assert!(one("127.0.0.1", AddressHeaderFlags::empty()).is_some(), "node ports may answer there");
    }

    fn route(kind: RouteType, attributes: Vec<RouteAttribute>) -> Vec<(u32, DefaultRoute)> {
        let mut message = RouteMessage::default();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.kind = kind;
        message.header.address_family = AddressFamily::Inet;
        message.attributes = attributes;
        let own = |address, secondary| Own { address: ip(address), secondary };
        let addresses = BTreeMap::from([(
            2,
            vec![own("2001:db8::1", false), own("192.0.2.9", true), own("192.0.2.1", false)],
        )]);
        read_route(&message, &addresses)
    }

    #[test]
    fn a_default_route_says_where_packets_come_from_or_its_device_does() {
        let plain = route(RouteType::Unicast, vec![RouteAttribute::Oif(2), RouteAttribute::Priority(100)]);
        assert_eq!(plain, [(100, DefaultRoute { device: 2, source: Some(ip("192.0.2.1")) })]);
        let source = RouteAttribute::PrefSource(RouteAddress::Inet([192, 0, 2, 9].into()));
        let said = route(RouteType::Unicast, vec![RouteAttribute::Oif(2), source]);
        assert_eq!(said[0].1.source, Some(ip("192.0.2.9")));
        let elsewhere = route(RouteType::Unicast, vec![RouteAttribute::Oif(3)]);
        assert_eq!(elsewhere[0].1.source, None);
        assert!(route(RouteType::Unreachable, vec![RouteAttribute::Oif(2)]).is_empty());
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let view = Facts::default().look().unwrap();
        let lo = view.devices.values().find(|device| device.name == "lo").expect("every namespace has it");
        assert!(!lo.no_header && !lo.is_virtual);
        // Linux 5.14 has it, and we need more.
        assert_ne!(view.netns_cookie, 0);
        assert_eq!(view.netns_cookie, Facts::default().look().unwrap().netns_cookie);
    }
}
