//! Requests of commands about endpoints and pods.

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client};

use super::convert::LABEL_SERVICE_NAME;
use super::pod::{Pod, pods};
use proxy_core::model::lookup::{Place, Places, PodFacts};
use proxy_core::model::problem::printable;

/// The number of slices in one answer.
const PAGE: u32 = 500;

/// Returns the places of the endpoints of a namespace, or of all.
pub async fn places(client: Client, namespace: Option<&str>) -> Result<Places, kube::Error> {
    let slices: Api<EndpointSlice> = match namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    };
    let (mut places, mut params) = (Places::new(), ListParams::default().limit(PAGE));
    loop {
        let page = slices.list(&params).await?;
        places.extend(page.items.into_iter().flat_map(of_slice));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(places),
        }
    }
}

/// Returns the places of the endpoints of a slice.
fn of_slice(slice: EndpointSlice) -> Places {
    let labels = slice.metadata.labels.unwrap_or_default();
    let Some(service) = labels.get(LABEL_SERVICE_NAME) else { return Places::new() };
    let namespace = slice.metadata.namespace.unwrap_or_default();
    let endpoints = slice.endpoints.into_iter().flat_map(|endpoint| {
        let pod = endpoint.target_ref.filter(|target| target.kind.as_deref() == Some("Pod"));
        // The API server does not check names in references, and zones.
        let escaped = |text: Option<String>| text.map(|text| printable(&text));
        let place = Place {
            pod: escaped(pod.and_then(|target| target.name)),
            node: escaped(endpoint.node_name),
            zone: escaped(endpoint.zone),
        };
        endpoint.addresses.into_iter().map(move |address| (address, place.clone()))
    });
    endpoints
        .filter_map(|(address, place)| {
            Some(((namespace.clone(), service.clone(), address.parse().ok()?), place))
        })
        .collect()
}

/// Returns a pod; if it does not exist, the names of the pods of the namespace.
pub async fn pod(
    client: Client,
    namespace: &str,
    name: &str,
) -> Result<Result<PodFacts, Vec<String>>, kube::Error> {
    let pods = pods(client, Some(namespace));
    if let Some(pod) = pods.get_opt(name).await? {
        return Ok(Ok(of_pod(pod)));
    }
    let others = pods.list_metadata(&ListParams::default()).await?.items;
    Ok(Err(others.into_iter().filter_map(|pod| pod.metadata.name).collect()))
}

fn of_pod(pod: Pod) -> PodFacts {
    let (spec, status) = (pod.spec, pod.status.unwrap_or_default());
    let addresses = status.pod_ips.unwrap_or_default().into_iter().filter_map(|ip| ip.ip.parse().ok());
    PodFacts {
        node: spec.node_name,
        has_host_network: spec.host_network == Some(true),
        addresses: addresses.collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slice_gives_pod_node_and_zone_of_its_endpoints() {
        let slice = json!({
            "metadata": {"namespace": "shop", "name": "web-1", "labels": {LABEL_SERVICE_NAME: "web"}},
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": ["10.0.0.7"], "nodeName": "a", "zone": "eu-1a", "targetRef": {"kind": "Pod", "name": "web-0"}},
                {"addresses": ["10.0.0.8"], "targetRef": {"kind": "Node", "name": "b"}},
                {"addresses": ["10.0.0.9"], "zone": "a\nb", "targetRef": {"kind": "Pod", "name": "\u{1b}[2J"}},
            ],
        });
        let places = of_slice(serde_json::from_value(slice).unwrap());
        let of = |last: u8| places[&("shop".to_owned(), "web".to_owned(), [10, 0, 0, last].into())].clone();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of(7), Place { pod: some("web-0"), node: some("a"), zone: some("eu-1a") });
        assert_eq!(of(8), Place::default());
        assert_eq!(of(9), Place { pod: some(r"\u{1b}[2J"), node: None, zone: some(r"a\nb") });
    }

    #[test]
    fn a_pod_has_a_node_and_addresses() {
        let pod = json!({
            "metadata": {},
            "spec": {"containers": [], "nodeName": "a", "hostNetwork": true},
            "status": {"podIPs": [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}]},
        });
        let facts = of_pod(serde_json::from_value(pod).unwrap());
        let addresses = vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
        assert_eq!(facts, PodFacts { node: Some("a".to_owned()), has_host_network: true, addresses });
    }
}
