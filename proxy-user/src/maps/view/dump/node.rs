//! The maps about this node and other nodes.

use std::net::IpAddr;

use aya::maps::MapType;
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::map_names as map;
use proxy_common::node::{
    Cidr, DEVICE_GUEST, DEVICE_LAN_PORT, DEVICE_NO_HEADER, DEVICE_UPLINK, Device, NodeAddr, NodeEntry,
    TUNNEL_V6, Tunnel,
};
use serde_json::{Value, json};

use super::Entry;
use crate::maps::view::{View, ViewError};

impl View {
    pub(super) fn dump_node<A>(&self, name: &'static str) -> Result<Vec<Entry>, ViewError>
    where
        A: Address + Into<IpAddr>,
        NodeEntry<A>: Plain,
    {
        let rows = self.pin(name, MapType::Array)?.first::<u32, NodeEntry<A>>(1)?;
        Ok(rows
            .into_iter()
            .map(|(key, node)| {
                let cidrs = node.service_cidrs.iter().take(node.service_cidr_count as usize);
                let cidrs: Vec<Value> = cidrs.map(cidr).collect();
                let source: IpAddr = node.source.into();
                let policies = node.ipsec.iter().take(node.ipsec_count as usize);
                let policies: Vec<_> = policies
                    .map(|policy| json!({ "src": cidr(&policy.src), "dst": cidr(&policy.dst) }))
                    .collect();
                let address = |address: A| -> IpAddr { address.into() };
                let sources: Vec<_> = node
                    .sources
                    .iter()
                    .take(node.source_count as usize)
                    .map(|source| json!({ "device": source.ifindex, "source": address(source.addr) }))
                    .collect();
                let node = json!({
                    "source": source, "pods": cidr(&node.pods), "serviceCidrs": cidrs, "ipsec": policies,
                    "sources": sources,
                });
                (json!(key), node)
            })
            .collect())
    }

    pub(super) fn dump_node_addrs<A: Address + Into<IpAddr> + Plain>(
        &self,
        name: &'static str,
    ) -> Result<Vec<Entry>, ViewError> {
        let rows = self.pin(name, MapType::Hash)?.all::<A, NodeAddr>()?;
        let address = |address: A| -> IpAddr { address.into() };
        Ok(rows
            .into_iter()
            .map(|(key, bits)| (json!({ "address": address(key) }), json!({ "bits": bits })))
            .collect())
    }

    pub(super) fn dump_devices(&self) -> Result<Vec<Entry>, ViewError> {
        let rows = self.pin(map::DEVICES, MapType::Hash)?.all::<u32, Device>()?;
        let value = |device: Device| {
            let [a, b, c, d, e, f, ..] = device.to_le_bytes();
            let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
            let is = |bit| device & bit != 0;
            json!({
                "mac": mac, "uplink": is(DEVICE_UPLINK), "noHeader": is(DEVICE_NO_HEADER),
                "lanPort": is(DEVICE_LAN_PORT), "guest": is(DEVICE_GUEST),
            })
        };
        Ok(rows.into_iter().map(|(index, device)| (json!({ "device": index }), value(device))).collect())
    }

    pub(super) fn dump_tunnels(&self) -> Result<Vec<Entry>, ViewError> {
        self.dump_array::<Tunnel>(map::TUNNELS, |tunnel| {
            let address = |words: [u32; 4]| -> IpAddr {
                let mut octets = [0; 16];
                for (place, word) in octets.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                    *place = word.to_ne_bytes();
                }
                if tunnel.family == TUNNEL_V6 { octets.into() } else { words[0].to_ne_bytes().into() }
            };
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
