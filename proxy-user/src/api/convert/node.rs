//! core/v1 Node.

use k8s_openapi::api::core::v1::Node;

use crate::model::NodeView;

use super::{LABEL_ZONE, label};

/// What the cluster autoscaler puts on a node before it takes the machine away.
const TAINT_LEAVES: &str = "ToBeDeletedByClusterAutoscaler";

/// What of a node matters here; when it leaves by kube-proxy's rule (`pkg/proxy/healthcheck/proxy_health.go`).
pub fn node(object: Node) -> NodeView {
    let taints = object.spec.into_iter().flat_map(|spec| spec.taints.unwrap_or_default());
    let leaves = object.metadata.deletion_timestamp.is_some()
        || taints.into_iter().any(|taint| taint.key == TAINT_LEAVES);
    let zone = label(&object.metadata, LABEL_ZONE).filter(|zone| !zone.is_empty()).map(str::to_owned);
    NodeView { name: object.metadata.name.unwrap_or_default(), zone, leaves }
}
