//! Converts a core/v1 Node.

use crate::api::objects::Node;
use proxy_core::model::NodeView;

use super::{LABEL_ZONE, address, label};

/// The taint that the cluster autoscaler adds to a node before it removes the machine.
const TAINT_LEAVES: &str = "ToBeDeletedByClusterAutoscaler";

/// The label that the kubelet gives to its node: the name of the operating system, as Go names it.
const LABEL_OS: &str = "kubernetes.io/os";

/// Converts the parts of a node that are used. Whether the node is leaving follows kube-proxy's rule
/// (`pkg/proxy/healthcheck/proxy_health.go`). Addresses and ranges that cannot be parsed are left out: each of their
/// uses has its own fallback.
pub fn node(object: Node) -> NodeView {
    let spec = object.spec.unwrap_or_default();
    let is_leaving = object.metadata.deletion_timestamp.is_some()
        || spec.taints.iter().flatten().any(|taint| taint.key == TAINT_LEAVES);
    let zone = label(&object.metadata, LABEL_ZONE).filter(|zone| !zone.is_empty()).map(str::to_owned);
    let is_other_os = label(&object.metadata, LABEL_OS).is_some_and(|os| os != "linux");
    let addresses = object.status.and_then(|status| status.addresses).unwrap_or_default();
    let of_type = |kind: &str| {
        let texts = addresses.iter().filter(|address| address.type_ == kind);
        texts.filter_map(|text| address::parse(&text.address).ok()).collect()
    };
    let pod_cidrs = match spec.pod_cidrs {
        Some(many) if !many.is_empty() => many,
        _ => spec.pod_cidr.into_iter().collect(),
    };
    NodeView {
        name: object.metadata.name.unwrap_or_default(),
        zone,
        internal_ips: of_type("InternalIP"),
        external_ips: of_type("ExternalIP"),
        pod_cidrs: pod_cidrs.iter().filter_map(|range| address::range(range).ok()).collect(),
        is_leaving,
        is_other_os,
    }
}
