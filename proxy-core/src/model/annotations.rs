//! The annotations of Services, and which of them tenants may use.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// An annotation `ballast.io/...` of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Annotation {
    /// `algorithm`
    Algorithm,
    /// `ejection`
    Ejection,
    /// `external-failover`. Nodes send packets of clients outside on, without translation.
    ExternalFailover,
    /// `forwarding-mode`. With DSR, every node watches all nodes and accepts packets that they encapsulate.
    ForwardingMode,
    /// `rebalance`
    Rebalance,
    /// `removal-policy`, with `removal-delay`
    RemovalPolicy,
    /// `socket-lb`
    SocketLb,
    /// `weights`
    Weights,
}

impl Annotation {
    /// All annotations.
    pub const ALL: [Self; 8] = [
        Self::Algorithm,
        Self::Ejection,
        Self::ExternalFailover,
        Self::ForwardingMode,
        Self::Rebalance,
        Self::RemovalPolicy,
        Self::SocketLb,
        Self::Weights,
    ];

    /// Returns the name without `ballast.io/`.
    pub fn label(self) -> &'static str {
        self.into()
    }

    /// Whether the annotation changes what nodes do for others than the Service.
    const fn affects_nodes(self) -> bool {
        matches!(self, Self::ExternalFailover | Self::ForwardingMode)
    }
}

/// A set of annotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Annotations(u16);

impl Annotations {
    /// Every annotation.
    pub const ALL: Self = Self((1 << Annotation::ALL.len()) - 1);
    /// No annotation.
    pub const NONE: Self = Self(0);

    /// Whether an annotation is in the set.
    pub const fn has(self, annotation: Annotation) -> bool {
        self.0 & 1 << annotation as u8 != 0
    }

    const fn with(self, annotation: Annotation) -> Self {
        Self(self.0 | 1 << annotation as u8)
    }
}

impl FromIterator<Annotation> for Annotations {
    fn from_iter<I: IntoIterator<Item = Annotation>>(all: I) -> Self {
        all.into_iter().fold(Self::NONE, Self::with)
    }
}

impl Default for Annotations {
    /// Those without an effect on nodes.
    fn default() -> Self {
        Annotation::ALL.into_iter().filter(|annotation| !annotation.affects_nodes()).collect()
    }
}

/// The text is no list of annotations.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not an annotation: give a list of {names}, or all, or none", names = names())]
pub struct UnknownAnnotation(String);

fn names() -> String {
    Annotation::ALL.map(Annotation::label).join(", ")
}

impl FromStr for Annotations {
    type Err = UnknownAnnotation;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let one = |name: &str| name.parse::<Annotation>().map_err(|_| UnknownAnnotation(name.to_owned()));
        match text.trim() {
            "all" => Ok(Self::ALL),
            "none" | "" => Ok(Self::NONE),
            list => list.split(',').map(|name| one(name.trim())).collect(),
        }
    }
}

impl fmt::Display for Annotations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = Annotation::ALL.into_iter().filter(|annotation| self.has(*annotation));
        let names: Vec<_> = has.map(Annotation::label).collect();
        f.write_str(if names.is_empty() { "none".to_owned() } else { names.join(",") }.as_str())
    }
}

impl Serialize for Annotations {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_they_are_written() {
        let default = Annotations::default();
        assert_eq!(default.to_string(), "algorithm,ejection,rebalance,removal-policy,socket-lb,weights");
        for set in [default, Annotations::ALL, Annotations::NONE] {
            assert_eq!(set.to_string().parse::<Annotations>().unwrap(), set);
        }
        assert_eq!("all".parse::<Annotations>().unwrap(), Annotations::ALL);
        let error = "weights, forwarding".parse::<Annotations>().unwrap_err().to_string();
        assert!(
            error.contains("`forwarding` is not an annotation") && error.contains("forwarding-mode"),
            "{error}"
        );
    }
}
