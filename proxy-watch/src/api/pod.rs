//! Pods with the fields that are read: the decoder of the whole type would be half a megabyte of the program.

use k8s_openapi::api::core::v1 as whole;
use kube::core::{ApiResource, Object};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::Value;

/// A pod.
pub type Pod = Object<PodSpec, PodStatus>;

/// The fields of `spec`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The node that runs the pod, if one has been chosen.
    pub node_name: Option<String>,
    /// Where it may run: a `DaemonSet` names the node here before one has been chosen.
    pub affinity: Value,
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
    /// Why it is in this phase, if the kubelet says it.
    pub reason: Option<String>,
    /// Conditions with their reasons, like `Unschedulable`.
    pub conditions: Vec<Value>,
    /// States of the containers that run first.
    pub init_container_statuses: Vec<Value>,
    /// States of the containers.
    pub container_statuses: Vec<Value>,
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

impl PodSpec {
    /// Returns the node that runs the pod, or the one for which a `DaemonSet` has made it.
    pub fn node(&self) -> Option<&str> {
        const NAMED: &str = "/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchFields/0/values/0";
        self.node_name.as_deref().or_else(|| self.affinity.pointer(NAMED)?.as_str())
    }
}

impl PodStatus {
    /// Returns phase and reason of a pod that does not run, like `Pending (ImagePullBackOff)`.
    pub fn words(&self) -> String {
        let text = |value: &Value, at: &str| value.pointer(at).and_then(Value::as_str).map(str::to_owned);
        let mut waiting = self.init_container_statuses.iter().chain(&self.container_statuses);
        let reason = (self.reason.clone())
            .or_else(|| waiting.find_map(|one| text(one, "/state/waiting/reason")))
            .or_else(|| self.conditions.iter().find_map(|one| text(one, "/reason")));
        let phase = self.phase.as_deref().unwrap_or("Unknown");
        reason.map_or_else(|| phase.to_owned(), |reason| format!("{phase} ({reason})"))
    }
}

/// Returns the pods of a namespace, or of all.
pub fn pods(client: Client, namespace: Option<&str>) -> Api<Pod> {
    let resource = ApiResource::erase::<whole::Pod>(&());
    match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    }
}
