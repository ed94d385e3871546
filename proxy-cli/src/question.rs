//! Arguments of `ballast monitor`, `ballast explain` and `ballast flow`: clients, destinations, reasons, states.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use ipnet::IpNet;
use proxy_common::reason::Reason;

use crate::value::{self, ValueError};
use proxy_core::model::FlowState;
use proxy_core::model::net::Protocol;

/// Why an argument is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// Not a client.
    #[error("expected an IP address, host, pod, pod/NAME or pod/NAMESPACE/NAME")]
    Client,
    /// Neither an address and port nor a Service.
    #[error(
        "expected ADDRESS:PORT or a Service, each with /PROTOCOL if it is not TCP, like 10.96.0.10:80, [fd00::1]:53/udp or \
         svc/web:http"
    )]
    Destination,
    /// Not one end of a connection.
    #[error(
        "expected an address or a range, with or without a port, like 10.0.0.7, 10.0.0.0/24 or [fd00::7]:80"
    )]
    Peer,
}

/// The client of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The host or pod with this address.
    Address(IpAddr),
    /// A process in the node's network namespace.
    Host,
    /// A process in a pod of this node; its address, if it is known.
    Pod(Option<IpAddr>),
}

impl Client {
    /// Returns the client's address, if it is known.
    pub const fn address(self) -> Option<IpAddr> {
        match self {
            Self::Address(address) => Some(address),
            Self::Pod(address) => address,
            Self::Host => None,
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Host => f.write_str("host"),
            Self::Pod(None) => f.write_str("pod"),
            Self::Pod(Some(address)) => write!(f, "pod {address}"),
        }
    }
}

/// A client as an argument names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientArg {
    /// The client itself.
    Known(Client),
    /// A pod, by namespace and name; the API server knows its node and addresses.
    Pod {
        /// `None`: the namespace of `--namespace`, or `default`.
        namespace: Option<String>,
        /// The pod's name.
        name: String,
    },
}

impl FromStr for ClientArg {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "host" => return Ok(Self::Known(Client::Host)),
            "pod" => return Ok(Self::Known(Client::Pod(None))),
            _ => {}
        }
        let Some(rest) = ["pod/", "pods/", "po/"].iter().find_map(|kind| text.strip_prefix(kind)) else {
            let address = text.parse().map_err(|_| QuestionError::Client)?;
            return Ok(Self::Known(Client::Address(address)));
        };
        let (namespace, name) =
            rest.split_once('/').map_or((None, rest), |(space, name)| (Some(space.to_owned()), name));
        let is_empty = name.is_empty() || name.contains('/') || namespace.as_deref() == Some("");
        if is_empty { Err(QuestionError::Client) } else { Ok(Self::Pod { namespace, name: name.to_owned() }) }
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

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.to, self.protocol)
    }
}

/// A destination as an argument names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationArg {
    /// An address.
    Address(Destination),
    /// A Service, and the protocol if it is given.
    Service(String, Option<Protocol>),
}

impl FromStr for DestinationArg {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = text.rsplit_once('/').and_then(|(rest, last)| Some((rest, protocol(last)?)));
        let (rest, protocol) = known.map_or((text, None), |(rest, protocol)| (rest, Some(protocol)));
        if let Ok(to) = rest.parse() {
            return Ok(Self::Address(Destination { to, protocol: protocol.unwrap_or(Protocol::Tcp) }));
        }
        // An address without a port is no name, and neither is one with a wrong port or protocol.
        let is_address = |text: &str| {
            let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
            text.parse::<IpAddr>().is_ok() || host.parse::<IpAddr>().is_ok()
        };
        let is_name = !rest.is_empty() && !rest.split('/').any(|part| is_address(part) || part.contains('['));
        if is_name { Ok(Self::Service(rest.to_owned(), protocol)) } else { Err(QuestionError::Destination) }
    }
}

fn protocol(text: &str) -> Option<Protocol> {
    PROTOCOLS.into_iter().find(|known| known.to_string().eq_ignore_ascii_case(text))
}

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

/// Returns the parser of one of these values by its word, in any case; the shell completes the words.
fn words<T: Copy + Send + Sync + 'static>(
    all: Vec<(&'static str, &'static str, T)>,
) -> impl TypedValueParser<Value = T> {
    let values = all.iter().map(|(word, help, _)| {
        let value = PossibleValue::new(*word);
        if help.is_empty() { value } else { value.help(*help) }
    });
    PossibleValuesParser::new(values.collect::<Vec<_>>()).try_map(move |given| {
        let found = all.iter().find(|(word, ..)| word.eq_ignore_ascii_case(&given));
        found.map(|(.., value)| *value).ok_or_else(|| format!("unknown value {given}"))
    })
}

/// Returns the parser of a protocol.
pub fn protocols() -> impl TypedValueParser<Value = Protocol> {
    words(vec![("tcp", "", Protocol::Tcp), ("udp", "", Protocol::Udp), ("sctp", "", Protocol::Sctp)])
}

/// Returns the parser of a state of a flow.
pub fn flow_states() -> impl TypedValueParser<Value = FlowState> {
    words(FlowState::ALL.map(|one| (one.label(), "", one)).to_vec())
}

/// Returns the parser of a reason.
pub fn reasons() -> impl TypedValueParser<Value = Reason> {
    words(Reason::ALL.iter().map(|one| (one.label(), one.explanation().trim(), *one)).collect())
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.port, self.range) {
            (None, range) => range.fmt(f),
            (Some(port), IpNet::V4(range)) => write!(f, "{range}:{port}"),
            (Some(port), IpNet::V6(range)) => write!(f, "[{range}]:{port}"),
        }?;
        self.protocol.iter().try_for_each(|protocol| write!(f, "/{protocol}"))
    }
}

/// One end of connections: an address or a range, optionally with a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    range: IpNet,
    port: Option<u16>,
    /// `None`: any.
    protocol: Option<Protocol>,
}

impl Peer {
    /// Whether connections of this protocol, by its number, may have this end.
    pub fn has_protocol(&self, number: u8) -> bool {
        self.protocol.is_none_or(|protocol| protocol.number() == number)
    }

    /// Whether this end matches.
    pub fn is(&self, end: &SocketAddr) -> bool {
        self.range.contains(&end.ip()) && self.port.is_none_or(|port| port == end.port())
    }
}

impl FromStr for Peer {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = text.rsplit_once('/').and_then(|(rest, last)| Some((rest, protocol(last)?)));
        let (text, protocol) = known.map_or((text, None), |(rest, protocol)| (rest, Some(protocol)));
        if let Ok(socket) = text.parse::<SocketAddr>() {
            return Ok(Self { range: socket.ip().into(), port: Some(socket.port()), protocol });
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
        Ok(Self { range, port, protocol })
    }
}

/// Parses a duration that is not zero.
pub fn period(text: &str) -> Result<Duration, ValueError> {
    value::duration(text).ok().filter(|time| !time.is_zero()).ok_or(ValueError::Period)
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
    #[case("10.96.0.10:99999", "")]
    #[case("10.96.0.10:http", "")]
    #[case("10.96.0.10:80/icmp", "")]
    #[case("[fd00::1]:x", "")]
    #[case("", "")]
    #[case("redis:80", "redis:80")]
    #[case("svc/kube-dns:dns/UDP", "svc/kube-dns:dns UDP")]
    #[case("kube-system/kube-dns", "kube-system/kube-dns")]
    fn a_destination_is_an_address_or_a_service(#[case] text: &str, #[case] expected: &str) {
        let parsed = match text.parse() {
            Ok(DestinationArg::Address(destination)) => destination.to_string(),
            Ok(DestinationArg::Service(name, None)) => name,
            Ok(DestinationArg::Service(name, Some(protocol))) => format!("{name} {protocol}"),
            Err(_) => String::new(),
        };
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
    fn invalid_connection_ends_are_refused(#[case] text: &str) {
        assert_eq!(text.parse::<Peer>(), Err(QuestionError::Peer));
    }

    #[test]
    fn peer_with_protocol_matches_its_connections() {
        let peer: Peer = "10.0.0.7:80/UDP".parse().unwrap();
        assert!(peer.is(&"10.0.0.7:80".parse().unwrap()) && peer.has_protocol(17) && !peer.has_protocol(6));
        assert!("10.0.0.0/24".parse::<Peer>().unwrap().has_protocol(6));
    }

    #[test]
    fn a_period_of_zero_is_refused() {
        assert_eq!(period("5"), Ok(Duration::from_secs(5)));
        assert_eq!(period("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!((period("0"), period("x")), (Err(ValueError::Period), Err(ValueError::Period)));
    }

    #[rstest]
    #[case("host", Some(ClientArg::Known(Client::Host)))]
    #[case("pod", Some(ClientArg::Known(Client::Pod(None))))]
    #[case("fd00::1", Some(ClientArg::Known(Client::Address("fd00::1".parse().unwrap()))))]
    #[case("pod/web-0", Some(ClientArg::Pod { namespace: None, name: "web-0".to_owned() }))]
    #[case("po/shop/web-0", Some(ClientArg::Pod { namespace: Some("shop".to_owned()), name: "web-0".to_owned() }))]
    #[case("eth0", None)]
    #[case("pod/", None)]
    #[case("pod/a/b/c", None)]
    fn a_client_is_an_address_a_word_or_a_pod(#[case] text: &str, #[case] expected: Option<ClientArg>) {
        assert_eq!(text.parse().ok(), expected);
    }
}
