//! The ports that the kernel assigns to sockets.

use std::fs;

use proxy_common::config::PortRange;
use proxy_core::model::ports::without;

/// The settings of the network namespace; they also apply to IPv6 sockets.
const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// Returns the ports of this network namespace, without the reserved ones; `None` if they cannot be read.
pub fn local() -> Option<Vec<PortRange>> {
    given(&fs::read_to_string(RANGE).ok()?, &fs::read_to_string(RESERVED).ok()?)
}

/// Returns the ports of the kernel's text of the range, without those of its text of the reserved ports.
fn given(range: &str, reserved: &str) -> Option<Vec<PortRange>> {
    Some(without(parse(range)?, ranges(reserved)))
}

fn parse(text: &str) -> Option<PortRange> {
    let mut words = text.split_whitespace().map(str::parse);
    let (Some(Ok(first)), Some(Ok(last)), None) = (words.next(), words.next(), words.next()) else {
        return None;
    };
    Some(PortRange::new(first, last))
}

/// Parses reserved ports as the kernel writes them, like `30000-32767,40000`.
fn ranges(text: &str) -> Vec<PortRange> {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(PortRange::new(first.parse().ok()?, last.parse().ok()?))
    };
    text.trim().split(',').filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_text_is_two_numbers() {
        assert_eq!(parse("32768\t60999\n"), Some(PortRange::new(32_768, 60_999)));
        for text in ["", "32768", "1 2 3", "a b", "1 70000"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert!(local().is_some_and(|ports| !ports.is_empty()), "this machine's");
    }

    #[test]
    fn reserved_ports_are_not_given() {
        let expected = [PortRange::new(15_000, 29_999), PortRange::new(32_768, 60_999)];
        assert_eq!(given("15000\t60999\n", "1,30000-32767\n"), Some(expected.into()));
    }

    #[test]
    fn reserved_ports_are_numbers_and_ranges() {
        assert_eq!(
            ranges("30000-32767,40000\n"),
            [PortRange::new(30_000, 32_767), PortRange::new(40_000, 40_000)]
        );
        assert_eq!(ranges("\n"), []);
    }
}
