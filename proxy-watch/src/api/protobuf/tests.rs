//! Compares what a real API server (1.36) sent in both encodings at the same time: `recorded/`. The recordings have
//! objects with every field that is read and with none of them, and fields that are skipped: managed fields, references
//! to pods, images of nodes.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::api::ObjectList;
use kube::core::{Status, WatchEvent};
use proptest::prelude::*;
use rstest::rstest;

use super::envelope::{event, list, status};
use super::wire::{Malformed, read};
use crate::api::kinds::Watched;
use crate::api::objects::{EndpointSlice, Node, OtherNode, Service, ServiceCidr};
use proxy_core::model::{Event, Object};

macro_rules! recorded {
    ($($name:tt)+) => {
        include_bytes!(concat!("recorded/", $($name)+)).as_slice()
    };
}

/// A list and a watch, each in protobuf and JSON.
type Recorded = [&'static [u8]; 4];

macro_rules! kind {
    ($name:literal) => {
        [
            recorded!(concat!($name, ".list.pb")),
            recorded!(concat!($name, ".list.json")),
            recorded!(concat!($name, ".watch.pb")),
            recorded!(concat!($name, ".watch.json")),
        ]
    };
}

const SERVICES: Recorded = kind!("services");
const SLICES: Recorded = kind!("slices");
const NODES: Recorded = kind!("nodes");
const CIDRS: Recorded = kind!("cidrs");

/// Returns the messages of a watch without their length prefixes.
fn frames(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut frames = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (frame, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
        frames.push(frame);
        bytes = rest;
    }
    frames
}

/// Checks that both objects convert to the same event, and returns the event.
fn compare<K: Watched>(protobuf: &K, json: &K) -> Event {
    assert_eq!(protobuf.meta(), json.meta());
    assert!(!protobuf.name_any().is_empty() && protobuf.uid().is_some(), "{protobuf:?}");
    assert_eq!(protobuf.key(), json.key());
    let event = |object: &K| {
        let none = Event::Delete(object.key());
        object.clone().convert().map_or(none, |model| Event::Apply(K::object(model)))
    };
    let ours = event(protobuf);
    assert_eq!(ours, event(json));
    ours
}

/// Checks that both encodings are the same, and returns the objects of the list and the events of the watch.
fn both<K: Watched>([list_protobuf, list_json, watch_protobuf, watch_json]: Recorded) -> Vec<Event> {
    let ours = list::<K>(list_protobuf).unwrap();
    let theirs: ObjectList<K> = serde_json::from_slice(list_json).unwrap();
    assert_eq!(ours.metadata, theirs.metadata);
    assert_eq!(ours.items.len(), theirs.items.len());
    let mut seen: Vec<_> =
        ours.items.iter().zip(&theirs.items).map(|(ours, theirs)| compare(ours, theirs)).collect();
    let ours = frames(watch_protobuf).into_iter().map(|frame| event::<K>(frame).unwrap());
    let theirs = serde_json::Deserializer::from_slice(watch_json).into_iter::<WatchEvent<K>>();
    let mut theirs = theirs.map(Result::unwrap);
    let mut ends = 0;
    for ours in ours {
        match (ours, theirs.next().unwrap()) {
            (WatchEvent::Added(ours), WatchEvent::Added(theirs))
            | (WatchEvent::Modified(ours), WatchEvent::Modified(theirs))
            | (WatchEvent::Deleted(ours), WatchEvent::Deleted(theirs)) => seen.push(compare(&ours, &theirs)),
            (WatchEvent::Bookmark(ours), WatchEvent::Bookmark(theirs)) => {
                let (ours, theirs) = (ours.metadata, theirs.metadata);
                assert!(!ours.resource_version.is_empty());
                assert_eq!(ours.resource_version, theirs.resource_version);
                assert_eq!(ours.annotations, theirs.annotations);
                ends += usize::from(ours.annotations.contains_key("k8s.io/initial-events-end"));
            }
            (ours, theirs) => panic!("{ours:?} is {theirs:?} in JSON"),
        }
    }
    assert!(theirs.next().is_none() && ends == 1);
    seen
}

#[test]
fn protobuf_and_json_decode_to_the_same_events() {
    let services = both::<Service>(SERVICES);
    let full = services.iter().find_map(|event| match event {
        Event::Apply(Object::Service(service)) if service.name.name == "web" => Some(service),
        _ => None,
    });
    // Without this object, the recording would prove nothing.
    let full = full.unwrap();
    assert!(full.ports.len() == 2 && full.ports.iter().all(|port| port.node_port > 0), "{full:?}");
    assert_eq!((full.cluster_ips.len(), full.external_ips.len(), full.load_balancer_ips.len()), (2, 1, 1));
    assert_eq!((full.affinity_secs, full.source_ranges.as_ref().map(Vec::len)), (600, Some(2)));
    assert!(full.health_check_node_port > 0 && full.created > 0 && full.problems.is_empty(), "{full:?}");
    let slices = both::<EndpointSlice>(SLICES);
    let full = slices.iter().find_map(|event| match event {
        Event::Apply(Object::Slice(slice)) if slice.name.name == "web-x1" => Some(slice),
        _ => None,
    });
    let full = full.unwrap();
    assert!(full.triggered.is_some() && full.endpoints.len() == 3 && full.ports.len() == 2, "{full:?}");
    let first = &full.endpoints[0];
    assert!(first.node.is_some() && first.zone.is_some(), "{first:?}");
    assert_eq!((first.zone_hints.iter().count(), first.node_hints.iter().count()), (2, 1));
    let [second, third] = &full.endpoints[1..] else { panic!() };
    assert_eq!((second.ready, second.serving, second.terminating), (false, true, true));
    assert_eq!((third.ready, &third.node), (true, &None));
    let nodes = both::<Node>(NODES);
    let leaves = |event: &&Event| matches!(event, Event::Apply(Object::Node(node)) if node.is_leaving);
    assert!(nodes.iter().any(|event| leaves(&event)));
    let Some(Event::Apply(Object::Node(full))) = nodes.first() else { panic!("{nodes:?}") };
    assert_eq!((full.internal_ips.len(), full.pod_cidrs.len(), full.zone.as_deref()), (2, 2, Some("z1")));
    assert_eq!(both::<OtherNode>(NODES).len(), nodes.len());
    let cidrs = both::<ServiceCidr>(CIDRS);
    assert!(
        matches!(&cidrs[0], Event::Apply(Object::ServiceCidr(one)) if one.ranges.len() == 2),
        "{cidrs:?}"
    );
}

#[rstest]
#[case(recorded!("refused.pb"), recorded!("refused.json"), 403)]
#[case(recorded!("invalid.pb"), recorded!("invalid.json"), 422)]
fn protobuf_and_json_decode_to_the_same_errors(
    #[case] protobuf: &[u8],
    #[case] json: &[u8],
    #[case] code: u16,
) {
    let (ours, theirs) = (status(protobuf).unwrap(), serde_json::from_slice::<Status>(json).unwrap());
    assert_eq!(ours.code, code);
    assert_eq!(
        (ours.code, ours.status, &ours.message, &ours.reason),
        (theirs.code, theirs.status, &theirs.message, &theirs.reason)
    );
    let WatchEvent::Error(ours) = event::<Service>(&watch_event("ERROR", protobuf)).unwrap() else {
        panic!()
    };
    assert_eq!((ours.code, ours.message), (theirs.code, theirs.message));
}

fn delimited(tag: u8, bytes: &[u8]) -> Vec<u8> {
    let mut all = vec![tag << 3 | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        all.push(length as u8 | 0x80);
        length >>= 7;
    }
    all.push(length as u8);
    all.extend_from_slice(bytes);
    all
}

fn watch_event(name: &str, object: &[u8]) -> Vec<u8> {
    [delimited(1, name.as_bytes()), delimited(2, &delimited(1, object))].concat()
}

fn enveloped(kind: &str, rest: &[u8]) -> Vec<u8> {
    let types = [delimited(1, b"v1"), delimited(2, kind.as_bytes())].concat();
    [b"k8s\0".as_slice(), &delimited(1, &types), rest].concat()
}

fn kind(wanted: &str, found: &str) -> Malformed {
    Malformed::Kind { wanted: wanted.to_owned(), found: found.to_owned() }
}

#[rstest]
#[case::nothing(&[], Malformed::Event { name: String::new() })]
#[case::another_event(&watch_event("MOVED", &enveloped("Service", &[])), Malformed::Event { name: "MOVED".to_owned() })]
#[case::no_object(&watch_event("ADDED", &[]), Malformed::Magic)]
#[case::other_magic(&watch_event("ADDED", b"k9s\0\x0a\0"), Malformed::Magic)]
#[case::json_in_protobuf(&watch_event("ADDED", br#"{"kind": "Service"}"#), Malformed::Magic)]
#[case::another_kind(&watch_event("ADDED", &enveloped("Pod", &[])), kind("Service", "Pod"))]
#[case::no_kind(&watch_event("ADDED", b"k8s\0"), kind("Service", ""))]
#[case::a_failure_that_is_none(&watch_event("ERROR", &enveloped("Service", &[])), kind("Status", "Service"))]
#[case::packed(
    &watch_event("ADDED", &enveloped("Service", &delimited(3, b"gzip"))), kind("Service", "gzip")
)]
#[case::another_form(
    &watch_event("ADDED", &enveloped("Service", &delimited(4, b"application/json"))), kind("Service", "application/json")
)]
#[case::cut(&watch_event("ADDED", &enveloped("Service", &delimited(2, &[0x0a, 0x05, 0x0a]))), Malformed::Cut)]
#[case::a_length_without_end(
    &watch_event("ADDED", &enveloped("Service", &delimited(2, &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]))),
    Malformed::Cut
)]
#[case::a_number_without_end(
    &watch_event("ADDED", &enveloped("Service", &delimited(2, &[0xff; 12]))), Malformed::Number
)]
#[case::a_group(&watch_event("ADDED", &enveloped("Service", &delimited(2, &[0x0b]))), Malformed::Tag { tag: 0x0b })]
#[case::field_0(&watch_event("ADDED", &enveloped("Service", &delimited(2, &[0x00, 0x00]))), Malformed::Tag { tag: 0 })]
#[case::metadata_that_are_a_number(
    &watch_event("ADDED", &enveloped("Service", &delimited(2, &[0x08, 0x01]))), Malformed::Type { field: 1 }
)]
#[case::a_name_that_is_no_text(
    &watch_event("ADDED", &enveloped("Service", &delimited(2, &delimited(1, &delimited(1, &[0xff]))))),
    Malformed::Text { field: 1 }
)]
fn malformed_protobuf_is_an_error_with_its_reason(#[case] bytes: &[u8], #[case] why: Malformed) {
    assert_eq!(event::<Service>(bytes).map(|event| format!("{event:?}")), Err(why));
}

#[test]
fn unknown_protobuf_fields_are_skipped() {
    // All wire types, with field numbers that no message has.
    let unknown = [
        &[0xf8, 0x3f, 0x05][..],
        &[0xf9, 0x3f, 0, 1, 2, 3, 4, 5, 6, 7],
        &[0xfa, 0x3f, 0x02, 0xff, 0xff],
        &[0xfd, 0x3f, 0, 1, 2, 3],
    ]
    .concat();
    let object =
        [unknown.clone(), delimited(1, &[unknown.clone(), delimited(1, b"a")].concat()), unknown].concat();
    let service: Service = read(&object).unwrap();
    assert_eq!(service.metadata.name.as_deref(), Some("a"));
}

#[test]
fn numbers_below_zero_and_times_that_are_none() {
    let port = read::<core::ServicePort>(&[0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
    assert_eq!(port.unwrap().port, -1);
    // Go's zero time, and no time.
    for time in [&[0x08, 0x80, 0x92, 0xb8, 0xc3, 0x98, 0xfe, 0xff, 0xff, 0xff, 0x01][..], &[]] {
        let metadata = read::<ObjectMeta>(&[delimited(8, time), delimited(9, time)].concat()).unwrap();
        assert_eq!((metadata.creation_timestamp, metadata.deletion_timestamp), (None, None));
    }
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let all: Vec<_> =
        [SERVICES, SLICES, NODES, CIDRS].into_iter().flat_map(|[.., watch, _]| frames(watch)).collect();
    prop::sample::select(all).prop_map(<[u8]>::to_vec)
}

/// Decodes the bytes as all types, and returns how many endpoints and ports the result holds.
fn read_all(bytes: &[u8]) -> usize {
    let size = |slice: EndpointSlice| slice.endpoints.len() + slice.ports.map_or(0, |ports| ports.len());
    let _ = (event::<Service>(bytes), event::<Node>(bytes), event::<ServiceCidr>(bytes), status(bytes));
    let _ = (list::<Service>(bytes), read::<Service>(bytes), read::<Node>(bytes));
    let slice = match event::<EndpointSlice>(bytes) {
        Ok(WatchEvent::Added(slice) | WatchEvent::Modified(slice) | WatchEvent::Deleted(slice)) => Ok(slice),
        _ => read::<EndpointSlice>(bytes),
    };
    slice.map(size).unwrap_or_default()
}

proptest! {
    #[test]
    fn decoder_survives_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read_all(&bytes) <= bytes.len());
    }

    #[test]
    fn decoder_survives_damaged_events(
        mut bytes in any_frame(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        prop_assert!(read_all(&bytes) <= bytes.len());
    }
}

#[test]
fn annotation_that_is_no_text_is_read_like_json() {
    let annotation = [delimited(1, b"note"), delimited(2, &[0xff])].concat();
    let object = enveloped("Service", &delimited(2, &delimited(1, &delimited(12, &annotation))));
    let Ok(WatchEvent::Added(service)) = event::<Service>(&watch_event("ADDED", &object)) else {
        panic!("the Service is not read");
    };
    assert_eq!(service.metadata.annotations.unwrap()["note"], "\u{fffd}");
}
