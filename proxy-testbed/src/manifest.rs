//! The folder of manifests that the agent reads.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::Family;

/// A Service with addresses of both families.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    pub name: &'static str,
    /// Last part of its ClusterIPs.
    pub number: u8,
    pub ports: &'static [Port],
}

/// A port of a Service, with endpoints of its own.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    pub name: &'static str,
    pub is_tcp: bool,
    pub number: u16,
    pub target: u16,
    /// Numbers of the pods that are its endpoints.
    pub pods: &'static [u8],
}

/// Returns the ClusterIP of the Service with this number.
pub fn cluster_ip(family: Family, number: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 96, 0, number].into(),
        Family::V6 => [0xfd96, 0, 0, 0, 0, 0, 0, u16::from(number)].into(),
    }
}

/// Returns the address of a pod.
pub fn pod_ip(family: Family, pod: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 99, pod, 2].into(),
        Family::V6 => [0xfd99, u16::from(pod), 0, 0, 0, 0, 0, 2].into(),
    }
}

/// A folder of manifests.
pub struct Folder {
    dir: PathBuf,
}

impl Folder {
    pub fn new(dir: PathBuf) -> Result<Self> {
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Self { dir })
    }

    /// Returns a handle of an existing folder.
    pub const fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes or replaces a Service.
    pub fn put(&self, service: Service) -> Result<()> {
        self.put_text(service.name, &text(service))
    }

    /// Writes or replaces a file atomically.
    pub fn put_text(&self, file: &str, text: &str) -> Result<()> {
        let hidden = self.dir.join(format!(".{file}"));
        fs::write(&hidden, text).with_context(|| format!("cannot write {}", hidden.display()))?;
        fs::rename(&hidden, self.dir.join(format!("{file}.yaml"))).context("cannot rename a manifest")
    }

    /// Deletes the file of a Service, or another file.
    pub fn remove(&self, file: &str) -> Result<()> {
        fs::remove_file(self.dir.join(format!("{file}.yaml"))).context("cannot remove a manifest")
    }
}

/// Returns the manifests of a Service with `more` merged into the Service object, as [`merge`] does it.
pub fn text_with(service: Service, more: &Value) -> Result<String> {
    let mut objects = objects(service);
    merge(objects.first_mut().context("no Service")?, more);
    Ok(yaml(objects))
}

/// Merges the fields of one object into another, and the elements of lists by their position.
pub fn merge(into: &mut Value, more: &Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (name, value) in more {
                merge(into.entry(name.as_str()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(more)) => {
            into.iter_mut().zip(more).for_each(|(into, more)| merge(into, more));
        }
        (into, more) => *into = more.clone(),
    }
}

/// Returns the manifests of a Service.
pub fn text(service: Service) -> String {
    yaml(objects(service))
}

/// Returns the Service and its EndpointSlices, one for each port and family.
fn objects(service: Service) -> Vec<Value> {
    let Service { name, number, ports } = service;
    let shown = |port: &Port, number| json!({"name": port.name, "port": number, "protocol": if port.is_tcp { "TCP" } else { "UDP" }});
    let own: Vec<_> = ports.iter().map(|port| shown(port, port.number)).collect();
    let mut objects = vec![service_object(name, number, &json!({ "ports": own }))];
    for port in ports {
        let target = json!([shown(port, port.target)]);
        objects.extend(slices(name, &format!("{name}-{}", port.name), &target, |family| {
            port.pods.iter().map(|pod| ready(pod_ip(family, *pod))).collect()
        }));
    }
    objects
}

/// Returns a Service object with addresses of both families, and with these fields of `spec` in addition.
pub fn service_object(name: &str, number: u8, spec: &Value) -> Value {
    let ips = Family::BOTH.map(|family| cluster_ip(family, number));
    let mut service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": Family::BOTH.map(Family::label)},
    });
    merge(&mut service["spec"], spec);
    service
}

/// Returns the EndpointSlices of a Service for both families, with names that begin with `name`.
pub fn slices(
    service: &str,
    name: &str,
    ports: &Value,
    endpoints: impl Fn(Family) -> Vec<Value>,
) -> [Value; 2] {
    Family::BOTH.map(|family| {
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{name}-{}", family.label().to_lowercase()),
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": family.label(),
            "endpoints": endpoints(family),
            "ports": ports,
        })
    })
}

/// Returns an endpoint of a slice.
pub fn ready(ip: IpAddr) -> Value {
    json!({"addresses": [ip], "conditions": {"ready": true}})
}

/// Returns a ready endpoint on a node.
pub fn ready_on(ip: IpAddr, node: &str) -> Value {
    json!({"addresses": [ip], "conditions": {"ready": true}, "nodeName": node})
}

/// Returns ports of a slice: `tcp` and `udp` with these numbers.
pub fn tcp_and_udp([tcp, udp]: [u16; 2]) -> Value {
    json!([
        {"name": "tcp", "port": tcp, "protocol": "TCP"},
        {"name": "udp", "port": udp, "protocol": "UDP"},
    ])
}

/// Returns the objects as a file of manifests. (JSON is valid YAML.)
pub fn yaml(objects: impl IntoIterator<Item = Value>) -> String {
    objects.into_iter().fold(String::new(), |text, object| text + &format!("---\n{object}\n"))
}
