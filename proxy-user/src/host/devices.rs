//! The network devices of this network namespace.

use std::io;

use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::{
    InfoKind, InfoPortKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage,
};

use super::netlink::Netlink;

/// What matters of the type of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bridge, which packets between its ports do not pass.
    Bridge,
    /// Anything else.
    Other,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
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
        kind: Kind::Other,
        bonded: false,
    };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => device.name.clone_from(name),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::Bridge) => device.kind = Kind::Bridge,
                        LinkInfo::PortKind(InfoPortKind::Bond | InfoPortKind::Team) => device.bonded = true,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    (!device.name.is_empty()).then_some(device)
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
        assert!(device.ethernet && device.bonded && device.kind == Kind::Other);
        assert_eq!((device.ifindex, device.name.as_str()), (7, "bond0p1"));
    }
}
