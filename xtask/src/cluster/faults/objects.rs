//! Objects of the cluster for the faults: pods that answer with their names, and Services in front of them.

use serde_json::{Value, json};

use crate::cluster::image::AGNHOST;
use crate::cluster::plan::Node;

/// Deployment whose pods stay, because long connections end with their pods.
pub(super) const STAY: &str = "stay";
/// Service with session affinity in front of the same pods.
pub(super) const STICKY: &str = "sticky";
/// Number of pods that stay.
pub(super) const PODS: u8 = 4;
/// Cluster addresses of `stay`, TCP at 80 and UDP at 8081.
pub(super) const STAY_V4: &str = "10.96.0.81";
pub(super) const STAY_V6: &str = "fd96::81";
pub(super) const STICKY_V4: &str = "10.96.0.82";
pub(super) const STICKY_V6: &str = "fd96::82";
pub(super) const TCP_PORT: u16 = 30081;
pub(super) const UDP_PORT: u16 = 30082;
pub(super) const STICKY_PORT: u16 = 30083;

/// Returns the objects behind the targets, except those that come and go.
pub(super) fn objects() -> Vec<Value> {
    let mut items = served(STAY, PODS, None);
    let service = |name: &str, addresses: [&str; 2], ports: Value, affinity: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "type": "NodePort",
                "selector": { "app": STAY },
                "clusterIP": addresses[0],
                "clusterIPs": addresses,
                "ipFamilyPolicy": "RequireDualStack",
                "sessionAffinity": affinity,
                "ports": ports,
            },
        })
    };
    items.truncate(1);
    items.push(service(
        STAY,
        [STAY_V4, STAY_V6],
        json!([
            { "name": "tcp", "port": 80, "targetPort": 8080, "nodePort": TCP_PORT },
            { "name": "udp", "protocol": "UDP", "port": 8081, "targetPort": 8081, "nodePort": UDP_PORT },
        ]),
        "None",
    ));
    items.push(service(
        STICKY,
        [STICKY_V4, STICKY_V6],
        json!([{ "port": 80, "targetPort": 8080, "nodePort": STICKY_PORT }]),
        "ClientIP",
    ));
    items
}

/// Names of the objects that [`objects`] returns, as arguments of kubectl.
pub(super) const NAMES: [&str; 3] = ["deployment/stay", "service/stay", "service/sticky"];

/// Returns a deployment whose pods answer with their names, on one node if one is given, and its Service. When they are
/// asked to end, the pods continue to serve for a while, as well-behaved servers do.
pub(super) fn served(name: &str, pods: u8, node: Option<Node>) -> Vec<Value> {
    let labels = json!({ "app": name });
    let container = json!({
        "name": "server",
        "image": AGNHOST,
        "args": ["netexec", "--http-port=8080", "--delay-shutdown=10"],
        "readinessProbe": { "httpGet": { "path": "/healthz", "port": 8080 }, "periodSeconds": 1 },
    });
    let selector = node.map_or(json!({}), |node| json!({ "kubernetes.io/hostname": node.to_string() }));
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "replicas": pods,
            "selector": { "matchLabels": labels },
            "strategy": { "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
            "template": {
                "metadata": { "labels": labels },
                "spec": { "containers": [container], "nodeSelector": selector },
            },
        },
    });
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "selector": labels, "ports": [{ "port": 80, "targetPort": 8080 }] },
    });
    vec![deployment, service]
}
