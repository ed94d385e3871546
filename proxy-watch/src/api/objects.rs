//! Kubernetes objects, with only the fields that the agent reads.
//!
//! The full types decode every field. The largest fields (`managedFields`, references to pods, conditions of nodes) are
//! not used here; these types skip them, which costs no memory and little time.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::api::networking::v1 as networking;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Deserializer};

/// A core/v1 Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Service {
    /// The metadata, with the fields that are read.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    /// The desired state.
    pub spec: Option<core::ServiceSpec>,
    /// The observed state.
    pub status: Option<core::ServiceStatus>,
}

/// A discovery/v1 `EndpointSlice`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSlice {
    /// The metadata, with the fields that are read.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    /// `IPv4`, `IPv6` or `FQDN`.
    pub address_type: String,
    /// Its endpoints.
    #[serde(deserialize_with = "or_default")]
    pub endpoints: Vec<Endpoint>,
    /// The ports of the endpoints.
    pub ports: Option<Vec<discovery::EndpointPort>>,
}

/// An endpoint of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Endpoint {
    /// Its addresses.
    #[serde(deserialize_with = "or_default")]
    pub addresses: Vec<String>,
    /// Whether it is ready, serving and terminating.
    pub conditions: Option<discovery::EndpointConditions>,
    /// The name of the node on which it runs.
    pub node_name: Option<String>,
    /// The zone of that node.
    pub zone: Option<String>,
    /// The zones and nodes whose clients should use it.
    pub hints: Option<discovery::EndpointHints>,
}

/// A core/v1 Node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The metadata, with the fields that are read.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    /// The desired state.
    pub spec: Option<core::NodeSpec>,
    /// The observed state.
    pub status: Option<NodeStatus>,
}

/// Another core/v1 Node, of which only the addresses are read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct OtherNode {
    /// The metadata, with the fields that are read.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    /// The observed state.
    pub status: Option<NodeStatus>,
}

/// The observed state of a node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Its addresses.
    pub addresses: Option<Vec<core::NodeAddress>>,
}

/// A networking/v1 `ServiceCIDR`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ServiceCidr {
    /// The metadata, with the fields that are read.
    #[serde(deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    /// The desired state.
    pub spec: Option<networking::ServiceCIDRSpec>,
}

/// The metadata fields that are read: names, versions, labels, annotations and times.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
}

fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let read = Metadata::deserialize(deserializer)?;
    let Metadata { name, namespace, uid, resource_version, generation, labels, annotations, .. } = read;
    let Metadata { creation_timestamp, deletion_timestamp, .. } = read;
    Ok(ObjectMeta {
        name,
        namespace,
        uid,
        resource_version,
        generation,
        labels,
        annotations,
        creation_timestamp,
        deletion_timestamp,
        ..ObjectMeta::default()
    })
}

/// Decodes `null` like an absent field, as the full types do.
fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

macro_rules! resource {
    ($($name:ident is $full:ty, $scope:ty;)+) => {$(
        impl kube::Resource for $name {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                <$full as kube::Resource>::kind(&())
            }

            fn group((): &()) -> Cow<'_, str> {
                <$full as kube::Resource>::group(&())
            }

            fn version((): &()) -> Cow<'_, str> {
                <$full as kube::Resource>::version(&())
            }

            fn plural((): &()) -> Cow<'_, str> {
                <$full as kube::Resource>::plural(&())
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    )+};
}

resource! {
    Service is core::Service, NamespaceResourceScope;
    EndpointSlice is discovery::EndpointSlice, NamespaceResourceScope;
    Node is core::Node, ClusterResourceScope;
    OtherNode is core::Node, ClusterResourceScope;
    ServiceCidr is networking::ServiceCIDR, ClusterResourceScope;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_are_not_read_may_have_any_value() {
        let slice: EndpointSlice = serde_json::from_value(json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "a", "resourceVersion": "7", "labels": { "x": "y" },
                "managedFields": [{ "fieldsV1": { "f:endpoints": {} } }], "ownerReferences": 5,
            },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": ["10.0.0.1"], "targetRef": [], "deprecatedTopology": 1, "nodeName": "n" }],
            "ports": null,
        }))
        .unwrap();
        assert_eq!(slice.metadata.resource_version.as_deref(), Some("7"));
        assert_eq!(slice.metadata.managed_fields, None);
        assert_eq!(slice.endpoints[0].node_name.as_deref(), Some("n"));
        let node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n" },
            "status": { "images": "?", "addresses": [{ "type": "InternalIP", "address": "10.0.0.9" }] },
        }))
        .unwrap();
        assert_eq!(node.status.unwrap().addresses.unwrap()[0].address, "10.0.0.9");
    }

    #[test]
    fn null_and_absence_are_the_same() {
        let text = r#"{"metadata": {"labels": null}, "addressType": "IPv4", "endpoints": null}"#;
        let slice: EndpointSlice = serde_json::from_str(text).unwrap();
        assert!(slice.endpoints.is_empty() && slice.ports.is_none() && slice.metadata.labels.is_none());
    }

    #[test]
    fn partial_types_have_the_urls_of_the_full_types() {
        assert_eq!(
            <ServiceCidr as kube::Resource>::url_path(&(), None),
            "/apis/networking.k8s.io/v1/servicecidrs"
        );
        assert_eq!(<Service as kube::Resource>::url_path(&(), None), "/api/v1/services");
    }
}
