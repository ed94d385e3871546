//! Parses a file of manifests.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;
use tracing::info;

use crate::api::convert::{self, LABEL_SERVICE_NAME};
use crate::api::objects::{EndpointSlice, Node, Service};
use proxy_core::model;
use proxy_core::model::nearest::{did_you_mean, nearest};

use super::documents::{Document, split};
use super::unknown::{SERVICE, SLICE, Unknown};

/// The longest name that the API server allows for a Service or a namespace: a DNS label.
const MAX_LABEL: usize = 63;
/// The longest name of any object.
const MAX_NAME: usize = 253;

/// The kinds whose objects are used.
const OURS: [&str; 3] = ["Service", "EndpointSlice", "Node"];
/// The other kinds of the group `v1`, which may be in the same files.
const OTHERS: [&str; 14] = [
    "Binding",
    "ConfigMap",
    "Endpoints",
    "Event",
    "LimitRange",
    "Namespace",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "Pod",
    "PodTemplate",
    "ReplicationController",
    "ResourceQuota",
    "Secret",
    "ServiceAccount",
];

/// Whether the API server has such a kind, as an object or as a list, in a group of the objects that are used.
fn is_known(version: &str, kind: &str) -> bool {
    let kind = kind.strip_suffix("List").unwrap_or(kind);
    version == "v1" && OTHERS.contains(&kind)
}

/// Returns the name of the Service that a slice belongs to.
fn service_of(slice: &EndpointSlice) -> Option<&String> {
    slice.metadata.labels.as_ref()?.get(LABEL_SERVICE_NAME)
}

/// The syntax of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    /// Any number of YAML documents.
    Yaml,
    /// One JSON document.
    Json,
}

/// The objects of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Its Services, in order.
    pub services: Vec<model::Service>,
    /// The names, with namespace, of Services that need no proxy: headless ones, and those of the type `ExternalName`.
    pub others: BTreeSet<String>,
    /// Its `EndpointSlices`, in order.
    pub slices: Vec<model::EndpointSlice>,
    /// Its Nodes, in order; only the addresses of other nodes are used (DSR).
    pub nodes: Vec<model::NodeView>,
}

/// The error in a file. Such a file is not used at all: a part of it may be worse than its previous content.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("document {document}, line {line}: {message}")]
pub struct ManifestError {
    /// The number of the document in the file, from 1.
    pub document: usize,
    /// The line of the file, from 1.
    pub line: u64,
    /// The error at this line.
    pub message: String,
}

/// Parses a file. Skips objects of other kinds.
pub fn parse(file: &str, syntax: Syntax) -> Result<Objects, ManifestError> {
    let mut objects = Objects::default();
    let documents = match syntax {
        Syntax::Yaml => split(file),
        Syntax::Json if file.trim().is_empty() => Vec::new(),
        Syntax::Json => vec![Document { number: 1, line: 1, text: file }],
    };
    for document in documents {
        let line = document.begins();
        Reader { document, syntax, objects: &mut objects, line, in_list: false }.read()?;
    }
    Ok(objects)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
}

#[derive(Deserialize)]
struct Items<T> {
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

struct Reader<'a> {
    document: Document<'a>,
    syntax: Syntax,
    objects: &'a mut Objects,
    /// The line on which the object begins.
    line: u64,
    in_list: bool,
}

impl Reader<'_> {
    fn read(&mut self) -> Result<(), ManifestError> {
        let header: Header = self.decode()?;
        match (header.api_version.as_str(), header.kind.as_str()) {
            ("v1", "List" | "ServiceList" | "NodeList") | ("discovery.k8s.io/v1", "EndpointSliceList") => {
                self.in_list = true;
                for (line, value) in self.items()? {
                    self.line = line;
                    self.item(value, &header)?;
                }
                Ok(())
            }
            ("v1", "Service" | "Node") | ("discovery.k8s.io/v1", "EndpointSlice") => {
                self.object(self.decode()?, &header)
            }
            _ => self.other(&header),
        }
    }

    /// Reads an object of a list. In a list of one kind, the objects need not have the kind.
    fn item(&mut self, value: Value, list: &Header) -> Result<(), ManifestError> {
        let text = |field: &str| value.get(field).and_then(Value::as_str).map(str::to_owned);
        let header = Header {
            api_version: text("apiVersion").unwrap_or_else(|| list.api_version.clone()),
            kind: text("kind").unwrap_or_else(|| list.kind.trim_end_matches("List").to_owned()),
        };
        self.object(value, &header)
    }

    fn object(&mut self, value: Value, header: &Header) -> Result<(), ManifestError> {
        match (header.api_version.as_str(), header.kind.as_str()) {
            ("v1", "Service") => {
                let unknown = Unknown::of(&value, SERVICE);
                self.service(self.typed(value)?, unknown)
            }
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                let unknown = Unknown::of(&value, SLICE);
                self.slice(self.typed(value)?, unknown)
            }
            ("v1", "Node") => self.node(self.typed(value)?),
            _ => self.other(header),
        }
    }

    /// Converts a value to an object. Only the text has the line of an error, and what YAML accepts only for a field of a known
    /// type, such as a number as a label.
    fn typed<T: DeserializeOwned>(&self, value: Value) -> Result<T, ManifestError> {
        match serde_json::from_value(value) {
            Err(_) if !self.in_list => self.decode(),
            result => result.map_err(|error| self.error(&error)),
        }
    }

    fn node(&mut self, object: Node) -> Result<(), ManifestError> {
        self.check_name(&object.metadata, MAX_NAME)?;
        self.objects.nodes.push(convert::node(object));
        Ok(())
    }

    fn service(&mut self, object: Service, unknown: Unknown) -> Result<(), ManifestError> {
        self.check_name(&object.metadata, MAX_LABEL)?;
        let name = convert::service_name(&object.metadata).to_string();
        match convert::service(object) {
            Some(mut service) => {
                unknown.report(&format!("Service {}", service.name), &mut service.problems);
                self.objects.services.push(service);
            }
            None => drop(self.objects.others.insert(name)),
        }
        Ok(())
    }

    fn slice(&mut self, object: EndpointSlice, unknown: Unknown) -> Result<(), ManifestError> {
        // A dump of a cluster has slices without a Service, too.
        if self.in_list && service_of(&object).is_none() {
            return Ok(());
        }
        self.check_name(&object.metadata, MAX_NAME)?;
        self.check_slice(&object)?;
        if let Some(mut slice) = convert::slice(object) {
            unknown.report(&format!("EndpointSlice {}", slice.name), &mut slice.problems);
            self.objects.slices.push(slice);
        }
        Ok(())
    }

    /// Checks that a Service can use the slice.
    fn check_slice(&self, object: &EndpointSlice) -> Result<(), ManifestError> {
        let kind = object.address_type.as_str();
        if !["IPv4", "IPv6", "FQDN"].contains(&kind) {
            return Err(self.error(&format_args!("addressType is `{kind}`; write IPv4 or IPv6")));
        }
        if service_of(object).is_none() {
            let keys = object.metadata.labels.iter().flatten().map(|(key, _)| key.as_str());
            let alike = nearest(LABEL_SERVICE_NAME, keys);
            let found = alike.first().map(|key| format!(" (there is `{key}`)")).unwrap_or_default();
            let message =
                format!("the label {LABEL_SERVICE_NAME} is missing{found}: write the name of the Service");
            return Err(self.error(&message));
        }
        Ok(())
    }

    /// Checks the names of an object, because no API server has validated them. `/` separates namespace and name in our
    /// output.
    fn check_name(&self, metadata: &ObjectMeta, max: usize) -> Result<(), ManifestError> {
        let is_bad =
            |text: &str, max| text.len() > max || text.contains(|c: char| c == '/' || c.is_control());
        let name = metadata.name.as_deref().unwrap_or_default();
        if name.is_empty() {
            return Err(self.error(&"metadata.name is missing"));
        }
        if is_bad(name, max) {
            return Err(self.error(&format_args!("metadata.name `{name}` is not a valid name")));
        }
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        if is_bad(namespace, MAX_LABEL) {
            return Err(self.error(&format_args!("metadata.namespace `{namespace}` is not a valid name")));
        }
        Ok(())
    }

    /// Skips an object of another kind, such as a Deployment. Returns an error if it was certainly meant to be used; a list may be a
    /// dump of a cluster.
    fn other(&self, header: &Header) -> Result<(), ManifestError> {
        let Header { api_version, kind } = header;
        match (api_version.as_str(), kind.as_str()) {
            (_, "") => Err(self.error(&"kind is missing")),
            ("", _) => {
                let message = "apiVersion is missing; write `v1` for a Service, `discovery.k8s.io/v1` for an EndpointSlice";
                Err(self.error(&message))
            }
            (version, "EndpointSlice" | "EndpointSliceList") => Err(self.error(&format_args!(
                "unknown apiVersion `{version}` of an EndpointSlice; write `discovery.k8s.io/v1`"
            ))),
            ("v1", "Endpoints" | "EndpointsList") if !self.in_list => {
                Err(self.error(&"Endpoints are not read; write an EndpointSlice of `discovery.k8s.io/v1`"))
            }
            // Only the group of Services has no name, and it has one version.
            (version, kind) if version != "v1" && !version.contains('/') => Err(self.error(&format_args!(
                "unknown apiVersion `{version}` of the kind `{kind}`; write `v1` for a Service"
            ))),
            (version @ ("v1" | "discovery.k8s.io/v1"), kind) if !is_known(version, kind) => {
                let near = did_you_mean(&nearest(kind, OURS));
                Err(self.error(&format_args!("unknown kind `{kind}` of {version}{near}")))
            }
            _ => {
                info!(
                    api_version,
                    kind,
                    line = self.line,
                    "ignored: only Services, EndpointSlices and Nodes are used"
                );
                Ok(())
            }
        }
    }

    /// Returns the objects of a list and the lines on which they begin.
    fn items(&self) -> Result<Vec<(u64, Value)>, ManifestError> {
        match self.syntax {
            Syntax::Json => Ok(self
                .decode::<Items<Value>>()?
                .items
                .into_iter()
                .map(|v| (self.document.line, v))
                .collect()),
            Syntax::Yaml => {
                let items = self.decode::<Items<serde_saphyr::Spanned<Value>>>()?.items;
                Ok(items.into_iter().map(|v| (self.line_of(v.referenced.line()), v.value)).collect())
            }
        }
    }

    fn decode<T: DeserializeOwned>(&self) -> Result<T, ManifestError> {
        let text = self.document.text;
        match self.syntax {
            Syntax::Json => serde_json::from_str(text)
                .map_err(|error| self.error_at(self.line_of(error.line() as u64), &error)),
            Syntax::Yaml => {
                // A dump of a whole cluster is one large document. Only the limit of the nesting depth stays.
                let budget = serde_saphyr::budget! {
                    max_buffered_comment_events: usize::MAX,
                    max_events: usize::MAX,
                    max_nodes: usize::MAX,
                    max_total_scalar_bytes: usize::MAX,
                };
                let options = serde_saphyr::options! { budget: budget, with_snippet: false };
                serde_saphyr::from_str_with_options(text, options).map_err(|error| {
                    let line = error.location().map_or(1, |location| location.line());
                    self.error_at(self.line_of(line), &error)
                })
            }
        }
    }

    /// Converts a line of the document to a line of the file.
    const fn line_of(&self, in_document: u64) -> u64 {
        self.document.line + in_document.saturating_sub(1)
    }

    fn error(&self, message: &dyn std::fmt::Display) -> ManifestError {
        self.error_at(self.line, message)
    }

    fn error_at(&self, line: u64, message: &dyn std::fmt::Display) -> ManifestError {
        let mut message = message.to_string();
        // Both parsers append the line of the document, but the message has the line of the file.
        if let Some(at) = message.rfind(" at line ") {
            message.truncate(at);
        }
        ManifestError { document: self.document.number, line, message }
    }
}

#[cfg(test)]
mod tests;
