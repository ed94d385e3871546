//! The objects that the three agents read: a Service for each policy and place of the endpoint.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::rule::{PLACES, POLICIES, node_port};
use crate::nodes::node_ip;
use crate::peer::SocketKind;
use proxy_testbed::Family;
use proxy_testbed::manifest::{service_object, slices, tcp_and_udp};

/// Last part of the first Service's cluster address; those of the others follow.
pub const CLUSTER: u8 = 100;

/// Returns the Services, one for each policy and place, and their EndpointSlices.
pub fn objects() -> Vec<Value> {
    let mut objects = Vec::new();
    for (at, policy) in POLICIES.into_iter().enumerate() {
        for (index, location) in PLACES.into_iter().enumerate() {
            let name = format!("{}-{index}", policy.to_lowercase());
            let number = CLUSTER + (at * PLACES.len() + index) as u8;
            let [tcp, udp] = [SocketKind::Tcp, SocketKind::Udp].map(|kind| node_port(at, location, kind));
            let spec = json!({
                "type": "NodePort",
                "externalTrafficPolicy": policy,
                "ports": [
                    {"name": "tcp", "port": 80, "nodePort": tcp, "protocol": "TCP"},
                    {"name": "udp", "port": 53, "nodePort": udp, "protocol": "UDP"},
                ],
            });
            objects.push(service_object(&name, number, &spec));
            objects.extend(slices(&name, &name, &tcp_and_udp([8080, 5353]), |family| {
                let endpoint = |(ip, node, _): (IpAddr, Option<&str>, &str)| json!({"addresses": [ip], "conditions": {"ready": true}, "nodeName": node});
                location.endpoints(family).into_iter().map(endpoint).collect()
            }));
        }
    }
    for object in &mut objects {
        object["metadata"]["resourceVersion"] = json!("1");
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
