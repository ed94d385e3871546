//! The range of ports that the kernel assigns to sockets.

use std::fs;

use proxy_common::config::PortRange;

/// The setting of the network namespace; it also applies to IPv6 sockets.
const PATH: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// Returns the range of this network namespace; `None` if it cannot be read.
pub fn local() -> Option<PortRange> {
    parse(&fs::read_to_string(PATH).ok()?)
}

fn parse(text: &str) -> Option<PortRange> {
    let mut words = text.split_whitespace().map(str::parse);
    let (Some(Ok(first)), Some(Ok(last)), None) = (words.next(), words.next(), words.next()) else {
        return None;
    };
    Some(PortRange::new(first, last))
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
        assert!(local().is_some_and(|ports| ports.count != 0), "this machine's");
    }
}
