//! The origin of telemetry: this program on this node.

use percent_encoding::percent_decode_str;
use serde::Serialize;

use super::value::Attributes;

/// Name of the service, unless `OTEL_SERVICE_NAME` sets another one.
const SERVICE: &str = "ballast";

/// OTLP's `Resource`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Resource {
    /// Attributes of the program and the node.
    pub attributes: Attributes,
}

/// OpenTelemetry's instrumentation scope, the same for all telemetry of Ballast.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct InstrumentationScope {
    name: &'static str,
    version: &'static str,
}

/// Ballast's scope.
pub(super) const SCOPE: InstrumentationScope =
    InstrumentationScope { name: "ballast", version: env!("CARGO_PKG_VERSION") };

impl Resource {
    /// Describes this program. `name` is the value of `OTEL_SERVICE_NAME`, `attributes` the value of
    /// `OTEL_RESOURCE_ATTRIBUTES`. The attributes override the values that the agent knows, and the name overrides both.
    pub fn new(name: Option<&str>, attributes: &[(String, String)], node: Option<&str>) -> Self {
        let mut all = Attributes::default();
        all.set("service.name", SERVICE);
        all.set("service.version", env!("CARGO_PKG_VERSION"));
        if let Some(node) = node {
            all.set("service.instance.id", node);
            all.set("k8s.node.name", node);
        }
        for (key, value) in attributes {
            all.set(key.clone(), value.as_str());
        }
        all.set_some("service.name", name.filter(|name| !name.is_empty()));
        Self { attributes: all }
    }
}

/// Parses the pairs of `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_EXPORTER_OTLP_HEADERS`: `key=value,key=value`, with percent-encoded
/// values. Returns `None` if the text is not such a list.
pub fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=')?;
        let key = key.trim();
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        (!key.is_empty()).then(|| (key.to_owned(), value.into_owned()))
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::otlp::value::Value;

    #[test]
    fn lists_of_pairs() {
        let of = |text: &str| pairs(text);
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(of(""), Some(Vec::new()));
        assert_eq!(of("a=1, b = x%20y=z,"), Some(vec![pair("a", "1"), pair("b", "x y=z")]));
        assert_eq!(of("a"), None);
        assert_eq!(of("=1"), None);
        assert_eq!(of("a=%ff"), None, "no UTF-8");
    }

    #[test]
    fn variables_win_over_what_is_known() {
        let variables =
            [("k8s.node.name".to_owned(), "n2".to_owned()), ("service.name".to_owned(), "x".to_owned())];
        let of = |name| Resource::new(name, &variables, Some("n1")).attributes;
        assert_eq!(of(None).get("service.name"), Some(&Value::from("x")));
        assert_eq!(of(Some("y")).get("service.name"), Some(&Value::from("y")));
        assert_eq!(of(Some("")).get("k8s.node.name"), Some(&Value::from("n2")));
        assert_eq!(
            Resource::new(None, &[], None).attributes.get("service.name"),
            Some(&Value::from("ballast"))
        );
    }
}
