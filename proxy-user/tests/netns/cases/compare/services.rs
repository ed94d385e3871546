//! Random Services and their endpoints. The same seed gives the same objects.

use serde_json::{Value, json};

use crate::nodes::{link_ip, node_ip, pod_ip};
use proxy_testbed::Family;

/// A random number generator (`SplitMix64`).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % count as u64) as usize
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// Returns the zone of a node.
pub fn zone(node: u8) -> &'static str {
    if node == 2 { "west" } else { "east" }
}

/// Places of endpoints: node and pod; pod 0 is a process of the node.
const PLACES: [(u8, u8); 6] = [(1, 2), (1, 3), (2, 2), (3, 2), (1, 0), (3, 0)];

/// Addresses of pods at which nothing listens.
pub const SILENT: [(u8, u8); 2] = [(2, 77), (2, 78)];

/// Returns an address outside the cluster that is routed to node 1: of a load balancer (113), or an external one (114).
pub fn external(family: Family, net: u8, number: u8) -> String {
    match family {
        Family::V4 => format!("203.0.{net}.{number}"),
        Family::V6 => format!("fdee:{net}::{number}"),
    }
}

/// A Service as it is created, its status, and its EndpointSlices.
pub struct Made {
    pub name: String,
    pub service: Value,
    pub status: Option<Value>,
    pub slices: Vec<Value>,
}

impl Made {
    /// Whether one of the endpoints does not name its node.
    pub fn has_nameless(&self) -> bool {
        let endpoints =
            self.slices.iter().flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten());
        endpoints.into_iter().any(|endpoint| endpoint["nodeName"].is_null())
    }

    /// Whether nothing listens at the endpoints.
    pub fn has_silent(&self) -> bool {
        let of = |(node, pod)| Family::BOTH.map(|family| pod_ip(family, node, pod).to_string());
        let silent: Vec<_> = SILENT.into_iter().flat_map(of).collect();
        let endpoints =
            self.slices.iter().flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten());
        let mut addresses = endpoints.into_iter().filter_map(|endpoint| endpoint["addresses"][0].as_str());
        addresses.any(|address| silent.iter().any(|one| one == address))
    }
}

/// Returns the Service with this number.
pub fn service(number: u8, random: &mut Random) -> Made {
    let name = format!("s{number}");
    let kind = random.one(&["ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer"]);
    let mut spec = json!({
        "type": kind,
        "ipFamilyPolicy": "RequireDualStack",
        "internalTrafficPolicy": random.one(&["Cluster", "Cluster", "Local"]),
        "ports": [
            { "name": "tcp", "port": 80, "protocol": "TCP" },
            { "name": "udp", "port": 53, "protocol": "UDP" },
        ],
    });
    if kind != "ClusterIP" {
        spec["externalTrafficPolicy"] = random.one(&["Cluster", "Local"]).into();
    }
    if random.below(4) == 0 {
        spec["sessionAffinity"] = "ClientIP".into();
    }
    if random.below(2) == 0 {
        spec["externalIPs"] = Family::BOTH.map(|family| external(family, 114, number)).to_vec().into();
    }
    match random.below(6) {
        0 => spec["trafficDistribution"] = "PreferSameZone".into(),
        1 => spec["trafficDistribution"] = "PreferSameNode".into(),
        _ => {}
    }
    let mut status = None;
    if kind == "LoadBalancer" {
        let outside = Family::BOTH.map(|family| (link_ip(family, 30, 100), family));
        let all = [("10.244.0.0/16", "fd44::/16"), ("198.51.100.0/24", "2001:db8::/32")];
        match random.below(4) {
            0 => {
                let ranges = outside.map(|(ip, family)| format!("{ip}/{}", width(family)));
                spec["loadBalancerSourceRanges"] = ranges.to_vec().into();
            }
            1 => {
                let (v4, v6) = random.one(&all);
                spec["loadBalancerSourceRanges"] = json!([v4, v6]);
            }
            _ => {}
        }
        if random.below(5) == 0 {
            spec["allocateLoadBalancerNodePorts"] = false.into();
        }
        let mode = random.one(&["VIP", "VIP", "Proxy"]);
        let ingress =
            Family::BOTH.map(|family| json!({ "ip": external(family, 113, number), "ipMode": mode }));
        status = Some(json!({ "status": { "loadBalancer": { "ingress": ingress } } }));
    }
    let labels = match random.below(10) {
        0 => json!({ "service.kubernetes.io/service-proxy-name": "another" }),
        1 => json!({ "service.kubernetes.io/headless": "" }),
        _ => json!({}),
    };
    let service = json!({ "metadata": { "name": name, "labels": labels }, "spec": spec });
    Made { slices: slices(&name, random), name, service, status }
}

const fn width(family: Family) -> u8 {
    match family {
        Family::V4 => 32,
        Family::V6 => 128,
    }
}

/// An endpoint, the same in both families.
#[derive(Clone, Copy)]
struct Endpoint {
    node: u8,
    pod: u8,
    state: &'static str,
    names_node: bool,
    hints: &'static str,
    slice: usize,
}

impl Endpoint {
    fn object(&self, family: Family) -> Value {
        let Self { node, pod, state, .. } = *self;
        let ip = if pod == 0 { node_ip(family, node) } else { pod_ip(family, node, pod) };
        let mut object = json!({
            "addresses": [ip],
            "conditions": {
                "ready": state == "ready",
                "serving": state != "gone",
                "terminating": state != "ready",
            },
        });
        if self.names_node {
            object["nodeName"] = format!("node{node}").into();
            object["zone"] = zone(node).into();
        }
        match self.hints {
            "zones" => object["hints"] = json!({ "forZones": [{ "name": zone(node) }] }),
            "nodes" => {
                object["hints"] = json!({
                    "forZones": [{ "name": zone(node) }],
                    "forNodes": [{ "name": format!("node{node}") }],
                });
            }
            _ => {}
        }
        object
    }
}

/// Returns zero to four endpoints, most of them ready, in one slice of each family or in two. One endpoint may be in both.
fn slices(name: &str, random: &mut Random) -> Vec<Value> {
    // If one endpoint of several refused, what a client finds would be chance.
    let (mut places, counts) = if random.below(6) == 0 {
        (SILENT.to_vec(), [1, 1, 1, 2, 2, 2])
    } else {
        (PLACES.to_vec(), [0, 1, 1, 2, 3, 4])
    };
    let count = random.one(&counts);
    let of_slices = random.one(&[1, 1, 2]);
    // Controllers give hints to all endpoints of a Service; one endpoint without hints disables them.
    let hints = random.one(&["", "", "zones", "nodes"]);
    let mut chosen: Vec<_> = (0..count)
        .map(|_| {
            let (node, pod) = places.remove(random.below(places.len()));
            let state = random.one(&["ready", "ready", "ready", "ready", "draining", "gone"]);
            let hints = if random.below(8) == 0 { "" } else { hints };
            Endpoint {
                node,
                pod,
                state,
                names_node: random.below(6) != 0,
                hints,
                slice: random.below(of_slices),
            }
        })
        .collect();
    if let Some(first) = chosen.first().filter(|_| of_slices == 2 && random.below(2) == 0) {
        // If both entries of an endpoint terminate, kube-proxy does not define which one counts.
        let state = if first.state == "ready" { "draining" } else { "ready" };
        chosen.push(Endpoint { slice: 1 - first.slice, state, ..*first });
    }
    let slice = |(family, label, number): (Family, &str, usize)| {
        let endpoints = chosen.iter().filter(|endpoint| endpoint.slice == number);
        json!({
            "metadata": {
                "name": format!("{name}-{}-{number}", label.to_lowercase()),
                "labels": { "kubernetes.io/service-name": name },
            },
            "addressType": label,
            "endpoints": endpoints.map(|endpoint| endpoint.object(family)).collect::<Vec<_>>(),
            "ports": [
                { "name": "tcp", "port": 8080, "protocol": "TCP" },
                { "name": "udp", "port": 5353, "protocol": "UDP" },
            ],
        })
    };
    let families = Family::BOTH.into_iter().zip(["IPv4", "IPv6"]);
    families.flat_map(|(family, label)| (0..of_slices).map(move |n| (family, label, n))).map(slice).collect()
}
