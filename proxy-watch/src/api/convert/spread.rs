//! Annotations that select how connections are distributed and forwarded.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proxy_common::select::Algorithm;

use super::{Problems, annotation};
use proxy_core::model::ForwardingMode;
use proxy_core::model::spread::{MOST_WEIGHT, WeightOf, Weights, algorithm as algorithm_of, algorithm_names};

/// How connections to a Service are distributed.
pub const ANNOTATION_ALGORITHM: &str = "ballast.io/algorithm";
/// Whether endpoints that fail are ejected.
pub const ANNOTATION_EJECTION: &str = "ballast.io/ejection";
/// The weights of endpoints, in a Service or an `EndpointSlice`.
pub const ANNOTATION_WEIGHTS: &str = "ballast.io/weights";

/// Whether idle connections move to endpoints that join.
pub const ANNOTATION_REBALANCE: &str = "ballast.io/rebalance";

/// Whether the sockets of pods are translated when they connect.
pub const ANNOTATION_SOCKET_LB: &str = "ballast.io/socket-lb";

/// How packets of clients outside are sent to endpoints of a Service on other nodes.
pub const ANNOTATION_FORWARDING: &str = "ballast.io/forwarding-mode";

/// What happens to packets of clients outside if policy Local has no endpoint on this node.
pub const ANNOTATION_FAILOVER: &str = "ballast.io/external-failover";

/// Whether packets of clients outside pass if policy Local has no endpoint on this node. `is_local`: the Service's external
/// policy.
pub fn passes_when_empty(metadata: &ObjectMeta, is_local: bool, problems: &mut Problems) -> bool {
    let Some(text) = annotation(metadata, ANNOTATION_FAILOVER).map(str::trim) else { return false };
    if text != "passthrough" {
        problems.add(
            field(ANNOTATION_FAILOVER),
            &format_args!(
                "`{text}` is not `passthrough`; until then, packets without an endpoint are dropped"
            ),
        );
    } else if !is_local {
        problems
            .add(field(ANNOTATION_FAILOVER), &"it has no effect: spec.externalTrafficPolicy is not Local");
    }
    text == "passthrough" && is_local
}

/// Returns the forwarding mode that a Service requests.
pub fn forwarding(metadata: &ObjectMeta, problems: &mut Problems) -> Option<ForwardingMode> {
    let text = annotation(metadata, ANNOTATION_FORWARDING)?.trim();
    let found = ForwardingMode::from_name(text);
    if found.is_none() {
        let names = ForwardingMode::ALL.map(ForwardingMode::label).join(", ");
        problems.add(
            field(ANNOTATION_FORWARDING),
            &format_args!(
                "`{text}` is not a forwarding mode: give one of {names}; until then the default applies"
            ),
        );
    }
    found
}

/// Returns the algorithm that a Service requests.
pub fn algorithm(metadata: &ObjectMeta, problems: &mut Problems) -> Option<Algorithm> {
    let text = annotation(metadata, ANNOTATION_ALGORITHM)?.trim();
    let found = algorithm_of(text);
    if found.is_none() {
        let names = algorithm_names();
        problems.add(
            field(ANNOTATION_ALGORITHM),
            &format_args!(
                "`{text}` is not an algorithm: give one of {names}; until then the default applies"
            ),
        );
    }
    found
}

/// Returns whether a Service turns ejection `on` or `off`; `None` if the default applies.
pub fn ejection(metadata: &ObjectMeta, problems: &mut Problems) -> Option<bool> {
    match annotation(metadata, ANNOTATION_EJECTION)?.trim() {
        "on" => Some(true),
        "off" => Some(false),
        text => {
            problems.add(
                field(ANNOTATION_EJECTION),
                &format_args!("`{text}` is neither `on` nor `off`; until then the default applies"),
            );
            None
        }
    }
}

/// Whether idle connections of a Service move to endpoints that join. `keeps`: why a client stays with its endpoint in any case.
pub fn rebalances(metadata: &ObjectMeta, keeps: Option<&str>, problems: &mut Problems) -> bool {
    match annotation(metadata, ANNOTATION_REBALANCE).map(str::trim) {
        None | Some("off") => false,
        Some("on") => {
            if let Some(keeps) = keeps {
                let message =
                    format_args!("it has no effect: with {keeps}, clients stay with their endpoints");
                problems.add(field(ANNOTATION_REBALANCE), &message);
            }
            keeps.is_none()
        }
        Some(text) => {
            problems.add(
                field(ANNOTATION_REBALANCE),
                &format_args!(
                    "`{text}` is neither `on` nor `off`; until then, connections stay with their endpoints"
                ),
            );
            false
        }
    }
}

/// Whether a Service leaves the sockets of pods untranslated, so that their packets are translated.
pub fn no_sockets(metadata: &ObjectMeta, problems: &mut Problems) -> bool {
    match annotation(metadata, ANNOTATION_SOCKET_LB).map(str::trim) {
        None | Some("all") => false,
        Some("host-only") => true,
        Some(text) => {
            problems.add(
                field(ANNOTATION_SOCKET_LB),
                &format_args!(
                    "`{text}` is neither `all` nor `host-only`; until then, sockets are translated"
                ),
            );
            false
        }
    }
}

/// Returns the weights in a Service or an `EndpointSlice`: `10.0.0.7=10, node/worker-3=0, zone/eu-1a=5, *=1`. One bad
/// entry invalidates all of them, because the weights are shares of a whole.
pub fn weights(metadata: &ObjectMeta, problems: &mut Problems) -> Weights {
    let Some(text) = annotation(metadata, ANNOTATION_WEIGHTS) else { return Weights::default() };
    let entries = text.split([',', '\n']).map(str::trim).filter(|entry| !entry.is_empty());
    let mut weights = Weights::default();
    for entry in entries {
        let Some((key, weight)) = parse(entry) else {
            let message = format_args!(
                "`{entry}` is not a weight: give ADDRESS=N, node/NAME=N, zone/NAME=N or *=N, with N from 0 to \
                 {MOST_WEIGHT}; all weights of this annotation are ignored"
            );
            problems.add(field(ANNOTATION_WEIGHTS), &message);
            return Weights::default();
        };
        weights.0.insert(key, weight);
    }
    weights
}

fn parse(entry: &str) -> Option<(WeightOf, u16)> {
    let (of, weight) = entry.rsplit_once('=')?;
    let weight = weight.trim().parse().ok().filter(|weight| *weight <= MOST_WEIGHT)?;
    let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    let of = match of.trim() {
        "*" => WeightOf::All,
        of => match of.split_once('/') {
            Some(("node", node)) => WeightOf::Node(name(node)?.into()),
            Some(("zone", zone)) => WeightOf::Zone(name(zone)?.into()),
            Some(_) => return None,
            None => WeightOf::Address(of.parse().ok()?),
        },
    };
    Some((of, weight))
}

pub(super) fn field(annotation: &str) -> String {
    format!("metadata.annotations[{annotation}]")
}
