//! The cluster: objects as large as those that controllers create, and changes to them.

use std::cell::Cell;
use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

use crate::store;
use proxy_testbed::kube::control::ControlPlane;
use proxy_testbed::kube::{PATIENCE, eventually};

/// Maximum of endpoints in a slice: the limit of the EndpointSlice controller.
const SLICE: u32 = 100;
/// Creation time of all objects.
const CREATED: &str = "2026-01-01T00:00:00Z";
/// Number of Services that are in memory at a time while they are created.
const PART: u32 = 2000;
/// Time between two changes: 20 per second.
const PAUSE: Duration = Duration::from_millis(50);

/// Services that all have the same number of endpoints.
pub struct Cluster {
    services: u32,
    endpoints: u32,
    /// Number of changes so far.
    changes: Cell<u32>,
}

impl Cluster {
    /// Creates all objects, and waits until the API server has received the last one.
    pub fn fill(control: &ControlPlane, services: u32, endpoints: u32) -> Self {
        let this = Self { services, endpoints, changes: Cell::new(0) };
        let begun = Instant::now();
        for first in (0..services).step_by(PART as usize) {
            let last = services.min(first + PART);
            let objects: Vec<_> = (first..last).flat_map(service).collect();
            store::put(&objects);
            let parts = endpoints.div_ceil(SLICE);
            let each = |number| (0..parts).map(move |part| (number, part));
            let slices: Vec<_> = (first..last)
                .flat_map(each)
                .map(|(number, part)| {
                    let name = slice_name(number, part);
                    (format!("/registry/endpointslices/default/{name}"), this.slice(number, part, true))
                })
                .collect();
            store::put(&slices);
        }
        let last = slice_name(services - 1, endpoints.div_ceil(SLICE) - 1);
        let path =
            format!("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/{last}?resourceVersion=0");
        eventually(PATIENCE, || control.api.get_raw(&path)).unwrap();
        let _ = writeln!(io::stderr(), "{services} Services made in {:.0?}", begun.elapsed());
        this
    }

    /// Returns the number of all endpoints.
    pub fn all_endpoints(&self) -> u32 {
        self.services * self.endpoints
    }

    /// Changes one endpoint 20 times per second, each time of another Service; returns the number of changes.
    pub fn churn(&self, control: &ControlPlane, time: Duration) -> u32 {
        let begun = Instant::now();
        let mut changes = 0;
        while begun.elapsed() < time {
            let before = self.changes.replace(self.changes.get() + 1);
            let (number, ready) = (before % self.services, (before / self.services) % 2 == 1);
            let slice = json!({ "endpoints": self.slice_endpoints(number, 0, ready) });
            control.api.patch::<EndpointSlice>(&slice_name(number, 0), &slice).unwrap();
            changes += 1;
            std::thread::sleep((begun + changes * PAUSE).saturating_duration_since(Instant::now()));
        }
        changes
    }

    fn slice(&self, number: u32, part: u32, ready: bool) -> Value {
        let name = service_name(number);
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": slice_name(number, part),
                "namespace": "default",
                "uid": uid(2, number * 100 + part),
                "creationTimestamp": CREATED,
                "managedFields": [{
                    "manager": "kube-controller-manager", "operation": "Update", "time": CREATED,
                    "apiVersion": "discovery.k8s.io/v1", "fieldsType": "FieldsV1",
                    "fieldsV1": {
                        "f:addressType": {}, "f:endpoints": {}, "f:ports": {},
                        "f:metadata": { "f:generateName": {}, "f:labels": {
                            ".": {}, "f:app.kubernetes.io/name": {}, "f:kubernetes.io/service-name": {},
                            "f:endpointslice.kubernetes.io/managed-by": {},
                        } },
                    },
                }],
                "generateName": format!("{name}-"),
                "labels": {
                    "kubernetes.io/service-name": name,
                    "app.kubernetes.io/name": name,
                    "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                },
                "annotations": { "endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z" },
            },
            "addressType": "IPv4",
            "ports": [{ "name": "http", "port": 8080, "protocol": "TCP" }],
            "endpoints": self.slice_endpoints(number, part, ready),
        })
    }

    /// Returns the endpoints of a slice; `ready` applies to the first one.
    fn slice_endpoints(&self, number: u32, part: u32, ready: bool) -> Vec<Value> {
        let first = part * SLICE;
        let endpoint = |index: u32| {
            let place = number * self.endpoints + index;
            let node = place % 5000;
            json!({
                "addresses": [Ipv4Addr::from(0x0a00_0000 + 0x1_0000 + place)],
                "conditions": { "ready": ready || index != first, "serving": true, "terminating": false },
                "nodeName": format!("ip-10-{}-{}.example.internal", node / 256, node % 256),
                "zone": format!("zone-{}", node % 3),
                "targetRef": {
                    "kind": "Pod",
                    "namespace": "default",
                    "name": format!("service-{number}-6d4cf56db6-{index:05}"),
                    "uid": uid(3, place),
                },
            })
        };
        (first..self.endpoints.min(first + SLICE)).map(endpoint).collect()
    }
}

fn service_name(number: u32) -> String {
    format!("service-{number}")
}

fn slice_name(number: u32, part: u32) -> String {
    format!("service-{number}-{part:05}")
}

fn uid(kind: u32, number: u32) -> String {
    format!("{number:08x}-0000-4000-8000-{kind:012}")
}

/// Returns a Service, and the object that marks its address as allocated.
fn service(number: u32) -> [(String, Value); 2] {
    let name = service_name(number);
    let address = Ipv4Addr::from(0x0a60_0000 + 0x100 + number).to_string();
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid(1, number),
            "creationTimestamp": CREATED,
            "labels": { "app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "Helm" },
            "annotations": { "meta.helm.sh/release-name": name, "meta.helm.sh/release-namespace": "default" },
            "managedFields": [{
                "manager": "helm", "operation": "Update", "time": CREATED, "apiVersion": "v1",
                "fieldsType": "FieldsV1",
                "fieldsV1": {
                    "f:metadata": { "f:annotations": { ".": {} }, "f:labels": { ".": {} } },
                    "f:spec": { "f:internalTrafficPolicy": {}, "f:selector": {}, "f:sessionAffinity": {},
                        "f:type": {}, "f:ports": { ".": {} } },
                },
            }],
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": address,
            "clusterIPs": [address],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "selector": { "app.kubernetes.io/name": name },
            "ports": [{ "name": "http", "protocol": "TCP", "port": 80, "targetPort": "http" }],
        },
        "status": { "loadBalancer": {} },
    });
    let taken = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "IPAddress",
        "metadata": {
            "name": address,
            "uid": uid(4, number),
            "creationTimestamp": CREATED,
            "labels": {
                "ipaddress.kubernetes.io/ip-family": "IPv4",
                "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io",
            },
        },
        "spec": { "parentRef": { "group": "", "resource": "services", "namespace": "default", "name": name } },
    });
    [
        (format!("/registry/services/specs/default/{name}"), service),
        (format!("/registry/ipaddresses/{address}"), taken),
    ]
}
