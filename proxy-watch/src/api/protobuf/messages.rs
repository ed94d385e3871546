//! Decodes the fields of Kubernetes' protobuf messages that the agent reads. Field numbers are those of `generated.proto` in
//! k8s.io/api (`core/v1`, `discovery/v1`, `networking/v1`) and k8s.io/apimachinery (`meta/v1`), which never change.
//!
//! Go encodes strings and numbers that are not pointers even if they are empty; JSON omits them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::api::networking::v1 as networking;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta, Time};
use kube::core::Status;
use kube::core::response::StatusSummary;

use super::wire::{Field, Malformed, Message};
use crate::api::objects::{Endpoint, EndpointSlice, Node, NodeStatus, OtherNode, Service, ServiceCidr};

type Read = Result<(), Malformed>;

/// Implements [`Message`] for each type, with the fields that are read.
macro_rules! message {
    ($($type:ty { $($number:literal => |$this:ident, $field:ident| $set:expr,)+ })+) => {$(
        impl Message for $type {
            fn set(&mut self, field: &Field<'_>) -> Read {
                match field.number {
                    $($number => {
                        let ($this, $field) = (self, field);
                        $set;
                    })+
                    _ => {}
                }
                Ok(())
            }
        }
    )+};
}

message! {
    Service {
        1 => |this, field| this.metadata = field.message()?,
        2 => |this, field| this.spec = Some(field.message()?),
        3 => |this, field| this.status = Some(field.message()?),
    }
    core::ServiceSpec {
        1 => |this, field| this.ports.get_or_insert_default().push(field.message()?),
        3 => |this, field| this.cluster_ip = field.filled()?,
        4 => |this, field| this.type_ = field.filled()?,
        5 => |this, field| this.external_ips.get_or_insert_default().push(field.text()?.to_owned()),
        7 => |this, field| this.session_affinity = field.filled()?,
        9 => |this, field| {
            this.load_balancer_source_ranges.get_or_insert_default().push(field.text()?.to_owned());
        },
        11 => |this, field| this.external_traffic_policy = field.filled()?,
        12 => |this, field| this.health_check_node_port = Some(field.int()?).filter(|port| *port != 0),
        14 => |this, field| this.session_affinity_config = Some(field.message()?),
        18 => |this, field| this.cluster_ips.get_or_insert_default().push(field.text()?.to_owned()),
        22 => |this, field| this.internal_traffic_policy = Some(field.text()?.to_owned()),
    }
    core::ServicePort {
        1 => |this, field| this.name = field.filled()?,
        2 => |this, field| this.protocol = field.filled()?,
        3 => |this, field| this.port = field.int()?,
        5 => |this, field| this.node_port = Some(field.int()?).filter(|port| *port != 0),
    }
    core::SessionAffinityConfig {
        1 => |this, field| this.client_ip = Some(field.message()?),
    }
    core::ClientIPConfig {
        1 => |this, field| this.timeout_seconds = Some(field.int()?),
    }
    core::ServiceStatus {
        1 => |this, field| this.load_balancer = Some(field.message()?),
    }
    core::LoadBalancerStatus {
        1 => |this, field| this.ingress.get_or_insert_default().push(field.message()?),
    }
    core::LoadBalancerIngress {
        1 => |this, field| this.ip = field.filled()?,
        3 => |this, field| this.ip_mode = Some(field.text()?.to_owned()),
    }
    EndpointSlice {
        1 => |this, field| this.metadata = field.message()?,
        2 => |this, field| this.endpoints.push(field.message()?),
        3 => |this, field| this.ports.get_or_insert_default().push(field.message()?),
        4 => |this, field| field.text()?.clone_into(&mut this.address_type),
    }
    Endpoint {
        1 => |this, field| this.addresses.push(field.text()?.to_owned()),
        2 => |this, field| this.conditions = Some(field.message()?),
        6 => |this, field| this.node_name = Some(field.text()?.to_owned()),
        7 => |this, field| this.zone = Some(field.text()?.to_owned()),
        8 => |this, field| this.hints = Some(field.message()?),
    }
    discovery::EndpointConditions {
        1 => |this, field| this.ready = Some(field.flag()?),
        2 => |this, field| this.serving = Some(field.flag()?),
        3 => |this, field| this.terminating = Some(field.flag()?),
    }
    discovery::EndpointHints {
        1 => |this, field| this.for_zones.get_or_insert_default().push(field.message()?),
        2 => |this, field| this.for_nodes.get_or_insert_default().push(field.message()?),
    }
    discovery::ForZone {
        1 => |this, field| field.text()?.clone_into(&mut this.name),
    }
    discovery::ForNode {
        1 => |this, field| field.text()?.clone_into(&mut this.name),
    }
    discovery::EndpointPort {
        1 => |this, field| this.name = Some(field.text()?.to_owned()),
        2 => |this, field| this.protocol = Some(field.text()?.to_owned()),
        3 => |this, field| this.port = Some(field.int()?),
    }
    Node {
        1 => |this, field| this.metadata = field.message()?,
        2 => |this, field| this.spec = Some(field.message()?),
        3 => |this, field| this.status = Some(field.message()?),
    }
    OtherNode {
        1 => |this, field| this.metadata = field.message()?,
        3 => |this, field| this.status = Some(field.message()?),
    }
    core::NodeSpec {
        1 => |this, field| this.pod_cidr = field.filled()?,
        5 => |this, field| this.taints.get_or_insert_default().push(field.message()?),
        7 => |this, field| this.pod_cidrs.get_or_insert_default().push(field.text()?.to_owned()),
    }
    core::Taint {
        1 => |this, field| field.text()?.clone_into(&mut this.key),
        3 => |this, field| field.text()?.clone_into(&mut this.effect),
    }
    NodeStatus {
        5 => |this, field| this.addresses.get_or_insert_default().push(field.message()?),
    }
    core::NodeAddress {
        1 => |this, field| field.text()?.clone_into(&mut this.type_),
        2 => |this, field| field.text()?.clone_into(&mut this.address),
    }
    ServiceCidr {
        1 => |this, field| this.metadata = field.message()?,
        2 => |this, field| this.spec = Some(field.message()?),
    }
    networking::ServiceCIDRSpec {
        1 => |this, field| this.cidrs.get_or_insert_default().push(field.text()?.to_owned()),
    }
    ObjectMeta {
        1 => |this, field| this.name = field.filled()?,
        3 => |this, field| this.namespace = field.filled()?,
        5 => |this, field| this.uid = field.filled()?,
        6 => |this, field| this.resource_version = field.filled()?,
        7 => |this, field| this.generation = Some(field.long()?).filter(|generation| *generation != 0),
        8 => |this, field| this.creation_timestamp = time(field)?,
        9 => |this, field| this.deletion_timestamp = time(field)?,
        11 => |this, field| add(&mut this.labels, field)?,
        12 => |this, field| add(&mut this.annotations, field)?,
    }
    ListMeta {
        2 => |this, field| this.resource_version = field.filled()?,
        3 => |this, field| this.continue_ = field.filled()?,
    }
    Entry {
        1 => |this, field| field.text()?.clone_into(&mut this.key),
        // The API server checks no text of annotations; Go replaces what is no UTF-8 when it writes JSON.
        2 => |this, field| this.value = String::from_utf8_lossy(field.bytes()?).into_owned(),
    }
    Seconds {
        1 => |this, field| this.0 = field.long()?,
    }
    Failure {
        2 => |this, field| this.0.status = summary(field.text()?),
        3 => |this, field| field.text()?.clone_into(&mut this.0.message),
        4 => |this, field| field.text()?.clone_into(&mut this.0.reason),
        6 => |this, field| this.0.code = u16::try_from(field.int()?).unwrap_or_default(),
    }
}

/// A `Status` message.
#[derive(Default)]
pub(super) struct Failure(pub Status);

/// An entry of a map.
#[derive(Default)]
struct Entry {
    key: String,
    value: String,
}

/// A `Time` message, in which Kubernetes writes whole seconds only.
#[derive(Default)]
struct Seconds(i64);

fn add(map: &mut Option<BTreeMap<String, String>>, field: &Field<'_>) -> Read {
    let Entry { key, value } = field.message()?;
    map.get_or_insert_default().insert(key, value);
    Ok(())
}

/// Decodes a time. `None` for Go's zero time (the first second of the year 1) and for an empty message, as in JSON.
fn time(field: &Field<'_>) -> Result<Option<Time>, Malformed> {
    const GO_ZERO: i64 = -62_135_596_800;
    let Seconds(seconds) = field.message()?;
    let is_time = seconds != 0 && seconds != GO_ZERO;
    Ok(is_time.then(|| Timestamp::from_second(seconds).ok()).flatten().map(Time))
}

fn summary(text: &str) -> Option<StatusSummary> {
    match text {
        "Success" => Some(StatusSummary::Success),
        "Failure" => Some(StatusSummary::Failure),
        _ => None,
    }
}
