//! Arguments of `ballast monitor` and `ballast explain`: clients, destinations, reasons.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use proxy_common::reason::Reason;

use crate::config::value::{self, ValueError};
use crate::maps::view::FlowState;
use crate::model::nearest::{did_you_mean, nearest};
use crate::model::net::Protocol;

/// Why an argument is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// Not a client.
    #[error("expected an IP address, host or pod")]
    Client,
    /// Not an address and port.
    #[error("expected ADDRESS:PORT or ADDRESS:PORT/PROTOCOL, like 10.96.0.10:80 or [fd00::1]:53/udp")]
    Destination,
    /// Not a reason.
    #[error("expected the name of a reason: {}{}", reasons(), did_you_mean(.0))]
    Reason(Vec<String>),
    /// Not one end of a connection.
    #[error(
        "expected an address or a range, with or without a port, like 10.0.0.7, 10.0.0.0/24 or [fd00::7]:80"
    )]
    Peer,
    /// Not a protocol.
    #[error("expected tcp, udp or sctp")]
    Protocol,
    /// Not a state of a flow.
    #[error("expected {}", FlowState::ALL.map(FlowState::label).join(", "))]
    State,
}

fn reasons() -> String {
    Reason::ALL.iter().map(|reason| reason.label()).collect::<Vec<_>>().join(", ")
}

/// The client of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The host or pod with this address.
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

/// The destination of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Address and port.
    pub to: SocketAddr,
    /// TCP unless another protocol was given.
    pub protocol: Protocol,
}

impl FromStr for Destination {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (to, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let to = to.parse().map_err(|_| QuestionError::Destination)?;
        self::protocol(protocol).map(|protocol| Self { to, protocol }).map_err(|_| QuestionError::Destination)
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.to, self.protocol)
    }
}

/// Parses a reason by its name.
pub fn reason(text: &str) -> Result<Reason, QuestionError> {
    let near = || nearest(text, Reason::ALL.iter().map(|reason| reason.label()));
    let wrong = || QuestionError::Reason(near().into_iter().map(str::to_owned).collect());
    Reason::ALL.iter().copied().find(|reason| reason.label() == text).ok_or_else(wrong)
}

/// One end of connections: an address or a range, optionally with a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    range: IpNet,
    port: Option<u16>,
}

impl Peer {
    /// Whether this end matches.
    pub fn is(&self, end: &SocketAddr) -> bool {
        self.range.contains(&end.ip()) && self.port.is_none_or(|port| port == end.port())
    }
}

impl FromStr for Peer {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(socket) = text.parse::<SocketAddr>() {
            return Ok(Self { range: socket.ip().into(), port: Some(socket.port()) });
        }
        // `10.0.0.0/24:80` and `[fd00::/64]:80` are ranges with a port.
        let (range, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((range, "")) => (range, None),
            Some((range, rest)) => (range, Some(rest.strip_prefix(':').ok_or(QuestionError::Peer)?)),
            None => match text.split_once(':') {
                Some((range, port)) if !port.contains(':') => (range, Some(port)),
                _ => (text, None),
            },
        };
        let address = || range.parse::<IpAddr>().map(IpNet::from);
        let range = range.parse::<IpNet>().or_else(|_| address()).map_err(|_| QuestionError::Peer)?;
        let port = port.map(str::parse).transpose().map_err(|_| QuestionError::Peer)?;
        Ok(Self { range, port })
    }
}

/// Parses a protocol.
pub fn protocol(text: &str) -> Result<Protocol, QuestionError> {
    let all = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    let known = all.into_iter().find(|known| known.to_string().eq_ignore_ascii_case(text));
    known.ok_or(QuestionError::Protocol)
}

/// Parses a state of a flow.
pub fn flow_state(text: &str) -> Result<FlowState, QuestionError> {
    FlowState::ALL.into_iter().find(|state| state.label() == text).ok_or(QuestionError::State)
}

/// Parses a duration, or a number of seconds.
pub fn seconds(text: &str) -> Result<Duration, ValueError> {
    let time = match text.parse::<u32>() {
        Ok(number) => Duration::from_secs(number.into()),
        Err(_) => value::duration(text)?,
    };
    if time.is_zero() { Err(ValueError::Duration) } else { Ok(time) }
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
        let parsed =
            text.parse::<Destination>().map(|destination| destination.to_string()).unwrap_or_default();
        assert_eq!(parsed, expected);
    }

    #[rstest]
    #[case("10.0.0.7", "10.0.0.7:80", true)]
    #[case("10.0.0.7:80", "10.0.0.7:80", true)]
    #[case("10.0.0.7:81", "10.0.0.7:80", false)]
    #[case("10.0.0.0/24", "10.0.0.7:80", true)]
    #[case("10.0.0.0/24:80", "10.0.0.7:80", true)]
    #[case("10.0.1.0/24", "10.0.0.7:80", false)]
    #[case("fd00::7", "[fd00::7]:80", true)]
    #[case("[fd00::/64]:80", "[fd00::7]:80", true)]
    #[case("[fd00::7]:81", "[fd00::7]:80", false)]
    fn ends_of_connections(#[case] text: &str, #[case] end: &str, #[case] expected: bool) {
        assert_eq!(text.parse::<Peer>().unwrap().is(&end.parse().unwrap()), expected);
    }

    #[rstest]
    #[case("web")]
    #[case("10.0.0.7:http")]
    #[case("10.0.0.0/33")]
    #[case("")]
    fn what_is_no_end(#[case] text: &str) {
        assert_eq!(text.parse::<Peer>(), Err(QuestionError::Peer));
    }

    #[test]
    fn a_number_is_of_seconds() {
        assert_eq!(seconds("5"), Ok(Duration::from_secs(5)));
        assert_eq!(seconds("500ms"), Ok(Duration::from_millis(500)));
        assert!(seconds("0").is_err() && seconds("x").is_err());
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
