//! The cluster's DNS as Kubernetes objects.

use serde_json::{Value, json};

use super::image::COREDNS;
use super::plan::DNS_SERVICE;

const NAME: &str = "coredns";
const SPACE: &str = "kube-system";

/// Configuration of the DNS server. Our build of it has fewer plugins than kubeadm's configuration names.
pub const COREFILE: &str = ".:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        ttl 5
    }
    cache 5
}
";

/// Returns a list of all objects of the cluster's DNS. The server reaches the API server by its Service, as pods do.
pub fn objects() -> Value {
    let labels = json!({ "k8s-app": "kube-dns" });
    let meta = json!({ "name": NAME, "namespace": SPACE });
    let rule = |group: &str, resources: &[&str]| json!({ "apiGroups": [group], "resources": resources, "verbs": ["list", "watch"] });
    let container = json!({
        "name": NAME,
        "image": COREDNS,
        "args": ["-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [{ "name": "config", "mountPath": "/etc/coredns" }],
        "readinessProbe": { "httpGet": { "path": "/ready", "port": 8181 }, "periodSeconds": 1 },
    });
    let port = |name: &str, protocol: &str| json!({ "name": name, "port": 53, "protocol": protocol });
    json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta },
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": { "name": "system:coredns" },
                "rules": [
                    rule("", &["services", "pods", "namespaces", "endpoints"]),
                    rule("discovery.k8s.io", &["endpointslices"]),
                ],
            },
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": { "name": "system:coredns" },
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns" },
                "subjects": [{ "kind": "ServiceAccount", "name": NAME, "namespace": SPACE }],
            },
            { "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": { "Corefile": COREFILE } },
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": meta,
                "spec": {
                    "replicas": 2,
                    "selector": { "matchLabels": labels },
                    "template": {
                        "metadata": { "labels": labels },
                        "spec": {
                            "serviceAccountName": NAME,
                            "dnsPolicy": "Default",
                            "containers": [container],
                            "volumes": [{ "name": "config", "configMap": { "name": NAME } }],
                        },
                    },
                },
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": { "name": "kube-dns", "namespace": SPACE, "labels": labels },
                "spec": {
                    "clusterIP": DNS_SERVICE,
                    "selector": labels,
                    "ports": [port("dns", "UDP"), port("dns-tcp", "TCP")],
                },
            },
        ],
    })
}
