//! Values of flags that need more than `FromStr`: durations, listen addresses, log levels.
//!
//! Each error states what would be valid; clap puts the flag and the value in front of it.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use serde::Serializer;

use proxy_core::model::settings::FlowTimeouts;
use proxy_watch::api::connect;
use proxy_watch::api::convert::address::{self, AddressError};

mod algorithm;
mod detect_local;
mod error;
mod log;
mod ports;

pub use algorithm::AlgorithmName;
pub use detect_local::DetectLocalMode;
pub use error::ValueError;
pub use log::{LogFormat, LogLevel};
pub use ports::{NodePortRange, SnatPorts};

/// Parses a duration: a number of seconds, or as [`go_duration`].
pub fn duration(text: &str) -> Result<Duration, ValueError> {
    let seconds = text.parse::<u32>().map(|seconds| Duration::from_secs(seconds.into()));
    seconds.or_else(|_| go_duration(text))
}

/// Parses a duration as kube-proxy does, with Go's rules: `1s`, `500ms`, `1m30s`, `0`.
pub fn go_duration(text: &str) -> Result<Duration, ValueError> {
    // Go's durations are 64-bit numbers of nanoseconds.
    const LONGEST: Duration = Duration::from_nanos(i64::MAX as u64);
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or(ValueError::Duration)?;
        let (value, tail) = rest.split_at(number);
        let unit = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let seconds = match unit {
            "ns" => 1e-9,
            // Go knows the micro sign and the Greek letter.
            "us" | "µs" | "\u{3bc}s" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(ValueError::Duration),
        };
        let value: f64 = value.parse().map_err(|_| ValueError::Duration)?;
        let part = Duration::try_from_secs_f64(value * seconds).map_err(|_| ValueError::Duration)?;
        total = total.checked_add(part).ok_or(ValueError::Duration)?;
        rest = tail;
    }
    if text.is_empty() || total > LONGEST { Err(ValueError::Duration) } else { Ok(total) }
}

/// Parses the timeout of a flow, which is in whole seconds.
pub fn flow_timeout(text: &str) -> Result<u32, ValueError> {
    let timeout = duration(text)?;
    let seconds = FlowTimeouts::seconds_rounded_up(timeout);
    if Duration::from_secs(seconds.into()) == timeout { Ok(seconds) } else { Err(ValueError::FlowTimeout) }
}

/// Parses the length of the page's history; zero: no history.
pub fn page_history(text: &str) -> Result<Duration, ValueError> {
    let length = duration(text)?;
    let legal = length.is_zero() || (Duration::from_mins(4)..=Duration::from_hours(24)).contains(&length);
    if legal { Ok(length) } else { Err(ValueError::PageHistory) }
}

/// The listen address of a server, as a flag gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// The server is off: the flag was given with an empty value.
    Off,
    /// On this address and the default port.
    Address(IpAddr),
    /// On exactly this address.
    Socket(SocketAddr),
}

impl Listen {
    /// Returns the address to bind; `None` if the server is off.
    pub fn resolve(self, default_port: u16) -> Option<SocketAddr> {
        match self {
            Self::Off => None,
            Self::Address(address) => Some(SocketAddr::new(address, default_port)),
            Self::Socket(socket) => Some(socket),
        }
    }
}

impl FromStr for Listen {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self::Off);
        }
        // Users shorten `[::1]:10249` to `[::1]`, without a port.
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        if let Some(bare) = bare {
            return bare.parse::<Ipv6Addr>().map(|a| Self::Address(a.into())).map_err(|_| ValueError::Listen);
        }
        text.parse()
            .map(Self::Socket)
            .or_else(|_| text.parse().map(Self::Address))
            .map_err(|_| ValueError::Listen)
    }
}

/// Checks the URL of an API server. As with kube-proxy, an empty one counts as none.
pub fn api_server(text: &str) -> Result<String, ValueError> {
    // The credentials decide later about the scheme of HOST:PORT.
    if text.is_empty() || connect::server_url(text, true).is_some() {
        Ok(text.to_owned())
    } else {
        Err(ValueError::ApiServer)
    }
}

/// Parses an address, as in objects ([`address::parse`]).
pub fn address(text: &str) -> Result<IpAddr, AddressError> {
    address::parse(text)
}

/// Parses a range of addresses, as in objects ([`address::range`]).
pub fn range(text: &str) -> Result<IpNet, ValueError> {
    address::range(text).map_err(|_| ValueError::Range)
}

/// An element of `--nodeport-addresses`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodePortAddress {
    /// Every address except loopback ones.
    All,
    /// The node's internal addresses.
    Primary,
    /// Loopback addresses.
    Localhost,
    /// Addresses in this range.
    Range(IpNet),
}

impl NodePortAddress {
    /// Whether it selects nothing but loopback addresses.
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Localhost => true,
            Self::Range(range) => range.addr().is_loopback(),
            Self::All | Self::Primary => false,
        }
    }
}

impl FromStr for NodePortAddress {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::All),
            "primary" => Ok(Self::Primary),
            "localhost" => Ok(Self::Localhost),
            _ => range(text).map(Self::Range).map_err(|_| ValueError::NodePortAddress),
        }
    }
}

impl fmt::Display for NodePortAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Primary => f.write_str("primary"),
            Self::Localhost => f.write_str("localhost"),
            Self::Range(range) => range.fmt(f),
        }
    }
}

/// The largest capacity that a flag accepts: a map with this many flows of 112 bytes takes 1.9 GB.
pub const MAX_CAPACITY: u32 = 1 << 24;

/// Parses a map's capacity.
pub fn capacity(text: &str) -> Result<u32, ValueError> {
    let number: u32 = text.parse().map_err(|_| ValueError::Capacity(MAX_CAPACITY))?;
    if (1..=MAX_CAPACITY).contains(&number) { Ok(number) } else { Err(ValueError::Capacity(MAX_CAPACITY)) }
}

/// Parses a number of bytes, with a suffix of a Kubernetes quantity (`Ki`, `Mi`, `Gi`, `k`, `M`, `G`) or without.
pub fn bytes(text: &str) -> Result<u64, ValueError> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return Err(ValueError::Bytes),
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    number.filter(|bytes| *bytes > 0).ok_or(ValueError::Bytes)
}

/// The value of `--proxy-mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyMode {
    /// `ebpf`, or empty.
    #[default]
    Ebpf,
    /// A mode of kube-proxy; it means `ebpf` here, which is logged once.
    Legacy(&'static str),
}

impl ProxyMode {
    /// The modes of kube-proxy.
    pub const LEGACY: [&str; 3] = ["iptables", "ipvs", "nftables"];
}

impl FromStr for ProxyMode {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if matches!(text, "" | "ebpf") {
            return Ok(Self::Ebpf);
        }
        Self::LEGACY.into_iter().find(|mode| *mode == text).map(Self::Legacy).ok_or(ValueError::ProxyMode)
    }
}

/// Serializes a duration as seconds.
pub fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0", Some(Duration::ZERO))]
    #[case("30s", Some(Duration::from_secs(30)))]
    #[case("1m30s", Some(Duration::from_secs(90)))]
    #[case("1.5s", Some(Duration::from_millis(1500)))]
    #[case("250ms", Some(Duration::from_millis(250)))]
    #[case("24h", Some(Duration::from_hours(24)))]
    #[case("+5s", Some(Duration::from_secs(5)))]
    #[case("1000ns", Some(Duration::from_micros(1)))]
    #[case("1\u{b5}s", Some(Duration::from_micros(1)))]
    #[case("1\u{3bc}s", Some(Duration::from_micros(1)))]
    #[case("2562047h47m", Some(Duration::from_mins(2_562_047 * 60 + 47)))]
    #[case("2562047h48m", None)]
    #[case("+", None)]
    #[case("", None)]
    #[case("30", None)]
    #[case("s", None)]
    #[case("-1s", None)]
    #[case("1d", None)]
    #[case("1..5s", None)]
    #[case("99999999999999999999999h", None)]
    fn durations(#[case] text: &str, #[case] expected: Option<Duration>) {
        assert_eq!(go_duration(text).ok(), expected);
        let number = text.parse().ok().map(Duration::from_secs);
        assert_eq!(duration(text).ok(), expected.or(number), "a number without unit means seconds");
    }

    #[rstest]
    #[case("", Some(Listen::Off))]
    #[case("127.0.0.1:1", Some(Listen::Socket("127.0.0.1:1".parse().unwrap())))]
    #[case("[::]:10256", Some(Listen::Socket("[::]:10256".parse().unwrap())))]
    #[case("10.0.0.1", Some(Listen::Address("10.0.0.1".parse().unwrap())))]
    #[case("::1", Some(Listen::Address("::1".parse().unwrap())))]
    #[case("[::1]", Some(Listen::Address("::1".parse().unwrap())))]
    #[case("localhost:80", None)]
    #[case(":10249", None)]
    #[case("127.0.0.1:70000", None)]
    fn listen_addresses(#[case] text: &str, #[case] expected: Option<Listen>) {
        assert_eq!(text.parse().ok(), expected);
    }

    #[rstest]
    #[case("2", Some(LogLevel::Info))]
    #[case("4", Some(LogLevel::Debug))]
    #[case("10", Some(LogLevel::Trace))]
    #[case("WARN", Some(LogLevel::Warn))]
    #[case("100", Some(LogLevel::Trace))]
    #[case("-1", None)]
    #[case("loud", None)]
    fn log_levels(#[case] text: &str, #[case] expected: Option<LogLevel>) {
        assert_eq!(text.parse().ok(), expected);
    }

    #[rstest]
    #[case("1s", Some(1))]
    #[case("24h", Some(86_400))]
    #[case("596h31m23s", Some(FlowTimeouts::LONGEST))]
    #[case("596h31m24s", None)]
    #[case("0", None)]
    #[case("1500ms", None)]
    #[case("60", Some(60))]
    fn flow_timeouts(#[case] text: &str, #[case] expected: Option<u32>) {
        assert_eq!(flow_timeout(text).ok(), expected);
    }

    #[rstest]
    #[case("1", Some(1))]
    #[case("200Mi", Some(200 << 20))]
    #[case("3G", Some(3_000_000_000))]
    #[case("0", None)]
    #[case("Mi", None)]
    #[case("1.5Gi", None)]
    #[case("20000000000Gi", None)]
    fn numbers_of_bytes(#[case] text: &str, #[case] expected: Option<u64>) {
        assert_eq!(bytes(text).ok(), expected);
    }

    #[rstest]
    #[case("1", true)]
    #[case("16777216", true)]
    #[case("0", false)]
    #[case("16777217", false)]
    #[case("many", false)]
    fn capacities(#[case] text: &str, #[case] legal: bool) {
        assert_eq!(capacity(text).is_ok(), legal);
    }

    #[rstest]
    #[case("", true)]
    #[case("https://192.0.2.1:6443", true)]
    #[case("http://[2001:db8::1]", true)]
    #[case("foo:bar", false)]
    #[case("192.0.2.1:6443", true)]
    #[case("192.0.2.1:6443/path", false)]
    #[case("/path", false)]
    #[case("ftp://192.0.2.1", false)]
    fn urls_of_api_servers(#[case] text: &str, #[case] legal: bool) {
        assert_eq!(api_server(text).is_ok(), legal);
    }

    #[rstest]
    #[case("0", Some(0))]
    #[case("4m", Some(240))]
    #[case("24h", Some(86_400))]
    #[case("3m59s", None)]
    #[case("25h", None)]
    #[case("1", None)]
    fn histories(#[case] text: &str, #[case] expected: Option<u64>) {
        assert_eq!(page_history(text).ok(), expected.map(Duration::from_secs));
    }
}
