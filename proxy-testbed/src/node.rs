//! A node with an uplink: devices and routes of the kernel, and what the programs know about the node.

use std::net::IpAddr;
use std::process::Command;
use std::sync::OnceLock;

use aya::maps::{Array, HashMap, MapData};
use proxy_common::Address;
use proxy_common::map_names as names;
use proxy_common::node::{Cidr, DEVICE_UPLINK, NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeEntry, mac};

use crate::Family;
use crate::harness::Harness;
use crate::packet::MACS;

/// Returns the index of the uplink, which has a default route and a known neighbour.
pub fn uplink() -> u32 {
    static INDEX: OnceLock<u32> = OnceLock::new();
    *INDEX.get_or_init(|| {
        let script = "set -e
            ip link add up0 address 02:00:00:00:00:11 mtu 1400 type veth peer name up1
            ip link set up1 up
            echo 1 > /proc/sys/net/ipv4/ip_forward
            echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
            ip link set up0 up
            ip addr add 192.168.77.1/24 dev up0
            ip addr add fd77::1/64 dev up0 nodad
            ip neigh add 192.168.77.2 lladdr 02:00:00:00:00:99 dev up0
            ip neigh add fd77::2 lladdr 02:00:00:00:00:99 dev up0
            ip route add default via 192.168.77.2
            ip -6 route add default via fd77::2
            ip route add blackhole 10.3.0.0/16
            ip -6 route add blackhole fd00:3::/32
            ";
        let output = Command::new("sh").args(["-c", script]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let shown = Command::new("ip").args(["-o", "link", "show", "up0"]).output().unwrap();
        String::from_utf8(shown.stdout).unwrap().split(':').next().unwrap().trim().parse().unwrap()
    })
}

pub fn node_addr(family: Family) -> IpAddr {
    match family {
        Family::V4 => "192.168.77.1".parse().unwrap(),
        Family::V6 => "fd77::1".parse().unwrap(),
    }
}

fn hash<K: aya::Pod, V: aya::Pod>(harness: &Harness, name: &str) -> HashMap<MapData, K, V> {
    aya::maps::Map::HashMap(harness.map(name)).try_into().unwrap()
}

/// Sets the source address of forwarded packets (SNAT).
pub fn send_on_as(addr: IpAddr, harness: &Harness) {
    fn set<A: Address>(source: A, mut node: Array<MapData, NodeEntry<A>>) {
        let known = node.get(&0, 0).unwrap();
        node.set(0, NodeEntry { source, ..known }, 0).unwrap();
    }
    match addr {
        IpAddr::V4(addr) => set(addr.octets(), harness.array(names::NODE)),
        IpAddr::V6(addr) => set(addr.octets(), harness.array(names::NODE6)),
    }
}

/// Writes the node's address, its range of Service addresses and its devices to the maps.
pub fn know(family: Family, harness: &Harness) {
    fn entry<A: Address>(source: A, addr: A, mask: A) -> NodeEntry<A> {
        let mut entry = NodeEntry { source, service_cidr_count: 1, ..NodeEntry::UNKNOWN };
        entry.service_cidrs[0] = Cidr { addr, mask };
        entry
    }
    match (node_addr(family), family.frontend(0, 0).ip()) {
        (IpAddr::V4(own), _) => {
            let mut node: Array<_, NodeEntry<[u8; 4]>> = harness.array(names::NODE);
            node.set(0, entry(own.octets(), [10, 96, 0, 0], [255, 255, 0, 0]), 0).unwrap();
            hash::<[u8; 4], u32>(harness, names::NODE_ADDRS)
                .insert(own.octets(), NODE_ADDR_PORTS | NODE_ADDR_OWN, 0)
                .unwrap();
        }
        (IpAddr::V6(own), IpAddr::V6(first)) => {
            let mut mask = [0; 16];
            mask[..4].fill(0xff);
            let mut addr = first.octets();
            addr[4..].fill(0);
            let mut node: Array<_, NodeEntry<[u8; 16]>> = harness.array(names::NODE6);
            node.set(0, entry(own.octets(), addr, mask), 0).unwrap();
            hash::<[u8; 16], u32>(harness, names::NODE_ADDRS6)
                .insert(own.octets(), NODE_ADDR_PORTS | NODE_ADDR_OWN, 0)
                .unwrap();
        }
        _ => unreachable!("one family"),
    }
    let mac = mac(MACS[0]);
    hash::<u32, u64>(harness, names::DEVICES).insert(uplink(), DEVICE_UPLINK | mac, 0).unwrap();
    harness.configure(|config| (config.uplinks, config.macs) = ([uplink(), 0, 0], [mac, 0, 0]));
}

/// A route to an address that does not use the default gateway. The route is deleted when the value is dropped.
pub struct OtherWay(IpAddr);

impl OtherWay {
    /// Link-layer address of the other gateway.
    pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x98];

    pub fn of(to: IpAddr) -> Self {
        let way = Self(to);
        let via = if to.is_ipv4() { "192.168.77.3" } else { "fd77::3" };
        way.ip(&["neigh", "replace", via, "lladdr", "02:00:00:00:00:98", "dev", "up0"]);
        way.ip(&["route", "replace", &to.to_string(), "via", via]);
        way
    }

    fn ip(&self, arguments: &[&str]) {
        let family = if self.0.is_ipv4() { "-4" } else { "-6" };
        let status = Command::new("ip").arg(family).args(arguments).status().unwrap();
        assert!(status.success(), "{arguments:?}");
    }
}

impl Drop for OtherWay {
    fn drop(&mut self) {
        self.ip(&["route", "del", &self.0.to_string()]);
    }
}
