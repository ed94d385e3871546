//! What happens to TCP connections to an endpoint that is removed from its Service.

use std::fmt;
use std::time::Duration;

/// The annotations `ballast.io/removal-policy` and `ballast.io/removal-delay`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RemovalPolicy {
    /// The connections stay with the endpoint until they end, as with kube-proxy.
    #[default]
    Drain,
    /// The connections are reset this long after the endpoint was removed, so that clients connect again.
    Reset(Duration),
}

impl RemovalPolicy {
    /// The names of the policies.
    pub const NAMES: [&str; 2] = ["drain", "reset"];
    /// The longest delay: the same as the longest session affinity of a Service.
    pub const LONGEST: Duration = Duration::from_hours(24);

    /// Returns the delay after which connections are reset; `None` if they are never reset.
    pub const fn reset_after(self) -> Option<Duration> {
        match self {
            Self::Drain => None,
            Self::Reset(delay) => Some(delay),
        }
    }
}

impl fmt::Display for RemovalPolicy {
    /// Writes `drain`, `reset`, or `reset after 30s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drain => f.write_str("drain"),
            Self::Reset(Duration::ZERO) => f.write_str("reset"),
            Self::Reset(delay) => write!(f, "reset after {delay:?}"),
        }
    }
}
