//! Selection of Services: the same arguments, with the same meaning and errors, for all commands.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::args::list::{ApiArgs, NamespaceArgs, SelectorArgs};
use proxy_core::model::nearest::{did_you_mean, nearest};

/// Words in front of a name, as in kubectl.
pub const KINDS: [&str; 3] = ["service/", "services/", "svc/"];
/// The namespace of a name without one, as in kubectl.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Asks the API server for the Services with these labels, as namespace and name; the error is a text.
pub type AskLabels = fn(&ApiArgs, &str) -> Result<BTreeSet<(String, String)>, String>;

/// Why the arguments select nothing.
#[derive(Debug, thiserror::Error)]
pub enum SelectorError {
    /// The text is not a name.
    #[error(
        "{0:?} is not the name of a Service: give NAME, NAMESPACE/NAME or svc/NAME, with or without :PORT, like default/redis:6379"
    )]
    Form(String),
    /// The name and the flag `--namespace` give different namespaces.
    #[error(
        "{text:?} is not in the namespace {namespace}: remove --namespace, or give the name without namespace"
    )]
    Contradiction {
        /// The text.
        text: String,
        /// Value of `--namespace`.
        namespace: String,
    },
    /// No such Service is programmed.
    #[error(
        "no Service port {filter} is programmed{near} (`ballast service list` shows all; headless Services, and Services without a TCP, UDP or SCTP port, are not programmed{unmanaged})"
    )]
    NoService {
        /// The requested Service.
        filter: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
        /// Unmanaged cluster addresses, with a leading `; `; or empty.
        unmanaged: String,
    },
    /// No Service of the namespace is programmed.
    #[error("no Service of the namespace {namespace} is programmed{near}")]
    NoNamespace {
        /// The requested namespace.
        namespace: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
    },
    /// No Service has the labels.
    #[error("no Service has the labels {0}")]
    NoLabels(String),
    /// The API server did not return the Services with the labels.
    #[error("cannot read labels from the API server: {0}")]
    Labels(String),
}

/// A Service, or one port of it by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceFilter {
    /// `None`: any namespace.
    namespace: Option<String>,
    name: String,
    port: Option<String>,
}

impl ServiceFilter {
    /// Parses `NAME` or `NAMESPACE/NAME`, with or without `svc/` in front; the flags give the namespace of a name without one.
    pub fn parse(text: &str, flags: &NamespaceArgs) -> Result<Self, SelectorError> {
        Self::parse_with_default(text, flags, DEFAULT_NAMESPACE)
    }

    /// Parses like [`ServiceFilter::parse`]; without flags, a name without namespace is in the namespace `default`.
    pub fn parse_with_default(
        text: &str,
        flags: &NamespaceArgs,
        default: &str,
    ) -> Result<Self, SelectorError> {
        let rest = KINDS.iter().find_map(|kind| text.strip_prefix(kind)).unwrap_or(text);
        let (namespace, rest) = match rest.split_once('/') {
            Some((namespace, rest)) => (Some(namespace), rest),
            None => (None, rest),
        };
        let (name, port) = rest.split_once(':').map_or((rest, None), |(name, port)| (name, Some(port)));
        let is_part =
            |text: &str| !text.is_empty() && !text.contains(|sign: char| sign == '/' || sign.is_whitespace());
        if !is_part(name) || !namespace.is_none_or(is_part) || !port.is_none_or(is_part) {
            return Err(SelectorError::Form(text.to_owned()));
        }
        let namespace = match (namespace, &flags.namespace) {
            (Some(named), Some(flag)) if !flags.all_namespaces && named != flag => {
                return Err(SelectorError::Contradiction { text: text.to_owned(), namespace: flag.clone() });
            }
            (Some(named), _) => Some(named.to_owned()),
            (None, _) if flags.all_namespaces => None,
            (None, flag) => Some(flag.clone().unwrap_or_else(|| default.to_owned())),
        };
        Ok(Self { namespace, name: name.to_owned(), port: port.map(str::to_owned) })
    }

    /// Whether the filter names only one port.
    pub const fn has_port(&self) -> bool {
        self.port.is_some()
    }

    /// Returns `namespace/name` as a part of a URL; `None` if the filter is for any namespace.
    pub fn path(&self) -> Option<String> {
        let encode = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
        Some(format!("{}/{}", encode(self.namespace.as_deref()?), encode(&self.name)))
    }

    /// Whether the filter selects the Service with this name, whatever its ports.
    pub fn is_of(&self, namespace: &str, name: &str) -> bool {
        self.name == name && self.namespace.as_ref().is_none_or(|meant| meant == namespace)
    }

    /// Whether the filter selects the port with this name, whose frontends have these numbers.
    pub fn is_port(&self, name: &str, mut numbers: impl Iterator<Item = u16>) -> bool {
        let Some(port) = &self.port else { return true };
        let number: Option<u16> = port.parse().ok();
        port == name || number.is_some_and(|number| numbers.any(|one| one == number))
    }
}

/// Returns Services with a similar name, as text: those of this name in other namespaces first.
pub fn nearest_services(filter: &ServiceFilter, services: &BTreeSet<(&str, &str)>) -> String {
    let ServiceFilter { namespace, name, port: _ } = filter;
    let join = |(space, name): &(&str, &str)| format!("{space}/{name}");
    let mut found: Vec<String> = services.iter().filter(|(_, one)| *one == name).map(join).collect();
    if found.is_empty() {
        let alike = nearest(name, services.iter().map(|(_, name)| *name));
        found = services.iter().filter(|(_, name)| alike.contains(name)).map(join).take(3).collect();
    }
    if found.is_empty() {
        let all: Vec<String> = services.iter().map(join).collect();
        let asked = format!("{}/{name}", namespace.as_deref().unwrap_or_default());
        found = nearest(&asked, all.iter().map(String::as_str)).into_iter().map(str::to_owned).collect();
    }
    did_you_mean(&found)
}

impl FromStr for ServiceFilter {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, &NamespaceArgs::default())
    }
}

impl fmt::Display for ServiceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.name)?;
        self.port.iter().try_for_each(|port| write!(f, ":{port}"))
    }
}

/// Returns the Services with these labels, as namespace and name; an error if there are none.
pub fn with_labels(
    labels: &str,
    services: BTreeSet<(String, String)>,
) -> Result<BTreeSet<(String, String)>, SelectorError> {
    if services.is_empty() { Err(SelectorError::NoLabels(labels.to_owned())) } else { Ok(services) }
}

/// Which Service ports a command is about.
#[derive(Clone, Debug, Default)]
pub struct ServiceSelector {
    /// Only Service ports of this namespace.
    pub namespace: Option<String>,
    /// Only Services with the requested labels, as namespace and name.
    pub labelled: Option<BTreeSet<(String, String)>>,
    /// Only these Services; empty: all.
    pub services: Vec<ServiceFilter>,
}

impl ServiceSelector {
    /// Evaluates the arguments; asks the API server if they contain labels.
    pub fn parse(args: &SelectorArgs, ask: AskLabels) -> Result<Self, SelectorError> {
        let SelectorArgs { namespace: flags, selector, api, services } = args;
        let services =
            services.iter().map(|text| ServiceFilter::parse(text, flags)).collect::<Result<_, _>>()?;
        let labelled = selector
            .as_deref()
            .map(|selector| with_labels(selector, ask(api, selector).map_err(SelectorError::Labels)?));
        let labelled = labelled.transpose()?;
        Ok(Self { namespace: flags.namespace.clone().filter(|_| !flags.all_namespaces), labelled, services })
    }

    /// Whether all Service ports are selected.
    pub fn is_all(&self) -> bool {
        self.namespace.is_none() && self.labelled.is_none() && self.services.is_empty()
    }

    /// Whether the Service with this name is selected, whatever its ports.
    pub fn is_of(&self, namespace: &str, name: &str) -> bool {
        let is_labelled =
            |names: &BTreeSet<(String, String)>| names.contains(&(namespace.to_owned(), name.to_owned()));
        self.namespace.as_ref().is_none_or(|meant| *meant == namespace)
            && self.labelled.as_ref().is_none_or(is_labelled)
            && (self.services.is_empty() || self.services.iter().any(|filter| filter.is_of(namespace, name)))
    }

    /// Fails if the selected namespace is none of these.
    pub fn check_namespace<'a>(&self, known: impl IntoIterator<Item = &'a str>) -> Result<(), SelectorError> {
        let known: BTreeSet<&str> = known.into_iter().collect();
        match &self.namespace {
            Some(namespace) if !known.contains(&**namespace) => Err(SelectorError::NoNamespace {
                namespace: namespace.clone(),
                near: did_you_mean(&nearest(namespace, known)),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_no_service_are_an_error() {
        let error = with_labels("app=x", BTreeSet::new()).unwrap_err();
        assert_eq!(error.to_string(), "no Service has the labels app=x");
        let one = BTreeSet::from([("default".to_owned(), "web".to_owned())]);
        assert_eq!(with_labels("app=x", one.clone()).unwrap(), one);
    }
}
