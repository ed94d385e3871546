//! The maps about this node and other nodes.

use std::net::IpAddr;

use aya::maps::MapType;
use proxy_common::Address;
use proxy_common::map_names as map;
use proxy_common::node::{
    Cidr, DEVICE_GUEST, DEVICE_LAN_PORT, DEVICE_NO_HEADER, DEVICE_UPLINK, Device, NodeAddr, NodeEntry,
    TUNNEL_V6, Tunnel,
};
use serde_json::{Value, json};

use super::Entry;
use crate::maps::family::MapFamily;
use crate::maps::view::{View, ViewError, ip_of};

impl View {
    pub(super) fn dump_node<A: MapFamily>(&self) -> Result<Vec<Entry>, ViewError> {
        self.dump_rows(A::NODE, MapType::Array, |key: u32, node: NodeEntry<A>| {
            let cidrs = node.service_cidrs.iter().take(node.service_cidr_count as usize);
            let policies = node.ipsec.iter().take(node.ipsec_count as usize);
            let sources = node.sources.iter().take(node.source_count as usize);
            let address = |address: A| -> IpAddr { address.into() };
            let node = json!({
                "source": address(node.source), "pods": cidr(&node.pods),
                "serviceCidrs": cidrs.map(cidr).collect::<Vec<_>>(),
                "ipsec": policies
                    .map(|policy| json!({ "src": cidr(&policy.src), "dst": cidr(&policy.dst) }))
                    .collect::<Vec<_>>(),
                "routesByMark": node.routes_by_mark != 0,
                "sources": sources
                    .map(|source| json!({ "device": source.ifindex, "source": address(source.addr) }))
                    .collect::<Vec<_>>(),
            });
            (json!(key), node)
        })
    }

    pub(super) fn dump_node_addrs<A: MapFamily>(&self) -> Result<Vec<Entry>, ViewError> {
        self.dump_rows(A::NODE_ADDRS, MapType::Hash, |address: A, bits: NodeAddr| {
            let address: IpAddr = address.into();
            (json!({ "address": address }), json!({ "bits": bits }))
        })
    }

    pub(super) fn dump_devices(&self) -> Result<Vec<Entry>, ViewError> {
        self.dump_rows(map::DEVICES, MapType::Hash, |index: u32, device: Device| {
            let [a, b, c, d, e, f, ..] = device.to_le_bytes();
            let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
            let is = |bit| device & bit != 0;
            let value = json!({
                "mac": mac, "uplink": is(DEVICE_UPLINK), "noHeader": is(DEVICE_NO_HEADER),
                "lanPort": is(DEVICE_LAN_PORT), "guest": is(DEVICE_GUEST),
            });
            (json!({ "device": index }), value)
        })
    }

    pub(super) fn dump_tunnels(&self) -> Result<Vec<Entry>, ViewError> {
        self.dump_array::<Tunnel>(map::TUNNELS, |tunnel| {
            let address = |words| ip_of(if tunnel.family == TUNNEL_V6 { 6 } else { 4 }, words);
            json!({ "node": address(tunnel.addr), "source": address(tunnel.source) })
        })
    }
}

fn cidr<A: Address + Into<IpAddr>>(cidr: &Cidr<A>) -> Value {
    let (address, mask): (IpAddr, IpAddr) = (cidr.addr.into(), cidr.mask.into());
    match ipnet::IpNet::with_netmask(address, mask) {
        Ok(network) if !address.is_unspecified() || network.prefix_len() == 0 => json!(network.to_string()),
        _ => Value::Null,
    }
}
