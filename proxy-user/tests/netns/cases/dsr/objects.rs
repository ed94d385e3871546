//! The objects that the agents read: a Service with endpoints on nodes 2 and 3, and the nodes.

use std::net::IpAddr;

use serde_json::json;

use crate::cases::three_nodes::objects;
use crate::manifest::{Family, cluster_ip};
use crate::nodes::{link_ip, node_ip, pod_ip};

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
    let ips = Family::BOTH.map(|family| cluster_ip(family, 77));
    let mut all = vec![json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "dsr",
            "namespace": "default",
            "annotations": {"ballast.io/forwarding-mode": wish.mode},
        },
        "spec": {
            "type": "NodePort",
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": ["IPv4", "IPv6"],
            "externalIPs": Family::BOTH.map(vip),
            "ports": [
                {"name": "tcp", "port": PORTS[0], "nodePort": NODE_PORTS[0], "protocol": "TCP"},
                {"name": "udp", "port": PORTS[1], "nodePort": NODE_PORTS[1], "protocol": "UDP"},
                {"name": "many", "port": MANY, "nodePort": 31_900, "protocol": "TCP"},
            ],
        },
    })];
    for (family, label) in Family::BOTH.into_iter().zip(["IPv4", "IPv6"]) {
        let endpoint = |(node, pod): &(u8, u8)| {
            json!({
                "addresses": [pod_ip(family, *node, *pod)],
                "conditions": {"ready": true},
                "nodeName": format!("node{node}"),
            })
        };
        let endpoints: Vec<_> = [(2, 2), (3, 2)].iter().chain(wish.more).map(endpoint).collect();
        all.push(json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("dsr-{}", label.to_lowercase()),
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": "dsr"},
            },
            "addressType": label,
            "endpoints": endpoints,
            "ports": [
                {"name": "tcp", "port": 8080, "protocol": "TCP"},
                {"name": "udp", "port": 5353, "protocol": "UDP"},
                {"name": "many", "port": MANY, "protocol": "TCP"},
            ],
        }));
    }
    for node in 1..=3 {
        let address = |family: &Family| json!({"type": "InternalIP", "address": node_ip(*family, node)});
        all.push(json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": format!("node{node}")},
            "status": {"addresses": wish.nodes.iter().map(address).collect::<Vec<_>>()},
        }));
    }
    objects::text(&all)
}
