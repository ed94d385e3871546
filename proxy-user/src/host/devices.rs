//! The network devices of this network namespace.

use std::io;

use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{
    InfoKind, InfoPortKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage,
};

use super::netlink::Netlink;

/// What matters of the type of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// A bridge, which packets between its ports do not pass.
    Bridge,
    /// One that software makes for a container or a machine: veth, netkit, tun, tap.
    Virtual,
    /// One that shares another device, its [`Device::below`]: VLAN, macvlan, ipvlan.
    Stacked,
    /// Anything else.
    #[default]
    Other,
}

/// A network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its index, which is not used again while the machine runs.
    pub ifindex: u32,
    /// Its name, which may change.
    pub name: String,
    /// Whether its packets begin with an Ethernet header; loopback is not counted.
    pub ethernet: bool,
    /// Its type.
    pub kind: Kind,
    /// Whether it is a port of a bond or a team.
    pub bonded: bool,
    /// Whether its packets begin with an IP header.
    pub no_header: bool,
    /// The device that it is a port of.
    pub master: Option<u32>,
    /// The device that it lies on; that of a veth is its other end, in whatever network namespace.
    pub below: Option<u32>,
}

/// Every device there is, by index.
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
    Ok(devices)
}

fn read(link: &LinkMessage) -> Option<Device> {
    let mut device = Device {
        ifindex: link.header.index,
        name: String::new(),
        ethernet: link.header.link_layer_type == LinkLayerType::Ether,
        no_header: has_no_header(link.header.link_layer_type),
        ..Device::default()
    };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => device.name.clone_from(name),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => device.kind = of_kind(kind),
                        LinkInfo::PortKind(InfoPortKind::Bond | InfoPortKind::Team) => device.bonded = true,
                        _ => {}
                    }
                }
            }
            LinkAttribute::Controller(index) => device.master = Some(*index),
            LinkAttribute::Link(index) => device.below = Some(*index),
            _ => {}
        }
    }
    (!device.name.is_empty()).then_some(device)
}

const fn of_kind(kind: &InfoKind) -> Kind {
    match kind {
        InfoKind::Bridge => Kind::Bridge,
        InfoKind::Veth | InfoKind::Netkit | InfoKind::Tun => Kind::Virtual,
        InfoKind::Vlan | InfoKind::MacVlan | InfoKind::MacVtap | InfoKind::IpVlan | InfoKind::IpVtap => {
            Kind::Stacked
        }
        _ => Kind::Other,
    }
}

/// Devices of these types hand up IP packets as they are (`net/core/filter.c`: `dev_is_mac_header_xmit`).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read_as_the_kernel_describes_them() {
        let mut link = LinkMessage::default();
        link.header.index = 7;
        link.header.link_layer_type = LinkLayerType::Ether;
        assert_eq!(read(&link), None, "a device has a name");
        link.attributes = vec![
            LinkAttribute::IfName("bond0p1".to_owned()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::PortKind(InfoPortKind::Bond),
            ]),
        ];
        let device = read(&link).unwrap();
        assert!(device.ethernet && device.bonded && device.kind == Kind::Virtual);
        assert_eq!((device.ifindex, device.name.as_str()), (7, "bond0p1"));
        assert_eq!((device.no_header, device.master, device.below), (false, None, None));
    }

    #[test]
    fn what_lies_on_what_is_read() {
        let mut link = LinkMessage::default();
        link.header.link_layer_type = LinkLayerType::None;
        link.attributes = vec![
            LinkAttribute::IfName("eth0.7".to_owned()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vlan)]),
            LinkAttribute::Controller(3),
            LinkAttribute::Link(2),
        ];
        let device = read(&link).unwrap();
        assert_eq!((device.kind, device.master, device.below), (Kind::Stacked, Some(3), Some(2)));
        assert!(device.no_header && !device.ethernet);
    }
}
