//! The objects that the agents read: a Service with endpoints on nodes 2 and 3, and the nodes.

use std::net::IpAddr;

use serde_json::json;

use crate::nodes::{link_ip, node_ip, pod_ip};
use proxy_testbed::Family;
use proxy_testbed::manifest::{ready_on, service_object, slices, yaml};

/// Ports of the Service's own address, and its node ports, each for TCP and UDP.
pub const PORTS: [u16; 2] = [80, 53];
pub const NODE_PORTS: [u16; 2] = [31_080, 31_053];
/// A TCP port whose servers have many connections; the endpoints use the same port.
pub const MANY: u16 = 9_000;

/// What differs from the default objects.
#[derive(Clone, Copy)]
pub struct Wish {
    /// Value of the annotation `ballast.io/forwarding-mode`.
    pub mode: &'static str,
    /// Families of the nodes' addresses.
    pub nodes: &'static [Family],
    /// Additional endpoints, besides those on nodes 2 and 3: node and last part of the address.
    pub more: &'static [(u8, u8)],
}

impl Default for Wish {
    fn default() -> Self {
        Self { mode: "dsr", nodes: &Family::BOTH, more: &[] }
    }
}

/// Returns the Service's own address (`spec.externalIPs`).
pub fn vip(family: Family) -> IpAddr {
    link_ip(family, 30, 50)
}

/// Returns all objects as a file of manifests.
pub fn text(wish: &Wish) -> String {
    let spec = json!({
        "type": "NodePort",
        "externalIPs": Family::BOTH.map(vip),
        "ports": [
            {"name": "tcp", "port": PORTS[0], "nodePort": NODE_PORTS[0], "protocol": "TCP"},
            {"name": "udp", "port": PORTS[1], "nodePort": NODE_PORTS[1], "protocol": "UDP"},
            {"name": "many", "port": MANY, "nodePort": 31_900, "protocol": "TCP"},
        ],
    });
    let mut service = service_object("dsr", 77, &spec);
    service["metadata"]["annotations"] = json!({"ballast.io/forwarding-mode": wish.mode});
    let ports = json!([
        {"name": "tcp", "port": 8080, "protocol": "TCP"},
        {"name": "udp", "port": 5353, "protocol": "UDP"},
        {"name": "many", "port": MANY, "protocol": "TCP"},
    ]);
    let slices = slices("dsr", "dsr", &ports, |family| {
        let endpoint = |(node, pod): &(u8, u8)| ready_on(pod_ip(family, *node, *pod), &format!("node{node}"));
        [(2, 2), (3, 2)].iter().chain(wish.more).map(endpoint).collect()
    });
    let mut all = vec![service];
    all.extend(slices);
    for node in 1..=3 {
        let address = |family: &Family| json!({"type": "InternalIP", "address": node_ip(*family, node)});
        all.push(json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": format!("node{node}")},
            "status": {"addresses": wish.nodes.iter().map(address).collect::<Vec<_>>()},
        }));
    }
    yaml(all)
}
