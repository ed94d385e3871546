//! Who and what is asked about: arguments of `ballast monitor` and `ballast explain`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use proxy_common::reason::Reason;

use crate::model::net::Protocol;

/// Why it is no question.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// Not a client.
    #[error("expected an IP address, or host, or pod")]
    Client,
    /// Not an address and port.
    #[error("expected ADDRESS:PORT or ADDRESS:PORT/PROTOCOL, like 10.96.0.10:80 or [fd00::1]:53/udp")]
    Dialled,
    /// Not a reason.
    #[error("expected a name of docs/reasons.md: {}", reasons())]
    Reason,
}

fn reasons() -> String {
    Reason::ALL.iter().map(|reason| reason.label()).collect::<Vec<_>>().join(", ")
}

/// Who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The host or pod that has that address.
    Address(IpAddr),
    /// A process in the node's network namespace.
    Host,
    /// A process in a pod of this node.
    Pod,
}

impl FromStr for Client {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "host" => Ok(Self::Host),
            "pod" => Ok(Self::Pod),
            _ => text.parse().map(Self::Address).map_err(|_| QuestionError::Client),
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Host => f.write_str("host"),
            Self::Pod => f.write_str("pod"),
        }
    }
}

/// What it dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialled {
    /// Address and port.
    pub to: SocketAddr,
    /// TCP unless it was said.
    pub protocol: Protocol,
}

impl FromStr for Dialled {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (to, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let to = to.parse().map_err(|_| QuestionError::Dialled)?;
        let all = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
        let protocol = all.into_iter().find(|known| known.to_string().eq_ignore_ascii_case(protocol));
        protocol.map(|protocol| Self { to, protocol }).ok_or(QuestionError::Dialled)
    }
}

impl fmt::Display for Dialled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.to, self.protocol)
    }
}

/// Parses a reason by its name.
pub fn reason(text: &str) -> Result<Reason, QuestionError> {
    Reason::ALL.iter().copied().find(|reason| reason.label() == text).ok_or(QuestionError::Reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("10.96.0.10:80", "10.96.0.10:80/TCP")]
    #[case("[fd00::1]:53/udp", "[fd00::1]:53/UDP")]
    #[case("10.96.0.10:9/SCTP", "10.96.0.10:9/SCTP")]
    #[case("10.96.0.10", "")]
    #[case("10.96.0.10:80/icmp", "")]
    #[case("redis:80", "")]
    fn what_is_dialled(#[case] text: &str, #[case] expected: &str) {
        let parsed = text.parse::<Dialled>().map(|dialled| dialled.to_string()).unwrap_or_default();
        assert_eq!(parsed, expected);
    }

    #[test]
    fn who_and_why() {
        for text in ["host", "pod", "192.0.2.1", "fd00::1"] {
            assert_eq!(text.parse::<Client>().unwrap().to_string(), text);
        }
        assert_eq!("eth0".parse::<Client>(), Err(QuestionError::Client));
        assert_eq!(reason("no_endpoint"), Ok(Reason::NoEndpoint));
        assert!(reason("no").unwrap_err().to_string().contains("malformed, fragment"));
    }
}
