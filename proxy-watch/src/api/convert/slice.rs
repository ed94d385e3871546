//! Converts a discovery/v1 `EndpointSlice`.

use std::time::SystemTime;

use k8s_openapi::api::discovery::v1 as k8s;

use crate::api::objects;
use proxy_core::model::net::IpFamily;
use proxy_core::model::{Endpoint, EndpointPort, EndpointSlice, Name, Names, ServiceName};

use super::{
    ANNOTATION_TRIGGERED, LABEL_HEADLESS, LABEL_SERVICE_NAME, Problems, address, annotation, label, protocol,
    service, slice_name, spread, version,
};

/// Converts a slice; `None` if it belongs to a headless Service or to no Service, or has host names instead of addresses.
pub fn slice(object: objects::EndpointSlice) -> Option<EndpointSlice> {
    let metadata = &object.metadata;
    if label(metadata, LABEL_HEADLESS).is_some() {
        return None;
    }
    let service = label(metadata, LABEL_SERVICE_NAME).filter(|name| !name.is_empty())?;
    let family = match object.address_type.as_str() {
        "IPv4" => IpFamily::V4,
        "IPv6" => IpFamily::V6,
        _ => return None,
    };
    let triggered = annotation(metadata, ANNOTATION_TRIGGERED).and_then(time);
    let (name, version) = (slice_name(metadata), version(metadata));
    let service = ServiceName::new(name.namespace.clone(), service);
    let mut problems = Problems::of(&format!("EndpointSlice {name}"));
    let weights = spread::weights(metadata, &mut problems);
    service::unknown_annotations(metadata, &[spread::ANNOTATION_WEIGHTS], &mut problems);
    let ports = ports(object.ports.unwrap_or_default(), &mut problems);
    let mut endpoints: Vec<_> = object
        .endpoints
        .into_iter()
        .enumerate()
        .filter_map(|(index, item)| endpoint(item, index, family, &mut problems))
        .map(|endpoint| Endpoint { weight: weights.of(&endpoint), ..endpoint })
        .collect();
    endpoints.sort_unstable();
    endpoints.shrink_to_fit();
    Some(EndpointSlice {
        name,
        service,
        version,
        family,
        ports,
        endpoints,
        triggered,
        problems: problems.found,
    })
}

/// Parses a time. If this fails, only a measurement is lost, so it is not a problem of the slice.
fn time(text: &str) -> Option<SystemTime> {
    text.parse::<jiff::Timestamp>().ok().map(SystemTime::from)
}

/// Converts the ports. A port without a number, or with number 0, means "all ports" for other consumers, and is not
/// used for a Service.
fn ports(items: Vec<k8s::EndpointPort>, problems: &mut Problems) -> Vec<EndpointPort> {
    let mut ports = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let number = item.port.unwrap_or_default();
        let Ok(port) = u16::try_from(number) else {
            problems
                .add(format!("ports[{index}].port"), &format_args!("{number} is not a port; use 1 to 65535"));
            continue;
        };
        let Some(protocol) = protocol(item.protocol.as_deref()) else {
            let text = item.protocol.unwrap_or_default();
            let message = format_args!("`{text}` is not a protocol; use TCP, UDP or SCTP");
            problems.add(format!("ports[{index}].protocol"), &message);
            continue;
        };
        if port != 0 {
            ports.push(EndpointPort { name: item.name.unwrap_or_default().into(), protocol, port });
        }
    }
    ports.sort_unstable();
    ports.dedup();
    ports.shrink_to_fit();
    ports
}

fn endpoint(
    item: objects::Endpoint,
    index: usize,
    family: IpFamily,
    problems: &mut Problems,
) -> Option<Endpoint> {
    let field = || format!("endpoints[{index}].addresses[0]");
    // The API defines that all addresses of an endpoint belong to one pod, and that consumers take the first one.
    let Some(text) = item.addresses.first() else {
        problems.add(format!("endpoints[{index}].addresses"), &"the endpoint has no address");
        return None;
    };
    let address = address::routable(text).map_err(|error| problems.add(field(), &error)).ok()?;
    if IpFamily::of(address) != family {
        problems.add(field(), &format_args!("{address} is not an {family} address, but addressType says so"));
        return None;
    }
    let conditions = item.conditions.unwrap_or_default();
    let hints = item.hints.unwrap_or_default();
    Some(Endpoint {
        address,
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        node: item.node_name.map(Name::from),
        zone: item.zone.map(Name::from),
        weight: None,
        zone_hints: names(hints.for_zones, |zone| zone.name),
        node_hints: names(hints.for_nodes, |node| node.name),
    })
}

fn names<T>(items: Option<Vec<T>>, name: impl Fn(T) -> String) -> Names {
    items.unwrap_or_default().into_iter().map(name).collect()
}
