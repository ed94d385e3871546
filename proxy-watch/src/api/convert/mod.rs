//! Converts Kubernetes types to the agent's model. All values are checked here, so that the model holds only valid ones.
//!
//! A part that cannot be used is left out and becomes a [`Problem`]; the rest of the object is used. An object that the
//! agent does not serve converts to `None`.

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

use proxy_core::model::net::Protocol;
use proxy_core::model::problem::{MOST_PROBLEMS, printable};
use proxy_core::model::{Problem, ServiceName, SliceName, Version};

pub use node::node;
pub use service::service;
pub use service_cidr::service_cidr;
pub use slice::slice;

/// The label with the name of an EndpointSlice's Service.
pub const LABEL_SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label of an object that another proxy serves.
pub const LABEL_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label of an EndpointSlice of a headless Service. On a Service it has no meaning, as for kube-proxy 1.36.
pub const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
/// The label with the zone of a node.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// The annotation with the time of the change that a slice reports, in RFC 3339 format.
pub const ANNOTATION_TRIGGERED: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// Returns the name of a Service object.
pub fn service_name(metadata: &ObjectMeta) -> ServiceName {
    ServiceName::new(namespace(metadata), metadata.name.clone().unwrap_or_default())
}

/// Returns the name of an `EndpointSlice` object.
pub fn slice_name(metadata: &ObjectMeta) -> SliceName {
    SliceName::new(namespace(metadata), metadata.name.clone().unwrap_or_default())
}

/// Returns the version of an object.
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

/// The most characters of a problem's message, which may quote the object.
const MOST_MESSAGE: usize = 400;

/// The problems of one object.
struct Problems {
    object: String,
    found: Vec<Problem>,
}

impl Problems {
    fn of(object: &str) -> Self {
        Self { object: printable(object), found: Vec::new() }
    }

    fn add(&mut self, field: impl Into<String>, message: &dyn Display) {
        // An object may have as many faults as it has bytes: its author needs the first ones.
        if self.found.len() > MOST_PROBLEMS {
            return;
        }
        let (object, field) = (self.object.clone(), printable(&field.into()));
        let message = if self.found.len() == MOST_PROBLEMS {
            "there are more problems, which are not listed".to_owned()
        } else {
            printable(&message.to_string())
        };
        let end = message.char_indices().map(|(at, _)| at).nth(MOST_MESSAGE);
        let message =
            end.and_then(|end| message.get(..end)).map_or(message.clone(), |cut| format!("{cut}..."));
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
