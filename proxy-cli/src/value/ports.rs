//! Ranges of ports.

use std::fmt;
use std::str::FromStr;

use proxy_common::config::{PortRange, SNAT_RANGES};

use super::error::ValueError;
use proxy_core::model::ports::NODE_PORTS;

/// Ports, as in `--snat-ports`: one range, or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatPorts(pub [PortRange; SNAT_RANGES]);

impl FromStr for SnatPorts {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port >= 1024);
        let range = |text: &str| {
            let (first, last) = text.split_once('-')?;
            let (first, last) = (port(first)?, port(last)?);
            (first <= last).then(|| PortRange::new(first, last))
        };
        let mut ranges = [PortRange::default(); SNAT_RANGES];
        let parts: Vec<_> = text.split(',').collect();
        if parts.len() > SNAT_RANGES {
            return Err(ValueError::PortRange);
        }
        for (slot, part) in ranges.iter_mut().zip(parts) {
            *slot = range(part).ok_or(ValueError::PortRange)?;
        }
        let [low, high] = ranges;
        // The ranges are in ascending order, so that the port after the last one of the first range is the first one of
        // the second.
        if high.count != 0 && low.last() >= high.first {
            Err(ValueError::PortRange)
        } else {
            Ok(Self(ranges))
        }
    }
}

/// The API server's `--service-node-port-range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePortRange(pub PortRange);

impl Default for NodePortRange {
    fn default() -> Self {
        Self(NODE_PORTS)
    }
}

impl FromStr for NodePortRange {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let port = |text: &str| text.trim().parse::<u16>().ok();
        let (first, last) = text.split_once('-').ok_or(ValueError::NodePortRange)?;
        let range = port(first).zip(port(last)).map(|(first, last)| PortRange::new(first, last));
        range.filter(|range| range.count != 0).map(Self).ok_or(ValueError::NodePortRange)
    }
}

impl fmt::Display for NodePortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0.first, self.0.last())
    }
}

impl fmt::Display for SnatPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.0.iter().filter(|range| range.count != 0);
        let texts: Vec<_> = ranges.map(|range| format!("{}-{}", range.first, range.last())).collect();
        f.write_str(&texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("30000-32767", Some((30_000, 32_767)))]
    #[case("80-80", Some((80, 80)))]
    #[case("0-80", None)]
    #[case("32767-30000", None)]
    #[case("30000", None)]
    fn node_port_ranges(#[case] text: &str, #[case] expected: Option<(u16, u16)>) {
        let found = text.parse().ok().map(|NodePortRange(range)| (range.first, range.last()));
        assert_eq!(found, expected);
    }
}
