//! A client with which a test reads and changes the cluster's objects.

use std::path::Path;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;

/// A namespaced kind of object.
pub trait Kind:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Serialize
    + DeserializeOwned
    + std::fmt::Debug
{
}

impl Kind for Service {}
impl Kind for EndpointSlice {}

/// A client of the API server, with the rights of its kubeconfig's user.
pub struct Api {
    runtime: Runtime,
    client: Client,
}

impl Api {
    /// Connects with a kubeconfig: to `server`, or to the server in the kubeconfig if that is `None`.
    pub fn connect(kubeconfig: &Path, server: Option<&str>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let mut config = runtime.block_on(Config::from_custom_kubeconfig(
            Kubeconfig::read_from(kubeconfig)?,
            &KubeConfigOptions::default(),
        ))?;
        if let Some(server) = server {
            config.cluster_url = server.parse()?;
        }
        let client = {
            let _inside = runtime.enter();
            Client::try_from(config)?
        };
        Ok(Self { runtime, client })
    }

    /// Sends a GET request for `path`, and returns the body.
    pub fn get_raw(&self, path: &str) -> Result<String> {
        let request = http::Request::get(path).body(Vec::new())?;
        Ok(self.runtime.block_on(self.client.request_text(request))?)
    }

    /// Creates an object of any kind.
    pub fn create_raw(&self, path: &str, object: &Value) -> Result<()> {
        let request = http::Request::post(path).header("content-type", "application/json");
        let request = request.body(serde_json::to_vec(object)?)?;
        self.runtime
            .block_on(self.client.request_text(request))
            .with_context(|| format!("cannot create {object}"))?;
        Ok(())
    }

    /// Removes an object of any kind.
    pub fn delete_raw(&self, path: &str) -> Result<()> {
        let request = http::Request::delete(path).body(Vec::new())?;
        self.runtime
            .block_on(self.client.request_text(request))
            .with_context(|| format!("cannot delete {path}"))?;
        Ok(())
    }

    fn of<K: Kind>(&self, object: &K) -> kube::Api<K> {
        let namespace = object.meta().namespace.as_deref().unwrap_or("default");
        kube::Api::namespaced(self.client.clone(), namespace)
    }

    /// Creates objects with concurrent requests.
    pub fn create_all<K: Kind>(&self, objects: &[K]) -> Result<()> {
        let create = async |object: &K| {
            let result = self.of(object).create(&PostParams::default(), object).await;
            result.with_context(|| format!("cannot create {}", name(object)))
        };
        self.runtime.block_on(
            stream::iter(objects).map(create).buffer_unordered(AT_ONCE).try_for_each(async |_| Ok(())),
        )
    }

    /// Creates an object.
    pub fn create<K: Kind>(&self, object: &K) -> Result<()> {
        self.create_all(std::slice::from_ref(object))
    }

    /// Removes objects with concurrent requests.
    pub fn delete_all<K: Kind>(&self, objects: &[K]) -> Result<()> {
        let delete = async |object: &K| {
            let name = name(object);
            let result = self.of(object).delete(name, &DeleteParams::default()).await;
            result.with_context(|| format!("cannot delete {name}"))
        };
        self.runtime.block_on(
            stream::iter(objects).map(delete).buffer_unordered(AT_ONCE).try_for_each(async |_| Ok(())),
        )
    }

    /// Removes an object of the namespace `default`.
    pub fn delete<K: Kind>(&self, name: &str) -> Result<()> {
        let api = kube::Api::<K>::namespaced(self.client.clone(), "default");
        self.runtime.block_on(api.delete(name, &DeleteParams::default()))?;
        Ok(())
    }

    /// Changes an object of the namespace `default` by a merge patch.
    pub fn patch<K: Kind>(&self, name: &str, patch: &Value) -> Result<()> {
        let api = kube::Api::<K>::namespaced(self.client.clone(), "default");
        let patching = async { api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await };
        self.runtime.block_on(patching).with_context(|| format!("cannot patch {name} with {patch}"))?;
        Ok(())
    }

    /// Creates a node with an address that no host has: agents wait until their node has one.
    pub fn create_node(&self, name: &str) -> Result<()> {
        let addresses = [json!({ "type": "InternalIP", "address": "192.0.2.250" })];
        let node = json!({ "metadata": { "name": name }, "status": { "addresses": addresses } });
        self.create_raw("/api/v1/nodes", &node)
    }

    /// Creates a node, or sets the labels of an existing one.
    pub fn label_node(&self, name: &str, labels: &Value) -> Result<()> {
        let api = kube::Api::<Node>::all(self.client.clone());
        let patch = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": name, "labels": labels },
        });
        let parameters = PatchParams::apply("test").force();
        self.runtime.block_on(api.patch(name, &parameters, &Patch::Apply(&patch)))?;
        Ok(())
    }

    /// Changes a node by a merge patch.
    pub fn patch_node(&self, name: &str, patch: &Value) -> Result<()> {
        let api = kube::Api::<Node>::all(self.client.clone());
        self.runtime.block_on(api.patch(name, &PatchParams::default(), &Patch::Merge(patch)))?;
        Ok(())
    }

    /// Changes an object of any kind by a merge patch.
    pub fn patch_raw(&self, path: &str, patch: &Value) -> Result<()> {
        let request = http::Request::patch(path).header("content-type", "application/merge-patch+json");
        let request = request.body(serde_json::to_vec(patch)?)?;
        self.runtime
            .block_on(self.client.request_text(request))
            .with_context(|| format!("cannot patch {path} with {patch}"))?;
        Ok(())
    }

    /// Deletes a node; the object disappears once it has no finalizer.
    pub fn delete_node(&self, name: &str) -> Result<()> {
        let api = kube::Api::<Node>::all(self.client.clone());
        self.runtime.block_on(api.delete(name, &DeleteParams::default()))?;
        Ok(())
    }

    /// Returns all Services.
    pub fn services(&self) -> Result<Vec<Service>> {
        self.list()
    }

    /// Returns all EndpointSlices.
    pub fn slices(&self) -> Result<Vec<EndpointSlice>> {
        self.list()
    }

    /// Returns the node, or `None` if it does not exist.
    pub fn node(&self, name: &str) -> Result<Option<Node>> {
        let api = kube::Api::<Node>::all(self.client.clone());
        Ok(self.runtime.block_on(api.get_opt(name))?)
    }

    fn list<K: Kind>(&self) -> Result<Vec<K>> {
        let api = kube::Api::<K>::all(self.client.clone());
        Ok(self.runtime.block_on(api.list(&ListParams::default()))?.items)
    }

    /// Removes all objects that cases have created: everything but the API server's own Service and slice.
    pub fn clear(&self) -> Result<()> {
        let others = ListParams::default().fields("metadata.name!=kubernetes");
        for namespace in ["default", "other"] {
            self.clear_in::<Service>(namespace, &others)?;
            self.clear_in::<EndpointSlice>(namespace, &others)?;
        }
        let nodes = kube::Api::<Node>::all(self.client.clone());
        self.runtime.block_on(nodes.delete_collection(&DeleteParams::default(), &ListParams::default()))?;
        Ok(())
    }

    fn clear_in<K: Kind>(&self, namespace: &str, which: &ListParams) -> Result<()> {
        let api = kube::Api::<K>::namespaced(self.client.clone(), namespace);
        self.runtime.block_on(api.delete_collection(&DeleteParams::default(), which))?;
        Ok(())
    }
}

fn name<K: Kind>(object: &K) -> &str {
    object.meta().name.as_deref().unwrap_or_default()
}
