//! The objects that the three agents read: a Service for each policy and place of the endpoint.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::rule::{PLACES, POLICIES, node_port};
use crate::manifest::{Family, cluster_ip};
use crate::nodes::node_ip;
use crate::peer::SocketKind;

/// Last part of the first Service's cluster address; those of the others follow.
pub const CLUSTER: u8 = 100;

/// Returns the Services, one for each policy and place, and their EndpointSlices.
pub fn objects() -> Vec<Value> {
    let mut objects = Vec::new();
    for (at, policy) in POLICIES.into_iter().enumerate() {
        for (index, location) in PLACES.into_iter().enumerate() {
            let name = format!("{}-{index}", policy.to_lowercase());
            let ips =
                Family::BOTH.map(|family| cluster_ip(family, CLUSTER + (at * PLACES.len() + index) as u8));
            let [tcp, udp] = [SocketKind::Tcp, SocketKind::Udp].map(|kind| node_port(at, location, kind));
            objects.push(json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": "default", "resourceVersion": "1"},
                "spec": {
                    "type": "NodePort",
                    "clusterIP": ips[0],
                    "clusterIPs": ips,
                    "ipFamilies": ["IPv4", "IPv6"],
                    "externalTrafficPolicy": policy,
                    "ports": [
                        {"name": "tcp", "port": 80, "nodePort": tcp, "protocol": "TCP"},
                        {"name": "udp", "port": 53, "nodePort": udp, "protocol": "UDP"},
                    ],
                },
            }));
            for (family, label) in Family::BOTH.into_iter().zip(["IPv4", "IPv6"]) {
                let endpoint = |(ip, node, _): (IpAddr, Option<&str>, &str)| json!({"addresses": [ip], "conditions": {"ready": true}, "nodeName": node});
                let endpoints: Vec<_> = location.endpoints(family).into_iter().map(endpoint).collect();
                objects.push(json!({
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {
                        "name": format!("{name}-{}", label.to_lowercase()),
                        "namespace": "default",
                        "resourceVersion": "1",
                        "labels": {"kubernetes.io/service-name": name},
                    },
                    "addressType": label,
                    "endpoints": endpoints,
                    "ports": [
                        {"name": "tcp", "port": 8080, "protocol": "TCP"},
                        {"name": "udp", "port": 5353, "protocol": "UDP"},
                    ],
                }));
            }
        }
    }
    objects
}

/// Returns the object of node 1, as the API server has it.
pub fn node_object() -> Value {
    let addresses = Family::BOTH.map(|family| json!({"type": "InternalIP", "address": node_ip(family, 1)}));
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "node1", "resourceVersion": "1"},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd44:1::/64"]},
        "status": {"addresses": addresses},
    })
}

/// Returns the objects as a file of manifests.
pub fn text(objects: &[Value]) -> String {
    let mut text = String::new();
    for object in objects {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "---\n{object}");
    }
    text
}
