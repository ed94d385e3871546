use std::path::Path;

use super::*;
use crate::api::client::{Options, connect};
use proxy_core::model::net::IpFamily;
use proxy_core::model::{ApiServers, Endpoint, EndpointPort, Name};

fn service(name: &str, address: &str) -> Service {
    Service { cluster_ips: vec![address.parse().unwrap()], ..Service::new(ServiceName::new("default", name)) }
}

fn slice(name: &str, service: &str, addresses: &[&str]) -> EndpointSlice {
    let port = |name, port| EndpointPort { name: Name::from(name), protocol: Protocol::Tcp, port };
    EndpointSlice {
        ports: vec![port("https", 6443), port("metrics", 9999)],
        endpoints: addresses.iter().map(|address| Endpoint::new(address.parse().unwrap())).collect(),
        ..EndpointSlice::new(
            SliceName::new("default", name),
            ServiceName::new("default", service),
            IpFamily::V4,
        )
    }
}

async fn direct(kubeconfig: &Path, server: &str) -> EndpointFailover {
    let text = format!(
        "{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}], contexts: \
         [{{name: c, context: {{cluster: k, user: u}}}}], clusters: [{{name: k, cluster: {{server: '{server}'}}}}]}}"
    );
    std::fs::write(kubeconfig, text).unwrap();
    let options = Options { kubeconfig: Some(kubeconfig.to_owned()), servers: Vec::new() };
    EndpointFailover::new(
        &connect(&options, tokio::sync::watch::Sender::<ApiServers>::default()).await.unwrap(),
    )
}

fn urls(direct: &EndpointFailover) -> Vec<String> {
    direct.servers.list().into_iter().map(|server| server.url.to_string()).collect()
}

#[tokio::test]
async fn endpoints_of_the_service_kubernetes_replace_its_cluster_address_as_servers() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for server in ["https://10.96.0.1/", "https://10.96.0.1:443/", "https://kubernetes.default.svc/"] {
        let mut direct = direct(file.path(), server).await;
        direct.note(&Event::Reset(Listing::Services(vec![
            service("other", "10.96.0.9"),
            service("kubernetes", "10.96.0.1"),
        ])));
        let slices = vec![
            slice("other-1", "other", &["192.0.2.9"]),
            slice("k", "kubernetes", &["192.0.2.1", "192.0.2.2"]),
        ];
        direct.note(&Event::Reset(Listing::Slices(slices)));
        assert_eq!(urls(&direct), [server, "https://192.0.2.1:6443/", "https://192.0.2.2:6443/"]);
        assert!(direct.has_warned);
        direct.note(&Event::Apply(Object::Slice(slice("k", "kubernetes", &["192.0.2.3"]))));
        assert_eq!(urls(&direct), [server, "https://192.0.2.3:6443/"]);
        direct.note(&Event::Delete(Key::Slice(SliceName::new("default", "k"))));
        assert_eq!(urls(&direct), [server]);
    }
}

#[tokio::test]
async fn server_outside_the_service_kubernetes_stays_the_only_one() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for server in ["https://192.0.2.10:6443/", "https://api.example/", "http://10.96.0.1/"] {
        let mut direct = direct(file.path(), server).await;
        direct.note(&Event::Apply(Object::Service(service("kubernetes", "10.96.0.1"))));
        direct.note(&Event::Apply(Object::Slice(slice("k", "kubernetes", &["192.0.2.1"]))));
        assert_eq!((urls(&direct), direct.has_warned), (vec![server.to_owned()], false));
    }
}
