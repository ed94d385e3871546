//! core/v1 Node.

use k8s_openapi::api::core::v1::Node;

use crate::model::NodeView;

use super::{LABEL_ZONE, label};

/// What of a node matters here.
pub fn node(object: Node) -> NodeView {
    let zone = label(&object.metadata, LABEL_ZONE).filter(|zone| !zone.is_empty()).map(str::to_owned);
    NodeView { name: object.metadata.name.unwrap_or_default(), zone }
}
