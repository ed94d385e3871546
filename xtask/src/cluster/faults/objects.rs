//! Objects of the cluster for the faults: pods that answer with their names, and Services in front of them.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::cluster::image::AGNHOST;
use crate::cluster::plan::Node;

/// Deployment whose pods stay, because long connections end with their pods.
pub(super) const STAY: &str = "stay";
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
pub(super) fn objects() -> Result<Vec<Value>> {
    let mut items = served(STAY, PODS, None)?;
    items.truncate(1);
    let mut services = include_str!("../../../tools/cluster/stay.yaml").to_owned();
    for (name, value) in [
        ("STAY_V4", STAY_V4),
        ("STAY_V6", STAY_V6),
        ("STICKY_V4", STICKY_V4),
        ("STICKY_V6", STICKY_V6),
        ("TCP_PORT", &TCP_PORT.to_string()),
        ("UDP_PORT", &UDP_PORT.to_string()),
        ("STICKY_PORT", &STICKY_PORT.to_string()),
    ] {
        services = services.replace(name, value);
    }
    items.extend(serde_saphyr::from_str::<Vec<Value>>(&services).context("stay.yaml")?);
    Ok(items)
}

/// Names of the objects that [`objects`] returns, as arguments of kubectl.
pub(super) const NAMES: [&str; 3] = ["deployment/stay", "service/stay", "service/sticky"];

/// Returns a deployment whose pods answer with their names, on one node if one is given, and its Service.
pub(super) fn served(name: &str, pods: u8, node: Option<Node>) -> Result<Vec<Value>> {
    let selector = node.map_or("{}".to_owned(), |node| format!("{{ kubernetes.io/hostname: {node} }}"));
    let text = include_str!("../../../tools/cluster/served.yaml")
        .replace("NAME", name)
        .replace("PODS", &pods.to_string())
        .replace("SELECTOR", &selector)
        .replace("AGNHOST", AGNHOST);
    serde_saphyr::from_str(&text).context("served.yaml")
}

/// The label of the Services of [`many`], as a selector.
pub(super) const MANY: &str = "faults=many";

/// Returns this number of Services of the pods with this label `app`.
pub(super) fn many(app: &str, count: u64) -> Value {
    let service = |number| {
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": format!("many-{number:03}"), "labels": { "faults": "many" } },
            "spec": { "selector": { "app": app }, "ports": [{ "port": 80, "targetPort": 8080 }] },
        })
    };
    json!({ "apiVersion": "v1", "kind": "List", "items": (0..count).map(service).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_are_whole_and_have_their_addresses() {
        let all = [objects().unwrap(), served("x", 3, Some(Node(2))).unwrap()].concat();
        let names: Vec<_> = all.iter().map(|one| one["metadata"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["stay", "stay", "sticky", "x", "x"]);
        assert_eq!(all[2]["spec"]["clusterIPs"], serde_json::json!([STICKY_V4, STICKY_V6]));
        assert_eq!(all[1]["spec"]["ports"][1]["nodePort"], UDP_PORT);
        assert_eq!(all[3]["spec"]["template"]["spec"]["nodeSelector"]["kubernetes.io/hostname"], "node2");
    }
}
