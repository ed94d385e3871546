//! Parses addresses as Kubernetes objects write them.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use thiserror::Error;

/// Why an address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AddressError {
    /// It is not an IP address.
    #[error("`{0}` is not an IP address")]
    Unreadable(String),
    /// It is an IP address, but packets cannot be sent to it from here.
    #[error("{address} is {what}; give a routable address")]
    Special {
        /// The address.
        address: IpAddr,
        /// Why it is not routable.
        what: &'static str,
    },
}

/// Why a range of addresses cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{0}` is not an address range; write it like 192.0.2.0/24 or 2001:db8::/32")]
pub struct RangeError(String);

/// Parses an address. Parts of an IPv4 address may have leading zeros, as in objects of old versions of Kubernetes;
/// they are decimal.
pub fn parse(text: &str) -> Result<IpAddr, AddressError> {
    text.parse().ok().or_else(|| decimal(text)).ok_or_else(|| AddressError::Unreadable(text.to_owned()))
}

fn decimal(text: &str) -> Option<IpAddr> {
    let mut parts = text.split('.').map(|part| {
        let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let significant = part.trim_start_matches('0');
        digits.then(|| if significant.is_empty() { Ok(0) } else { significant.parse::<u8>() })?.ok()
    });
    let octets = [parts.next()??, parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then(|| Ipv4Addr::from(octets).into())
}

/// Parses an address that traffic is sent to. Addresses with another meaning on every machine are refused: an account
/// that may write an `EndpointSlice` could reach services of the node itself with them (CVE-2021-25737).
pub fn routable(text: &str) -> Result<IpAddr, AddressError> {
    let address = parse(text)?;
    let what = match address {
        _ if address.is_unspecified() => Some("the unspecified address"),
        _ if address.is_loopback() => Some("a loopback address"),
        _ if address.is_multicast() => Some("a multicast address"),
        IpAddr::V4(v4) if v4.is_link_local() => Some("a link-local address"),
        IpAddr::V4(v4) if v4.is_broadcast() => Some("the broadcast address"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("a link-local address"),
        // The checks above do not detect the IPv4 address inside, and no packet has such an address.
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => Some("an IPv4-mapped address"),
        _ => None,
    };
    what.map_or(Ok(address), |what| Err(AddressError::Special { address, what }))
}

/// Parses a range of addresses. White space around it and bits after the prefix are ignored.
pub fn range(text: &str) -> Result<IpNet, RangeError> {
    let error = || RangeError(text.to_owned());
    let (address, prefix) = text.trim().split_once('/').ok_or_else(error)?;
    let address = parse(address).map_err(|_| error())?;
    let prefix = prefix.parse().map_err(|_| error())?;
    IpNet::new(address, prefix).map(|net| net.trunc()).map_err(|_| error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("10.0.0.1", "10.0.0.1")]
    #[case("172.30.0.041", "172.30.0.41")]
    #[case("010.000.00.0008", "10.0.0.8")]
    #[case("2001:DB8::0:1", "2001:db8::1")]
    fn addresses_are_read_as_decimal(#[case] text: &str, #[case] expected: IpAddr) {
        assert_eq!(parse(text), Ok(expected));
        assert_eq!(routable(text), Ok(expected));
    }

    #[rstest]
    #[case("")]
    #[case("None")]
    #[case("10.0.0")]
    #[case("10.0.0.1.2")]
    #[case("10.0.0.256")]
    #[case("10.0.0.99999999999999999999")]
    #[case("10.0.0.-1")]
    #[case("10.0.0.+1")]
    #[case("10..0.1")]
    #[case(" 10.0.0.1")]
    #[case("10.0.0.1/32")]
    #[case("0x0a.0.0.1")]
    #[case("fe80::1%eth0")]
    #[case("example.org")]
    fn invalid_address_is_reported_with_its_text(#[case] text: &str) {
        assert_eq!(parse(text), Err(AddressError::Unreadable(text.to_owned())));
    }

    #[rstest]
    #[case("0.0.0.0", "the unspecified address")]
    #[case("::", "the unspecified address")]
    #[case("127.0.0.1", "a loopback address")]
    #[case("127.000.0.01", "a loopback address")]
    #[case("::1", "a loopback address")]
    #[case("224.0.0.1", "a multicast address")]
    #[case("ff02::1", "a multicast address")]
    #[case("169.254.169.254", "a link-local address")]
    #[case("fe80::1", "a link-local address")]
    #[case("febf::1", "a link-local address")]
    #[case("255.255.255.255", "the broadcast address")]
    #[case("::ffff:127.0.0.1", "an IPv4-mapped address")]
    #[case("::ffff:10.0.0.1", "an IPv4-mapped address")]
    fn loopback_and_link_local_addresses_are_refused(#[case] text: &str, #[case] expected: &str) {
        match routable(text) {
            Err(AddressError::Special { what, .. }) => assert_eq!(what, expected),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[rstest]
    #[case("10.0.0.0/8", "10.0.0.0/8")]
    #[case(" 010.001.002.003/16\n", "10.1.0.0/16")]
    #[case("0.0.0.0/0", "0.0.0.0/0")]
    #[case("2001:db8::1/32", "2001:db8::/32")]
    fn ranges_are_normalised(#[case] text: &str, #[case] expected: IpNet) {
        assert_eq!(range(text), Ok(expected));
    }

    #[rstest]
    #[case("10.0.0.0")]
    #[case("10.0.0.0/33")]
    #[case("2001:db8::/129")]
    #[case("10.0.0.0/-1")]
    #[case("/8")]
    #[case("")]
    fn invalid_range_is_reported_with_its_text(#[case] text: &str) {
        assert_eq!(range(text), Err(RangeError(text.to_owned())));
    }
}
