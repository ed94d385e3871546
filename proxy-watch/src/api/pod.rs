//! Pods with the fields that are read: the decoder of the whole type would be half a megabyte of the program.

use k8s_openapi::api::core::v1 as whole;
use kube::core::{ApiResource, Object};
use kube::{Api, Client};
use serde::Deserialize;

/// A pod.
pub type Pod = Object<PodSpec, PodStatus>;

/// The fields of `spec`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The node that runs the pod, if one has been chosen.
    pub node_name: Option<String>,
    /// Whether the pod is in the node's network namespace.
    pub host_network: Option<bool>,
    /// The containers.
    pub containers: Vec<Container>,
}

/// A container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Container {
    /// Its ports.
    pub ports: Option<Vec<ContainerPort>>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerPort {
    /// Its name.
    pub name: Option<String>,
    /// Its number.
    pub container_port: i32,
}

/// The fields of `status`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// `Running`, and others.
    pub phase: Option<String>,
    /// The pod's addresses.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
}

/// An address of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodIp {
    /// The address.
    pub ip: String,
}

/// Returns the pods of a namespace, or of all.
pub fn pods(client: Client, namespace: Option<&str>) -> Api<Pod> {
    let resource = ApiResource::erase::<whole::Pod>(&());
    match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    }
}
