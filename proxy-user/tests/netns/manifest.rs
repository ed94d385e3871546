//! The folder of manifests that the agent reads.

use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

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

/// Family of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    fn label(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
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
    let all = text(service);
    let (first, rest) = all.trim_start_matches("---\n").split_once('\n').context("a text without lines")?;
    let mut object = serde_json::from_str(first)?;
    merge(&mut object, more);
    Ok(format!("---\n{object}\n{rest}"))
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

/// Returns the Service and its EndpointSlices, one for each port and family. (JSON is valid YAML.)
pub fn text(service: Service) -> String {
    let Service { name, number, ports } = service;
    let protocol = |is_tcp| if is_tcp { "TCP" } else { "UDP" };
    let ips = Family::BOTH.map(|family| cluster_ip(family, number));
    let spec_ports: Vec<_> = ports
        .iter()
        .map(|port| json!({"name": port.name, "port": port.number, "protocol": protocol(port.is_tcp)}))
        .collect();
    let mut objects = vec![json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": Family::BOTH.map(Family::label),
            "ports": spec_ports,
        },
    })];
    for port in ports {
        for family in Family::BOTH {
            let endpoints: Vec<_> = port
                .pods
                .iter()
                .map(|pod| json!({"addresses": [pod_ip(family, *pod)], "conditions": {"ready": true}}))
                .collect();
            objects.push(json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": format!("{name}-{}-{}", port.name, family.label().to_lowercase()),
                    "namespace": "default",
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": family.label(),
                "endpoints": endpoints,
                "ports": [{"name": port.name, "port": port.target, "protocol": protocol(port.is_tcp)}],
            }));
        }
    }
    let mut text = String::new();
    for object in objects {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "---\n{object}");
    }
    text
}
