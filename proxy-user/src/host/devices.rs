//! The network devices of this network namespace.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{
    InfoKind, InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, LinkXdp,
    XdpAttached,
};

use super::netlink::Netlink;
use super::seen::Entry;
use proxy_core::model::DeviceKind;

/// The devices of the network namespace for which this was mounted.
const SYSFS: &str = "/sys/class/net";

/// Index of the loopback device, in every network namespace (`LOOPBACK_IFINDEX`).
pub const LOOPBACK: u32 = 1;

/// A network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "facts that go with each other in every combination")]
pub struct Device {
    /// Its index, which is not reused while the machine runs.
    pub ifindex: u32,
    /// Its name, which may change.
    pub name: String,
    /// Whether its packets begin with an Ethernet header; false for loopback.
    pub ethernet: bool,
    /// Its MAC address; 0 if it has none ([`proxy_common::node::mac`]).
    pub mac: u64,
    /// Its kind.
    pub kind: DeviceKind,
    /// Whether each of its packets also passes another device, with the hooks of that one: it is a port of a bond or a team, the
    /// fast path of a virtual machine's NIC, or an ifb, to which traffic shaping redirects what another device receives.
    pub passes_another: bool,
    /// Whether it is the NIC of a virtual machine, whose hypervisor hands over large packets in one piece.
    pub paravirtual: bool,
    /// Whether its packets begin with an IP header.
    pub no_header: bool,
    /// Whether it is switched off (no `IFF_UP`).
    pub is_down: bool,
    /// The device of which it is a port.
    pub master: Option<u32>,
    /// Whether it is a VLAN.
    pub vlan: bool,
    /// The XDP program on it.
    pub xdp: Option<XdpProgram>,
    /// The longest packet in bytes, without the link-layer header.
    pub mtu: u32,
    /// The device below it; for a veth, its other end, in any network namespace.
    pub below: Option<u32>,
    /// Whether the device below it is in another network namespace.
    pub below_elsewhere: bool,
}

impl Device {
    /// Whether it is implemented by software, and not made of NICs as a bond is.
    pub const fn is_virtual(&self) -> bool {
        !matches!(self.kind, DeviceKind::Physical | DeviceKind::Bond)
    }
}

impl Entry for Device {
    type Key = u32;

    fn key(&self) -> u32 {
        self.ifindex
    }
}

/// How an XDP program is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// By the driver of the device.
    Native,
    /// By the kernel's stack, on socket buffers.
    Generic,
}

/// An XDP program on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpProgram {
    /// The kernel's id of the program.
    pub program: u32,
    /// How it is run; `None` if the device itself runs it, or if there are several programs.
    pub mode: Option<XdpMode>,
}

fn read_xdp(attributes: &[LinkXdp]) -> Option<XdpProgram> {
    let (mut program, mut mode) = (None, None);
    for one in attributes {
        match one {
            LinkXdp::Attached(XdpAttached::Driver) => mode = Some(XdpMode::Native),
            LinkXdp::Attached(XdpAttached::SocketBuffer) => mode = Some(XdpMode::Generic),
            LinkXdp::Attached(XdpAttached::None) => return None,
            // If there are several programs, the first id stands for all.
            LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) | LinkXdp::SkbProgId(id) | LinkXdp::HwProgId(id) => {
                program.get_or_insert(*id);
            }
            _ => {}
        }
    }
    Some(XdpProgram { program: program?, mode })
}

/// Returns all devices, by index.
pub fn list() -> io::Result<Vec<Device>> {
    let answers = Netlink::open()?.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let mut devices: Vec<_> = answers
        .into_iter()
        .filter_map(|answer| match answer {
            RouteNetlinkMessage::NewLink(link) => read(&link),
            _ => None,
        })
        .collect();
    devices.sort_by_key(|device| device.ifindex);
    mark_behind_nics(&mut devices);
    Ok(devices)
}

/// Marks the NICs whose master is a NIC: virtual functions behind `hv_netvsc` (Azure) and `net_failover` (virtio). Their driver
/// hands each packet on as one of the master, after the hooks of the port.
fn mark_behind_nics(devices: &mut [Device]) {
    let is_nic = |device: &Device| device.kind == DeviceKind::Physical;
    let nics: BTreeSet<_> = devices.iter().filter(|one| is_nic(one)).map(|nic| nic.ifindex).collect();
    for device in devices.iter_mut().filter(|one| is_nic(one)) {
        device.passes_another |= device.master.is_some_and(|master| nics.contains(&master));
    }
}

fn read(link: &LinkMessage) -> Option<Device> {
    let mut device = Device {
        ifindex: link.header.index,
        name: String::new(),
        ethernet: link.header.link_layer_type == LinkLayerType::Ether,
        no_header: has_no_header(link.header.link_layer_type),
        is_down: !link.header.flags.contains(LinkFlags::Up),
        // Only software devices have a link kind.
        kind: if link.header.flags.contains(LinkFlags::Loopback) {
            DeviceKind::Loopback
        } else {
            DeviceKind::Physical
        },
        ..Device::default()
    };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => device.name.clone_from(name),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => {
                            device.kind = of_kind(kind);
                            device.vlan = *kind == InfoKind::Vlan;
                            device.passes_another |= *kind == InfoKind::Ifb;
                        }
                        LinkInfo::PortKind(InfoPortKind::Bond | InfoPortKind::Team) => {
                            device.passes_another = true;
                        }
                        _ => {}
                    }
                }
            }
            LinkAttribute::Address(address) => {
                device.mac = <[u8; 6]>::try_from(&address[..]).map_or(0, proxy_common::node::mac);
            }
            LinkAttribute::Controller(index) => device.master = Some(*index),
            LinkAttribute::Xdp(xdp) => device.xdp = read_xdp(xdp),
            LinkAttribute::Link(index) => device.below = Some(*index),
            LinkAttribute::LinkNetNsId(_) => device.below_elsewhere = true,
            LinkAttribute::Mtu(mtu) => device.mtu = *mtu,
            _ => {}
        }
    }
    device.paravirtual =
        device.kind == DeviceKind::Physical && is_paravirtual(Path::new(SYSFS), &device.name);
    (!device.name.is_empty()).then_some(device)
}

/// Whether the driver of a device is one of a hypervisor. These turn off large receives while an XDP program is attached
/// (`drivers/net/virtio_net.c`: `virtnet_clear_guest_offloads`).
fn is_paravirtual(sysfs: &Path, name: &str) -> bool {
    const DRIVERS: [&str; 5] = ["virtio_net", "hv_netvsc", "vif", "xen-netfront", "vmxnet3"];
    let driver = fs::read_link(sysfs.join(name).join("device/driver")).ok();
    driver.and_then(|path| Some(DRIVERS.contains(&path.file_name()?.to_str()?))).unwrap_or_default()
}

fn of_kind(kind: &InfoKind) -> DeviceKind {
    match kind {
        InfoKind::Bridge => DeviceKind::Bridge,
        InfoKind::Veth | InfoKind::Netkit => DeviceKind::Veth,
        InfoKind::Tun => DeviceKind::Tun,
        InfoKind::Bond | InfoKind::Team | InfoKind::Hsr => DeviceKind::Bond,
        InfoKind::Vlan
        | InfoKind::MacVlan
        | InfoKind::MacVtap
        | InfoKind::IpVlan
        | InfoKind::IpVtap
        | InfoKind::MacSec => DeviceKind::Stacked,
        InfoKind::Vxlan
        | InfoKind::Geneve
        | InfoKind::BareUdp
        | InfoKind::GreTap
        | InfoKind::GreTap6
        | InfoKind::GreTun
        | InfoKind::GreTun6
        | InfoKind::ErSpan
        | InfoKind::Ip6ErSpan
        | InfoKind::IpIp
        | InfoKind::SitTun
        | InfoKind::Ip6Tnl
        | InfoKind::Vti
        | InfoKind::Vti6
        | InfoKind::Xfrm
        | InfoKind::Wireguard
        | InfoKind::Gtp
        | InfoKind::Amt
        | InfoKind::BatAdv => DeviceKind::Tunnel,
        InfoKind::Ipoib | InfoKind::Wwan | InfoKind::RmNet | InfoKind::Dsa | InfoKind::VirtWifi => {
            DeviceKind::Physical
        }
        InfoKind::Dummy | InfoKind::Ifb | InfoKind::Nlmon => DeviceKind::Dummy,
        // Kinds that the decoder does not know by name: `net/l2tp`, `drivers/net/ppp`, `drivers/net/ovpn`.
        InfoKind::Other(name) if matches!(name.as_str(), "ppp" | "l2tpeth" | "ovpn") => DeviceKind::Tunnel,
        _ => DeviceKind::Other,
    }
}

/// Whether devices of this type pass up IP packets without a header (`net/core/filter.c`: `dev_is_mac_header_xmit`).
const fn has_no_header(kind: LinkLayerType) -> bool {
    matches!(
        kind,
        LinkLayerType::None
            | LinkLayerType::Rawip
            | LinkLayerType::Ppp
            | LinkLayerType::Tunnel
            | LinkLayerType::Tunnel6
            | LinkLayerType::Sit
            | LinkLayerType::Ipgre
            | LinkLayerType::Ip6gre
    )
}

/// Returns the name of a device, or its number if it is not in this network namespace.
pub fn device_name(ifindex: u32) -> String {
    known_device_name(ifindex).unwrap_or_else(|| format!("#{ifindex}"))
}

/// Returns the name of a device of this network namespace; `None` if the device does not exist.
pub fn known_device_name(ifindex: u32) -> Option<String> {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None).ok()?;
    rustix::net::netdevice::index_to_name(&socket, ifindex).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_below_a_nic_is_behind_it_and_a_port_of_another_kind_is_not() {
        let device = |ifindex, kind, master| Device { ifindex, kind, master, ..Device::default() };
        let mut devices = [
            device(2, DeviceKind::Physical, None),
            device(3, DeviceKind::Physical, Some(2)),
            device(4, DeviceKind::Bridge, None),
            device(5, DeviceKind::Physical, Some(4)),
            device(6, DeviceKind::Veth, Some(2)),
            device(7, DeviceKind::Physical, Some(99)),
        ];
        mark_behind_nics(&mut devices);
        let behind: Vec<_> = devices.iter().filter(|one| one.passes_another).map(|one| one.ifindex).collect();
        assert_eq!(behind, [3]);
    }

    #[test]
    fn nic_of_a_hypervisor_is_known_by_its_driver() {
        let sysfs = tempfile::tempdir().unwrap();
        for (name, driver) in [("eth0", "virtio_net"), ("eth1", "ixgbe")] {
            let device = sysfs.path().join(name).join("device");
            fs::create_dir_all(&device).unwrap();
            std::os::unix::fs::symlink(format!("../../bus/drivers/{driver}"), device.join("driver")).unwrap();
        }
        let found = ["eth0", "eth1", "lo"].map(|name| is_paravirtual(sysfs.path(), name));
        assert_eq!(found, [true, false, false]);
    }

    #[test]
    fn links_are_read_as_the_kernel_describes_them() {
        let mut link = LinkMessage::default();
        link.header.index = 7;
        link.header.link_layer_type = LinkLayerType::Ether;
        assert_eq!(read(&link), None, "a device has a name");
        link.attributes = vec![
            LinkAttribute::IfName("bond0p1".to_owned()),
            LinkAttribute::Address(vec![2, 0, 0, 0, 0, 9]),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::PortKind(InfoPortKind::Bond),
            ]),
        ];
        let device = read(&link).unwrap();
        assert!(device.ethernet && device.passes_another && device.kind == DeviceKind::Veth);
        assert_eq!((device.ifindex, device.name.as_str()), (7, "bond0p1"));
        assert_eq!(device.mac, 0x0900_0000_0002);
        assert_eq!((device.no_header, device.master, device.below), (false, None, None));
    }

    #[test]
    fn ifb_sees_packets_of_another_device() {
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::IfName("bwp1".to_owned()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Ifb)]),
        ];
        assert!(read(&link).unwrap().passes_another);
    }

    #[test]
    fn nics_and_bonds_are_not_virtual() {
        let of = |kind| Device { kind, ..Device::default() }.is_virtual();
        assert!(!of(DeviceKind::Physical) && !of(DeviceKind::Bond));
        assert!(of(DeviceKind::Veth) && of(DeviceKind::Tunnel) && of(DeviceKind::Stacked));
    }

    #[test]
    fn parent_and_controller_of_a_device_are_read() {
        let mut link = LinkMessage::default();
        link.header.link_layer_type = LinkLayerType::None;
        link.attributes = vec![
            LinkAttribute::IfName("eth0.7".to_owned()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vlan)]),
            LinkAttribute::Controller(3),
            LinkAttribute::Link(2),
        ];
        let device = read(&link).unwrap();
        assert_eq!((device.kind, device.master, device.below), (DeviceKind::Stacked, Some(3), Some(2)));
        assert!(device.no_header && !device.ethernet && !device.below_elsewhere);
        link.attributes.push(LinkAttribute::LinkNetNsId(0));
        assert!(read(&link).unwrap().below_elsewhere);
    }

    #[test]
    fn a_nic_has_no_link_kind_and_others_tell_theirs() {
        let kind = |kind: Option<InfoKind>, flags| {
            let mut link = LinkMessage::default();
            link.header.flags = flags;
            link.attributes = vec![LinkAttribute::IfName("x".to_owned())];
            link.attributes.extend(kind.map(|kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])));
            read(&link).unwrap().kind
        };
        assert_eq!(kind(None, LinkFlags::Up), DeviceKind::Physical);
        assert_eq!(kind(None, LinkFlags::Loopback), DeviceKind::Loopback);
        let other = |name: &str| InfoKind::Other(name.to_owned());
        for (info, expected) in [
            (InfoKind::Bond, DeviceKind::Bond),
            (InfoKind::Vxlan, DeviceKind::Tunnel),
            (InfoKind::Wireguard, DeviceKind::Tunnel),
            (InfoKind::IpIp, DeviceKind::Tunnel),
            (other("ppp"), DeviceKind::Tunnel),
            (InfoKind::Tun, DeviceKind::Tun),
            (InfoKind::Netkit, DeviceKind::Veth),
            (InfoKind::Dummy, DeviceKind::Dummy),
            (other("openvswitch"), DeviceKind::Other),
        ] {
            assert_eq!(kind(Some(info.clone()), LinkFlags::Up), expected, "{info}");
        }
    }
}
