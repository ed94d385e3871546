//! Which Service ports are meant.

use std::fmt;
use std::str::FromStr;

use crate::maps::view::{NameRow, Snapshot};

/// The text names no Service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no Service: give NAMESPACE/NAME or NAMESPACE/NAME:PORT, like default/redis:6379")]
pub struct FilterError(String);

/// `namespace/name`, or one port of it by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceFilter {
    namespace: String,
    name: String,
    port: Option<String>,
}

impl ServiceFilter {
    /// Whether this Service port is meant. A number is looked up among the ports that clients dial.
    pub fn matches(&self, id: u32, name: &NameRow, snapshot: &Snapshot) -> bool {
        if (&self.namespace, &self.name) != (&name.namespace, &name.name) {
            return false;
        }
        let Some(port) = &self.port else { return true };
        let number: Option<u16> = port.parse().ok();
        *port == name.port
            || number.is_some_and(|number| {
                snapshot.frontends.iter().any(|row| row.service == id && row.port == number)
            })
    }
}

impl FromStr for ServiceFilter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // As kubectl: what is not said is in the namespace `default`.
        let (namespace, rest) = text.split_once('/').unwrap_or(("default", text));
        let (name, port) = rest.split_once(':').map_or((rest, None), |(name, port)| (name, Some(port)));
        if namespace.is_empty() || name.is_empty() || name.contains('/') || port.is_some_and(str::is_empty) {
            return Err(FilterError(text.to_owned()));
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned(), port: port.map(str::to_owned) })
    }
}

impl fmt::Display for ServiceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)?;
        self.port.iter().try_for_each(|port| write!(f, ":{port}"))
    }
}
