//! Fields of manifests that Kubernetes does not have: no API server refuses them here.

use serde_json::Value;

use proxy_core::model::Problem;
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::problem::MOST_PROBLEMS;

/// The names of the fields below each path. What is below a path that is not listed here is not checked.
type Fields = &'static [(&'static str, &'static str)];

const METADATA: &str = "annotations creationTimestamp deletionGracePeriodSeconds deletionTimestamp finalizers generateName \
                        generation labels managedFields name namespace ownerReferences resourceVersion selfLink uid";

/// Of a core/v1 Service.
pub(super) const SERVICE: Fields = &[
    ("", "apiVersion kind metadata spec status"),
    ("metadata", METADATA),
    (
        "spec",
        "allocateLoadBalancerNodePorts clusterIP clusterIPs externalIPs externalName externalTrafficPolicy \
         healthCheckNodePort internalTrafficPolicy ipFamilies ipFamilyPolicy loadBalancerClass loadBalancerIP \
         loadBalancerSourceRanges ports publishNotReadyAddresses selector sessionAffinity sessionAffinityConfig \
         trafficDistribution type",
    ),
    ("spec.ports", "appProtocol name nodePort port protocol targetPort"),
    ("spec.sessionAffinityConfig", "clientIP"),
    ("spec.sessionAffinityConfig.clientIP", "timeoutSeconds"),
];

/// Of a discovery/v1 `EndpointSlice`.
pub(super) const SLICE: Fields = &[
    ("", "addressType apiVersion endpoints kind metadata ports"),
    ("metadata", METADATA),
    ("endpoints", "addresses conditions deprecatedTopology hints hostname nodeName targetRef zone"),
    ("endpoints.conditions", "ready serving terminating"),
    ("endpoints.hints", "forNodes forZones"),
    ("ports", "appProtocol name port protocol"),
];

/// Fields that an object does not have: where they are, and what is wrong.
pub(super) struct Unknown(Vec<(String, String)>);

impl Unknown {
    /// Finds the unknown fields of an object.
    pub(super) fn of(object: &Value, fields: Fields) -> Self {
        let mut found = Vec::new();
        find(object, "", "", fields, &mut found);
        Self(found)
    }

    /// Adds a problem of the object with this name for each of them.
    pub(super) fn report(self, object: &str, problems: &mut Vec<Problem>) {
        let room = MOST_PROBLEMS.saturating_sub(problems.len());
        let problem = |(field, message)| Problem { object: object.to_owned(), field, message };
        problems.extend(self.0.into_iter().take(room).map(problem));
    }
}

/// `path` is as in the list of the fields, `place` has also the numbers of the elements.
fn find(value: &Value, path: &str, place: &str, fields: Fields, found: &mut Vec<(String, String)>) {
    let Some((_, known)) = fields.iter().find(|(of, _)| *of == path) else { return };
    match value {
        Value::Array(all) => {
            for (index, one) in all.iter().enumerate() {
                find(one, path, &format!("{place}[{index}]"), fields, found);
            }
        }
        Value::Object(all) => {
            for (name, inner) in all {
                let below =
                    |above: &str| if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
                if known.split(' ').any(|one| one == name) {
                    find(inner, &below(path), &below(place), fields, found);
                } else {
                    let near = did_you_mean(&nearest(name, known.split(' ')));
                    found.push((below(place), format!("unknown field, ignored{near}")));
                }
            }
        }
        _ => {}
    }
}
