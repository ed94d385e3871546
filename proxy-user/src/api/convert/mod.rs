//! From Kubernetes' types to ours: the edge behind which everything has been checked.
//!
//! A part that cannot be used is left out and becomes a [`Problem`]; the rest of the object counts. An object
//! that is none of our business converts to `None`.

pub mod address;
mod node;
mod removal;
mod service;
mod service_cidr;
mod slice;
mod spread;

use std::fmt::Display;
use std::num::NonZero;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::model::net::Protocol;
use crate::model::{Problem, ServiceName, SliceName, Version};

pub use node::node;
pub use service::service;
pub use service_cidr::service_cidr;
pub use slice::slice;

/// The Service that an EndpointSlice belongs to.
pub const LABEL_SERVICE_NAME: &str = "kubernetes.io/service-name";
/// An object that another proxy serves.
pub const LABEL_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// An EndpointSlice of a headless Service. On a Service the label means nothing, as for kube-proxy 1.36.
pub const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
/// The zone of a node.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// When what a slice tells of happened, RFC 3339.
pub const ANNOTATION_TRIGGERED: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The name of a Service object.
pub fn service_name(metadata: &ObjectMeta) -> ServiceName {
    ServiceName::new(namespace(metadata), metadata.name.clone().unwrap_or_default())
}

/// The name of an `EndpointSlice` object.
pub fn slice_name(metadata: &ObjectMeta) -> SliceName {
    SliceName::new(namespace(metadata), metadata.name.clone().unwrap_or_default())
}

/// The edition of an object.
fn version(metadata: &ObjectMeta) -> Version {
    let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
    Version {
        uid: text(&metadata.uid),
        resource_version: text(&metadata.resource_version),
        // The API leaves out a generation of 0.
        generation: metadata.generation.and_then(NonZero::new),
    }
}

fn namespace(metadata: &ObjectMeta) -> &str {
    match metadata.namespace.as_deref() {
        None | Some("") => "default",
        Some(namespace) => namespace,
    }
}

fn label<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.labels.as_ref()?.get(key).map(String::as_str)
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// The problems of one object.
struct Problems {
    object: String,
    found: Vec<Problem>,
}

impl Problems {
    fn of(object: String) -> Self {
        Self { object, found: Vec::new() }
    }

    fn add(&mut self, field: impl Into<String>, message: &dyn Display) {
        let (object, field, message) = (self.object.clone(), field.into(), message.to_string());
        self.found.push(Problem { object, field, message });
    }
}

fn protocol(text: Option<&str>) -> Option<Protocol> {
    match text {
        None | Some("" | "TCP") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some("SCTP") => Some(Protocol::Sctp),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests;
