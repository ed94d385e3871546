//! Selection of Service ports.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::error::{FilterError, ShowError};
use super::names::left_alone;
use crate::cli::args::list::NamespaceArgs;
use crate::maps::view::{NameRow, Snapshot};
use crate::model::nearest::{did_you_mean, nearest};

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
    pub fn parse(text: &str, flags: &NamespaceArgs) -> Result<Self, FilterError> {
        let wrong = || FilterError::Form(text.to_owned());
        let rest = text.strip_prefix("service/").or_else(|| text.strip_prefix("svc/")).unwrap_or(text);
        let (namespace, rest) = match rest.split_once('/') {
            Some((namespace, rest)) => (Some(namespace), rest),
            None => (None, rest),
        };
        let (name, port) = rest.split_once(':').map_or((rest, None), |(name, port)| (name, Some(port)));
        let is_wrong = namespace.is_some_and(str::is_empty) || name.is_empty() || name.contains('/');
        if is_wrong || port.is_some_and(str::is_empty) {
            return Err(wrong());
        }
        let namespace = match (namespace, &flags.namespace) {
            (Some(named), Some(flag)) if !flags.all_namespaces && named != flag => {
                return Err(FilterError::Namespace { text: text.to_owned(), namespace: flag.clone() });
            }
            (Some(named), _) => Some(named.to_owned()),
            (None, _) if flags.all_namespaces => None,
            // As in kubectl, the default namespace is `default`.
            (None, flag) => Some(flag.clone().unwrap_or_else(|| "default".to_owned())),
        };
        Ok(Self { namespace, name: name.to_owned(), port: port.map(str::to_owned) })
    }

    /// Whether the filter selects this Service port. A number is compared with the ports of its frontends.
    pub fn matches(&self, id: u32, name: &NameRow, snapshot: &Snapshot) -> bool {
        if self.name != name.name || self.namespace.as_ref().is_some_and(|meant| *meant != name.namespace) {
            return false;
        }
        let Some(port) = &self.port else { return true };
        let number: Option<u16> = port.parse().ok();
        *port == name.port
            || number.is_some_and(|number| {
                snapshot.frontends.iter().any(|row| row.service == id && row.port == number)
            })
    }

    /// Returns the error that no Service port is selected.
    pub(super) fn not_found(&self, snapshot: &Snapshot) -> ShowError {
        let left_alone = left_alone(snapshot).map(|all| format!("; unmanaged cluster addresses: {all}"));
        ShowError::NoService {
            filter: self.to_string(),
            near: self.proposals(snapshot),
            left_alone: left_alone.unwrap_or_default(),
        }
    }

    /// Returns programmed names that are similar, as text.
    pub fn proposals(&self, snapshot: &Snapshot) -> String {
        let services: BTreeSet<(&str, &str)> =
            snapshot.names.values().map(|row| (&*row.namespace, &*row.name)).collect();
        let of_that_name = services.iter().filter(|(_, name)| *name == self.name);
        let mut found: Vec<String> = of_that_name.map(|(space, name)| format!("{space}/{name}")).collect();
        // If the Service exists, only the name of its port is wrong.
        let ports = snapshot.names.values().filter(|row| {
            row.name == self.name && self.namespace.as_ref().is_none_or(|meant| *meant == row.namespace)
        });
        let ports: BTreeSet<String> = ports.map(ToString::to_string).collect();
        if self.port.is_some() && !ports.is_empty() {
            found = ports.into_iter().collect();
        } else if found.is_empty() {
            let all: Vec<String> = services.iter().map(|(space, name)| format!("{space}/{name}")).collect();
            let asked = format!("{}/{}", self.namespace.as_deref().unwrap_or_default(), self.name);
            let alike = nearest(&self.name, services.iter().map(|(_, name)| *name));
            let by_name = services.iter().filter(|(_, name)| alike.contains(name));
            found = by_name.map(|(space, name)| format!("{space}/{name}")).take(3).collect();
            if found.is_empty() {
                found =
                    nearest(&asked, all.iter().map(String::as_str)).into_iter().map(str::to_owned).collect();
            }
        }
        did_you_mean(&found)
    }
}

impl FromStr for ServiceFilter {
    type Err = FilterError;

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

/// Which Service ports a list contains.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Only Service ports of this namespace.
    pub namespace: Option<String>,
    /// Only Services with the requested labels, as namespace and name.
    pub labelled: Option<BTreeSet<(String, String)>>,
    /// Only these Services; empty: all.
    pub services: Vec<ServiceFilter>,
}

impl Scope {
    /// Whether all Service ports are selected.
    pub fn is_all(&self) -> bool {
        self.namespace.is_none() && self.labelled.is_none() && self.services.is_empty()
    }

    /// Whether this Service port is selected. A Service port without a name belongs to no namespace.
    pub fn takes(&self, id: u32, snapshot: &Snapshot) -> bool {
        let Some(name) = snapshot.names.get(&id) else { return self.is_all() };
        let is_labelled = |names: &BTreeSet<(String, String)>| {
            names.iter().any(|(space, one)| *space == name.namespace && *one == name.name)
        };
        self.namespace.as_ref().is_none_or(|meant| *meant == name.namespace)
            && self.labelled.as_ref().is_none_or(is_labelled)
            && (self.services.is_empty()
                || self.services.iter().any(|filter| filter.matches(id, name, snapshot)))
    }

    /// Fails with the first named Service that is not programmed.
    pub fn check(&self, snapshot: &Snapshot) -> Result<(), ShowError> {
        let is_there = |filter: &&ServiceFilter| {
            snapshot.names.iter().any(|(id, name)| filter.matches(*id, name, snapshot))
        };
        match self.services.iter().find(|filter| !is_there(filter)) {
            Some(filter) => Err(filter.not_found(snapshot)),
            None => Ok(()),
        }
    }
}
