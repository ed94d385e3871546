//! What becomes of TCP connections to an endpoint that leaves its Service.

use std::fmt;
use std::time::Duration;

/// The annotations `ballast.io/removal-policy` and `ballast.io/removal-delay`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RemovalPolicy {
    /// They go on with the endpoint, as with kube-proxy.
    #[default]
    Drain,
    /// They are reset so long after the endpoint has left, so that clients connect again.
    Reset(Duration),
}

impl RemovalPolicy {
    /// The names of the policies.
    pub const NAMES: [&str; 2] = ["drain", "reset"];
    /// The longest delay: as long as the affinity of a Service may last, too.
    pub const LONGEST: Duration = Duration::from_hours(24);

    /// When connections are reset; `None`: never.
    pub const fn reset_after(self) -> Option<Duration> {
        match self {
            Self::Drain => None,
            Self::Reset(delay) => Some(delay),
        }
    }
}

impl fmt::Display for RemovalPolicy {
    /// `drain`, `reset`, `reset after 30s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drain => f.write_str("drain"),
            Self::Reset(Duration::ZERO) => f.write_str("reset"),
            Self::Reset(delay) => write!(f, "reset after {delay:?}"),
        }
    }
}
