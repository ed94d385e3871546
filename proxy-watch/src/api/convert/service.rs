//! Converts a core/v1 Service.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as k8s;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use proxy_common::select::Algorithm;

use crate::api::objects;
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::net::IpFamily;
use proxy_core::model::{Name, Service, ServiceKind, ServicePort, TrafficPolicy};

use super::{
    LABEL_PROXY_NAME, MOST_PROBLEMS, Problems, address, label, protocol, removal, service_name, spread,
    version,
};

/// The prefix of Ballast's annotations.
const ANNOTATION_PREFIX: &str = "ballast.io/";
/// The known annotations of Services.
pub(super) const ANNOTATIONS: [&str; 9] = [
    spread::ANNOTATION_ALGORITHM,
    spread::ANNOTATION_EJECTION,
    spread::ANNOTATION_FORWARDING,
    spread::ANNOTATION_REBALANCE,
    spread::ANNOTATION_SOCKET_LB,
    spread::ANNOTATION_FAILOVER,
    spread::ANNOTATION_WEIGHTS,
    removal::ANNOTATION_POLICY,
    removal::ANNOTATION_DELAY,
];

/// Timeout of session affinity in seconds if the object has none: three hours, the API's default.
const DEFAULT_AFFINITY_SECS: u32 = 10_800;
/// The longest timeout that the API allows: a day.
const MAX_AFFINITY_SECS: u32 = 86_400;
/// The longest name of a port that the API allows, in bytes.
const MAX_PORT_NAME: usize = 63;

/// Converts a Service; `None` if it has no address of its own (headless, `ExternalName`). A Service that another proxy
/// serves gets only its name and its cluster addresses.
pub fn service(object: objects::Service) -> Option<Service> {
    let metadata = &object.metadata;
    let spec = object.spec.unwrap_or_default();
    let is_headless = spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten()).any(|ip| ip == "None");
    if is_headless || spec.type_.as_deref() == Some("ExternalName") {
        return None;
    }
    let name = service_name(metadata);
    if label(metadata, LABEL_PROXY_NAME).is_some() {
        // Problems of this Service are not reported: the other proxy is responsible for it.
        let unseen = &mut Problems::of("");
        let (cluster_ips, _) = cluster_ips(spec.cluster_ip, spec.cluster_ips, unseen);
        return Some(Service { is_foreign: true, cluster_ips, ..Service::new(name) });
    }
    let problems = &mut Problems::of(&format!("Service {name}"));
    let (algorithm, weights) = (spread::algorithm(metadata, problems), spread::weights(metadata, problems));
    let forwarding = spread::forwarding(metadata, problems);
    let ejection = spread::ejection(metadata, problems);
    let no_sockets = spread::no_sockets(metadata, problems);
    let is_local = spec.external_traffic_policy.as_deref() == Some("Local");
    let passes_when_empty = spread::passes_when_empty(metadata, is_local, problems);
    let removal = removal::policy(metadata, problems);
    let keeps = match algorithm {
        _ if spec.session_affinity.as_deref() == Some("ClientIP") => Some("spec.sessionAffinity ClientIP"),
        Some(Algorithm::SourceHash | Algorithm::DestinationHash) => Some("this algorithm"),
        _ => None,
    };
    let rebalances = spread::rebalances(metadata, keeps, problems);
    unknown_annotations(metadata, &ANNOTATIONS, problems);
    let kind = kind(spec.type_.as_deref(), problems);
    let ingress = match kind {
        ServiceKind::LoadBalancer => object.status.and_then(|s| s.load_balancer).and_then(|l| l.ingress),
        ServiceKind::ClusterIp | ServiceKind::NodePort => None,
    };
    let (cluster_ips, refused_families) = cluster_ips(spec.cluster_ip, spec.cluster_ips, problems);
    Some(Service {
        name,
        version: version(&object.metadata),
        is_foreign: false,
        kind,
        cluster_ips,
        refused_families,
        external_ips: addresses("spec.externalIPs", spec.external_ips.unwrap_or_default(), problems),
        load_balancer_ips: load_balancer_ips(ingress.unwrap_or_default(), problems),
        source_ranges: source_ranges(spec.load_balancer_source_ranges.unwrap_or_default(), problems),
        ports: ports(spec.ports.unwrap_or_default(), kind, problems),
        internal_policy: policy(
            "spec.internalTrafficPolicy",
            spec.internal_traffic_policy.as_deref(),
            problems,
        ),
        external_policy: policy(
            "spec.externalTrafficPolicy",
            spec.external_traffic_policy.as_deref(),
            problems,
        ),
        affinity_secs: affinity(spec.session_affinity.as_deref(), spec.session_affinity_config, problems),
        algorithm,
        forwarding,
        ejection,
        no_sockets,
        passes_when_empty,
        removal,
        rebalances,
        weights,
        health_check_node_port: optional_port(
            "spec.healthCheckNodePort",
            spec.health_check_node_port,
            problems,
        ),
        created: object.metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
        problems: std::mem::take(&mut problems.found),
    })
}

/// Reports annotations `ballast.io/...` that are not among the known ones of this kind of object.
pub(super) fn unknown_annotations(metadata: &ObjectMeta, known: &[&str], problems: &mut Problems) {
    for key in unknown(metadata, known) {
        let field = format!("metadata.annotations[{key}]");
        if ANNOTATIONS.contains(&key) {
            problems.add(field, &"an annotation of Services, ignored here");
        } else {
            let near = did_you_mean(&nearest(key, known.iter().copied()));
            problems.add(field, &format_args!("unknown annotation, ignored{near}"));
        }
    }
}

/// Returns the unknown annotations `ballast.io/...`: as many as are listed, and one more.
pub(super) fn unknown<'a>(metadata: &'a ObjectMeta, known: &[&str]) -> impl Iterator<Item = &'a str> {
    let keys = metadata.annotations.iter().flatten().map(|(key, _)| key.as_str());
    keys.filter(|key| key.starts_with(ANNOTATION_PREFIX) && !known.contains(key)).take(MOST_PROBLEMS + 1)
}

fn kind(text: Option<&str>, problems: &mut Problems) -> ServiceKind {
    match text {
        None | Some("" | "ClusterIP") => ServiceKind::ClusterIp,
        Some("NodePort") => ServiceKind::NodePort,
        Some("LoadBalancer") => ServiceKind::LoadBalancer,
        Some(other) => {
            problems.add("spec.type", &format_args!("unknown type `{other}`; treated as ClusterIP"));
            ServiceKind::ClusterIp
        }
    }
}

/// Returns `clusterIPs`, or `clusterIP` if only that is given; the first address of each family, and the families of those that are
/// refused.
fn cluster_ips(
    one: Option<String>,
    many: Option<Vec<String>>,
    problems: &mut Problems,
) -> (Vec<IpAddr>, [Option<IpFamily>; 2]) {
    let (field, given) = match many {
        Some(many) if !many.is_empty() => ("spec.clusterIPs", many),
        _ => ("spec.clusterIP", one.into_iter().collect()),
    };
    let given: Vec<_> = given.into_iter().filter(|text| !text.is_empty()).collect();
    if given.is_empty() {
        problems.add(
            "spec.clusterIP",
            &"the Service has no cluster address, so clients cannot reach it; set one",
        );
    }
    let is_refused = |family: &IpFamily| {
        given.iter().any(|text| {
            matches!(address::routable(text), Err(address::AddressError::Special { address, .. }) if IpFamily::of(address) == *family)
        })
    };
    let refused = [IpFamily::V4, IpFamily::V6].map(|family| Some(family).filter(is_refused));
    let mut found: Vec<IpAddr> = Vec::with_capacity(given.len());
    for address in addresses(field, given, problems) {
        if found.iter().any(|other| IpFamily::of(*other) == IpFamily::of(address)) {
            let family = IpFamily::of(address);
            problems.add(
                field,
                &format_args!("{address} is a second {family} address; only the first one is programmed"),
            );
        } else {
            found.push(address);
        }
    }
    (found, refused)
}

fn addresses(field: &str, texts: Vec<String>, problems: &mut Problems) -> Vec<IpAddr> {
    // A set, since a Service may have as many addresses as fit into an object.
    let (mut found, mut known) = (Vec::with_capacity(texts.len()), BTreeSet::new());
    for text in texts {
        match address::routable(&text) {
            Ok(address) if known.insert(address) => found.push(address),
            Ok(_) => {}
            Err(error) => problems.add(field, &error),
        }
    }
    found
}

/// Returns the addresses of the load balancer. Entries with a name instead of an address, and those whose load balancer
/// has to see the traffic (`ipMode: Proxy`), are not served.
fn load_balancer_ips(ingress: Vec<k8s::LoadBalancerIngress>, problems: &mut Problems) -> Vec<IpAddr> {
    let served = |mode: Option<&str>| matches!(mode, None | Some("VIP"));
    let texts = ingress.into_iter().filter(|i| served(i.ip_mode.as_deref())).filter_map(|i| i.ip);
    addresses("status.loadBalancer.ingress", texts.filter(|text| !text.is_empty()).collect(), problems)
}

/// Parses the source ranges. A list without a usable range admits no client, rather than every client.
fn source_ranges(texts: Vec<String>, problems: &mut Problems) -> Option<Vec<ipnet::IpNet>> {
    if texts.is_empty() {
        return None;
    }
    let mut ranges = Vec::with_capacity(texts.len());
    for text in texts {
        match address::range(&text) {
            Ok(range) => ranges.push(range),
            Err(error) => problems.add("spec.loadBalancerSourceRanges", &error),
        }
    }
    Some(ranges)
}

fn ports(items: Vec<k8s::ServicePort>, kind: ServiceKind, problems: &mut Problems) -> Vec<ServicePort> {
    let mut ports: Vec<ServicePort> = Vec::with_capacity(items.len());
    let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    for (index, item) in items.into_iter().enumerate() {
        let mut bad = |field: &str, message: &dyn Display| {
            problems.add(format!("spec.ports[{index}].{field}"), message);
        };
        let Some(protocol) = protocol(item.protocol.as_deref()) else {
            let text = item.protocol.unwrap_or_default();
            bad("protocol", &format_args!("`{text}` is not a protocol; use TCP, UDP or SCTP"));
            continue;
        };
        let Some(port) = u16::try_from(item.port).ok().filter(|port| *port != 0) else {
            bad("port", &format_args!("{} is not a port; use 1 to 65535", item.port));
            continue;
        };
        let name = Name::from(item.name.unwrap_or_default());
        if name.len() > MAX_PORT_NAME {
            bad("name", &format_args!("the name is longer than {MAX_PORT_NAME} bytes"));
            continue;
        }
        if names.contains(&(name.clone(), protocol)) {
            bad(
                "name",
                &format_args!("another {protocol} port has the name `{name}`; give each port its own name"),
            );
            continue;
        }
        if !numbers.insert((port, protocol)) {
            bad("port", &format_args!("another port already has the number {port}/{protocol}"));
            continue;
        }
        names.insert((name.clone(), protocol));
        let node_port = match kind {
            ServiceKind::ClusterIp => 0,
            ServiceKind::NodePort | ServiceKind::LoadBalancer => {
                optional_port(&format!("spec.ports[{index}].nodePort"), item.node_port, problems)
            }
        };
        ports.push(ServicePort { name, protocol, port, node_port });
    }
    ports
}

fn optional_port(field: &str, number: Option<i32>, problems: &mut Problems) -> u16 {
    let number = number.unwrap_or_default();
    u16::try_from(number).unwrap_or_else(|_| {
        problems.add(field, &format_args!("{number} is not a port; use 1 to 65535"));
        0
    })
}

fn policy(field: &str, text: Option<&str>, problems: &mut Problems) -> TrafficPolicy {
    match text {
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some("Local") => TrafficPolicy::Local,
        Some(other) => {
            problems.add(field, &format_args!("`{other}` is not a policy; treated as Cluster"));
            TrafficPolicy::Cluster
        }
    }
}

fn affinity(text: Option<&str>, config: Option<k8s::SessionAffinityConfig>, problems: &mut Problems) -> u32 {
    match text {
        None | Some("" | "None") => return 0,
        Some("ClientIP") => {}
        Some(other) => {
            problems.add(
                "spec.sessionAffinity",
                &format_args!("unknown session affinity `{other}`; treated as None"),
            );
            return 0;
        }
    }
    let Some(given) = config.and_then(|c| c.client_ip).and_then(|c| c.timeout_seconds) else {
        return DEFAULT_AFFINITY_SECS;
    };
    let valid = u32::try_from(given).ok().filter(|secs| (1..=MAX_AFFINITY_SECS).contains(secs));
    valid.unwrap_or_else(|| {
        let message = format_args!(
            "{given} is not between 1 and {MAX_AFFINITY_SECS} seconds; {DEFAULT_AFFINITY_SECS} applies"
        );
        problems.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", &message);
        DEFAULT_AFFINITY_SECS
    })
}
