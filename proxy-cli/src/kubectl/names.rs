//! Translates names of objects to arguments of `ballast` on a node.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;

use super::cluster::Cluster;
use super::error::KubectlError;
use crate::args::list::{NamespaceArgs, SelectorArgs};
use crate::question::DestinationArg;
use crate::selector::{ServiceFilter, ServiceSelector, with_labels};
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_watch::api::pod::{Pod, pods};

/// The client of a connection, as `ballast explain` on its node accepts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Client {
    /// `pod`, `host`, or an address.
    pub is: String,
    /// Node of the client; `None`: unknown.
    pub node: Option<String>,
    /// Description of the client.
    pub description: String,
}

/// The name of an object, like `pod/default/web` or `svc/db:5432`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named<'a> {
    /// `None`: the namespace of the kubeconfig.
    pub namespace: Option<&'a str>,
    pub name: &'a str,
    /// The part after the colon; it may have a protocol after a slash.
    pub port: Option<&'a str>,
}

/// Parses the name of an object; `None` if the text does not start with one of these kinds and a slash.
pub(super) fn named<'a>(text: &'a str, kinds: &[&str]) -> Option<Named<'a>> {
    let (kind, rest) = text.split_once('/')?;
    if !kinds.contains(&kind.to_lowercase().as_str()) {
        return None;
    }
    let (path, port) = rest.split_once(':').map_or((rest, None), |(path, port)| (path, Some(port)));
    let (namespace, name) = path.split_once('/').map_or((None, path), |(space, name)| (Some(space), name));
    Some(Named { namespace, name, port })
}

const PODS: &[&str] = &["pod", "pods", "po"];
const NODES: &[&str] = &["node", "nodes", "no"];
/// Names that kubectl accepts for Services.
pub(super) const SERVICES: &[&str] = &["service", "services", "svc"];

/// Resolves the client of a connection.
pub(super) async fn client(cluster: &Cluster, text: &str) -> Result<Client, KubectlError> {
    if let Some(Named { name, .. }) = named(text, NODES) {
        let description = format!("a process of node {name}");
        return Ok(Client { is: "host".to_owned(), node: Some(name.to_owned()), description });
    }
    let Some(Named { namespace, name, .. }) = named(text, PODS) else {
        return Ok(Client { is: text.to_owned(), node: None, description: text.to_owned() });
    };
    let namespace = namespace.unwrap_or(&cluster.namespace);
    let pods = pods(cluster.client.clone(), Some(namespace));
    let found = cluster.request("get the pod", pods.get_opt(name)).await?;
    let Some(pod) = found else {
        let names = cluster.request("list pods", names(&pods)).await?;
        return Err(missing("pod", namespace, name, &names));
    };
    of_pod(namespace, name, pod)
}

/// Returns the client of a pod; a pod in the host's network is a process of its node.
pub(super) fn of_pod(namespace: &str, name: &str, pod: Pod) -> Result<Client, KubectlError> {
    let spec = pod.spec;
    let Some(node) = spec.node_name else {
        let error = format!("pod {namespace}/{name} is not scheduled to a node yet");
        return Err(KubectlError::Name(error));
    };
    let is = if spec.host_network == Some(true) { "host" } else { "pod" };
    Ok(Client { is: is.to_owned(), node: Some(node), description: format!("pod {namespace}/{name}") })
}

/// Resolves the destination of a connection to an argument of `ballast explain`.
pub(super) async fn destination(cluster: &Cluster, text: &str) -> Result<String, KubectlError> {
    let Some(Named { namespace, name, port }) = named(text, SERVICES) else {
        let Ok(DestinationArg::Service(name, protocol)) = text.parse() else { return Ok(text.to_owned()) };
        let flags = NamespaceArgs::default();
        let filter = ServiceFilter::parse_with_default(&name, &flags, &cluster.namespace)?;
        return Ok(protocol.map_or_else(|| filter.to_string(), |protocol| format!("{filter}/{protocol}")));
    };
    let service = service(cluster, namespace, name).await?;
    address(&service, port).map_err(|error| KubectlError::Name(format!("{text}: {error}")))
}

/// Returns a Service from the API server.
pub(super) async fn service(
    cluster: &Cluster,
    namespace: Option<&str>,
    name: &str,
) -> Result<Service, KubectlError> {
    let namespace = namespace.unwrap_or(&cluster.namespace);
    let services: Api<Service> = Api::namespaced(cluster.client.clone(), namespace);
    if let Some(service) = cluster.request("get the Service", services.get_opt(name)).await? {
        return Ok(service);
    }
    let names = cluster.request("list Services", names(&services)).await?;
    Err(missing("Service", namespace, name, &names))
}

/// Returns the names of all objects; the API server sends their metadata only.
async fn names<K: Clone + DeserializeOwned + Debug>(api: &Api<K>) -> Result<Vec<String>, kube::Error> {
    let all = api.list_metadata(&ListParams::default()).await?.items;
    Ok(all.into_iter().filter_map(|object| object.metadata.name).collect())
}

/// Evaluates the arguments that select Services; asks the API server if they contain labels.
pub(super) async fn selector(
    cluster: &Cluster,
    args: &SelectorArgs,
) -> Result<ServiceSelector, KubectlError> {
    let services = cluster.filters(args)?;
    let namespace = args.namespace.namespace.clone().filter(|_| !args.namespace.all_namespaces);
    let Some(labels) = &args.selector else {
        return Ok(ServiceSelector { namespace, labelled: None, services });
    };
    let (all, labelled) = (Api::<Service>::all(cluster.client.clone()), ListParams::default().labels(labels));
    let all = cluster.request("list Services", all.list(&labelled)).await?.items.into_iter();
    let name = |service: Service| Some((service.metadata.namespace?, service.metadata.name?));
    let labelled = with_labels(labels, all.filter_map(name).collect())?;
    Ok(ServiceSelector { namespace, labelled: Some(labelled), services })
}

fn missing(kind: &str, namespace: &str, name: &str, known: &[String]) -> KubectlError {
    let meant = did_you_mean(&nearest(name, known.iter().map(String::as_str)));
    KubectlError::Name(format!("there is no {kind} {namespace}/{name}{meant}"))
}

/// Returns `10.96.0.10:80/tcp` for a Service's port. `port` is like `80`, `http` or `53/udp`; optional if there is only one.
pub(super) fn address(service: &Service, port: Option<&str>) -> Result<String, String> {
    let spec = service.spec.clone().unwrap_or_default();
    let ip = spec.cluster_ip.filter(|ip| !ip.is_empty() && ip != "None");
    let ip = ip.ok_or("the Service is headless: clients connect directly to its endpoints")?;
    let all = spec.ports.unwrap_or_default();
    let protocol =
        |of: &k8s_openapi::api::core::v1::ServicePort| of.protocol.as_deref().unwrap_or("TCP").to_lowercase();
    let (wanted, wanted_protocol) = match port.map(|port| port.split_once('/').unwrap_or((port, ""))) {
        None => (None, String::new()),
        Some((port, protocol)) => (Some(port), protocol.to_lowercase()),
    };
    let is_meant = |one: &&k8s_openapi::api::core::v1::ServicePort| {
        wanted.is_none_or(|port| one.port.to_string() == port || one.name.as_deref() == Some(port))
            && (wanted_protocol.is_empty() || protocol(one) == wanted_protocol)
    };
    let meant: Vec<_> = all.iter().filter(is_meant).collect();
    // As everywhere, the protocol is TCP unless another one is named.
    let tcp: Vec<_> = meant.iter().copied().filter(|one| protocol(one) == "tcp").collect();
    let (([one], _) | (_, [one])) = (meant.as_slice(), tcp.as_slice()) else {
        let ports = all.iter().map(|one| {
            let name = one.name.as_deref().map(|name| format!(" ({name})")).unwrap_or_default();
            format!("{}/{}{name}", one.port, protocol(one))
        });
        return Err(format!("give one of its ports: {}", ports.collect::<Vec<_>>().join(", ")));
    };
    let host = if ip.contains(':') { format!("[{ip}]") } else { ip };
    Ok(format!("{host}:{}/{}", one.port, protocol(one)))
}
