//! Port ranges of the node: local ports of sockets, node ports, and source ports for SNAT.

use proxy_common::config::{PortRange, SNAT_RANGES};

/// The lowest port for SNAT; the ports below are for servers of the system.
pub const FIRST_PORT: u16 = 1_024;
/// The ports that the API server gives to Services as node ports, unless its `--service-node-port-range` sets others.
pub const NODE_PORTS: PortRange = PortRange::new(30_000, 32_767);
/// The ports that the kernel gives to sockets, unless `net.ipv4.ip_local_port_range` sets others.
pub const LOCAL_PORTS: PortRange = PortRange::new(32_768, 60_999);
/// Fewer source ports for SNAT than this are too few: an endpoint sees the same port again after a minute at the earliest.
const ENOUGH_PORTS: u32 = 8_192;
/// Source ports for SNAT if every port has another use.
const LAST_RESORT: [PortRange; SNAT_RANGES] = [PortRange::new(61_000, 65_535), PortRange::new(0, 0)];
/// A range for sockets is worth an advice if it has so many ports.
const LEAST_LOCAL_PORTS: u16 = 1_024;

/// Returns the source ports for SNAT: the two largest ranges, in order, of ports that have no other use on the node, neither for
/// sockets (`local`) nor for Services (`node_ports`). If these are too few, as with `ip_local_port_range` 1024-65535, sockets share
/// the ports that [`LOCAL_PORTS`] would leave: a connection of the node itself from such a port to an endpoint then has a flow, which
/// keeps both apart.
pub fn snat_ports(local: &[PortRange], node_ports: PortRange) -> [PortRange; SNAT_RANGES] {
    let free = largest(local.iter().copied().chain([node_ports]));
    if size(&free) >= ENOUGH_PORTS {
        return free;
    }
    let shared = largest([LOCAL_PORTS, node_ports]);
    if size(&shared) == 0 { LAST_RESORT } else { shared }
}

/// Returns the two largest ranges of ports from [`FIRST_PORT`] up that are in no range of `taken`, in order.
fn largest(taken: impl IntoIterator<Item = PortRange>) -> [PortRange; SNAT_RANGES] {
    let mut parts = without(PortRange::new(FIRST_PORT, u16::MAX), taken);
    parts.sort_by_key(|range| std::cmp::Reverse(range.count));
    parts.truncate(SNAT_RANGES);
    parts.sort_by_key(|range| range.first);
    std::array::from_fn(|number| parts.get(number).copied().unwrap_or_default())
}

fn size(ranges: &[PortRange]) -> u32 {
    ranges.iter().map(|range| u32::from(range.count)).sum()
}

/// Returns the range for `net.ipv4.ip_local_port_range` that the advice of a problem names: the kernel's own, without the node
/// ports; `None` if they take nearly all of it.
pub fn better_local_ports(node_ports: PortRange) -> Option<PortRange> {
    let largest = without(LOCAL_PORTS, [node_ports]).into_iter().max_by_key(|range| range.count);
    largest.filter(|range| range.count >= LEAST_LOCAL_PORTS)
}

/// Returns the ranges as text, like `30000-32767,40000-40000`.
pub fn text(ranges: &[PortRange]) -> String {
    let one = |range: &PortRange| format!("{}-{}", range.first, range.last());
    ranges.iter().filter(|range| range.count != 0).map(one).collect::<Vec<_>>().join(",")
}

/// Returns the number of ports that two ranges share with each other.
pub fn shared(ranges: &[PortRange], others: &[PortRange]) -> u32 {
    let of = |one: &PortRange| others.iter().map(|other| u32::from(overlap(*one, *other).count)).sum::<u32>();
    ranges.iter().map(of).sum()
}

/// Returns the intersection of two ranges; an empty range if there is none.
pub fn overlap(one: PortRange, other: PortRange) -> PortRange {
    if one.count == 0 || other.count == 0 {
        return PortRange::default();
    }
    PortRange::new(one.first.max(other.first), one.last().min(other.last()))
}

/// Returns the parts of a range that are in no range of `taken`.
pub fn without(range: PortRange, taken: impl IntoIterator<Item = PortRange>) -> Vec<PortRange> {
    let mut parts = vec![range];
    for taken in taken {
        parts = parts.into_iter().flat_map(|part| around(part, taken)).collect();
    }
    parts.retain(|part| part.count != 0);
    parts
}

/// Returns the parts of a range below and above `taken`.
fn around(range: PortRange, taken: PortRange) -> [PortRange; 2] {
    let shared = overlap(range, taken);
    if shared.count == 0 {
        return [range, PortRange::default()];
    }
    let below = PortRange::new(range.first, shared.first - 1);
    let above = shared
        .last()
        .checked_add(1)
        .map_or_else(PortRange::default, |next| PortRange::new(next, range.last()));
    [below, above]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn range((first, last): (u16, u16)) -> PortRange {
        PortRange::new(first, last)
    }

    #[rstest]
    #[case::of_the_kernel((32_768, 60_999), [(1_024, 29_999), (61_000, 65_535)])]
    #[case::wide((10_240, 65_535), [(1_024, 10_239), (0, 0)])]
    #[case::narrow((40_000, 50_000), [(1_024, 29_999), (50_001, 65_535)])]
    #[case::low((1_024, 20_000), [(20_001, 29_999), (32_768, 65_535)])]
    #[case::no_room((1_024, 65_535), [(1_024, 29_999), (61_000, 65_535)])]
    #[case::little_room((1_024, 65_000), [(1_024, 29_999), (61_000, 65_535)])]
    #[case::enough((10_000, 65_000), [(1_024, 9_999), (65_001, 65_535)])]
    fn ports_that_are_free(#[case] local: (u16, u16), #[case] expected: [(u16, u16); 2]) {
        assert_eq!(snat_ports(&[range(local)], NODE_PORTS), expected.map(range));
    }

    #[test]
    fn better_local_ports_are_no_node_ports() {
        let better = |first, last| better_local_ports(PortRange::new(first, last));
        assert_eq!(better(30_000, 32_767), Some(LOCAL_PORTS));
        assert_eq!(better(30_000, 39_999), Some(PortRange::new(40_000, 60_999)));
        assert_eq!(better(20_000, 60_000), None);
    }

    #[test]
    fn the_default_is_that_of_the_maps() {
        assert_eq!(snat_ports(&[LOCAL_PORTS], NODE_PORTS), proxy_common::config::SNAT_PORTS);
    }

    proptest! {
        #[test]
        fn snat_ports_are_in_order_and_free_if_enough(local: (u16, u16), nodes: (u16, u16)) {
            let (local, nodes) = (range(local), range(nodes));
            let [low, high] = snat_ports(&[local], nodes);
            prop_assert!(low.count != 0 && low.first >= FIRST_PORT);
            prop_assert!(high.count == 0 || high.first > low.last());
            let free = largest([local, nodes]);
            prop_assert!(size(&free) < ENOUGH_PORTS || [low, high] == free);
            prop_assert!(shared(&[low, high], &[nodes]) == 0 || [low, high] == LAST_RESORT);
        }
    }
}
