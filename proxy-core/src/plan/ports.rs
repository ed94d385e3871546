//! Checks for other uses of the source ports for SNAT on the node.

use crate::model::plural::plural;
use proxy_common::config::PortRange;

use crate::model::Problem;
use crate::model::ports::{LOCAL_PORTS, better_local_ports, shared, snat_ports, text};
use crate::model::settings::NodeSettings;

/// Returns a problem for each other use of source ports for SNAT: a reply to such a connection may be taken for a reply to a flow
/// with SNAT, and vice versa, if the connection has no flow of its own. `local`: the ports that the kernel gives to sockets; the agent
/// itself shares them only if too few others are free.
pub(super) fn problems(node: &str, local: &[PortRange], settings: &NodeSettings) -> Vec<Problem> {
    let ours = settings.snat_ports;
    let all = text(&ours);
    let problem =
        |message| Problem { object: format!("Node {node}"), field: "--snat-ports".to_owned(), message };
    let others = [
        (local, "the local ports of sockets, net.ipv4.ip_local_port_range", true),
        (&[settings.node_ports][..], "the node ports, --service-node-port-range", false),
    ];
    let free = snat_ports(local, settings.node_ports);
    let has_room = shared(&free, local) == 0;
    let better = text(&free);
    let smaller = better_local_ports(settings.node_ports).unwrap_or(LOCAL_PORTS);
    let smaller = format!(
        "run `sysctl -w net.ipv4.ip_local_port_range=\"{} {}\"` and restart the agent",
        smaller.first,
        smaller.last()
    );
    let mut found = Vec::new();
    for (taken, whose, is_local) in others {
        let shared = shared(&ours, taken);
        if shared == 0 || is_local && ours == free {
            continue;
        }
        let way_out = match (has_room, is_local) {
            (true, true) => format!("set --snat-ports {better}, or {smaller}"),
            (true, false) => format!("set --snat-ports {better}"),
            (false, _) => format!("no other range is free: {smaller}"),
        };
        found.push(problem(format!(
            "{all} overlaps with {whose}, {}, in {}: replies can be delivered to the wrong socket; {way_out}",
            text(taken),
            plural(shared, "port")
        )));
    }
    found
}

#[cfg(test)]
mod tests {
    use proxy_common::config::SNAT_RANGES;
    use rstest::rstest;

    use super::*;

    fn messages(local: (u16, u16), ours: [PortRange; SNAT_RANGES]) -> Vec<String> {
        let settings = NodeSettings { snat_ports: ours, ..NodeSettings::default() };
        problems("n1", &[PortRange::new(local.0, local.1)], &settings)
            .into_iter()
            .map(|problem| problem.message)
            .collect()
    }

    #[rstest]
    #[case::the_kernels_own((32_768, 60_999))]
    #[case::wide((10_240, 65_535))]
    #[case::in_the_middle((20_000, 40_000))]
    #[case::of_all_ports((1_024, 65_535))]
    #[case::of_nearly_all_ports((1_024, 65_000))]
    fn the_default_is_no_problem(#[case] local: (u16, u16)) {
        let ours = snat_ports(&[PortRange::new(local.0, local.1)], NodeSettings::default().node_ports);
        assert_eq!(messages(local, ours), [""; 0]);
    }

    #[test]
    fn both_values_and_the_way_out_are_named() {
        let one = |first, last| [PortRange::new(first, last), PortRange::default()];
        let found = messages((32_768, 60_999), one(60_000, 65_535));
        let [message] = &found[..] else { panic!("{found:?}") };
        for part in
            ["60000-65535", "32768-60999", "1000 ports", "--snat-ports 1024-29999,61000-65535", "sysctl -w"]
        {
            assert!(message.contains(part), "{part}: {message}");
        }
        let found = messages((32_768, 60_999), one(29_000, 30_099));
        let [message] = &found[..] else { panic!("{found:?}") };
        assert!(message.contains("30000-32767") && message.contains("100 ports"), "{message}");
        assert_eq!(messages((32_768, 60_999), one(61_000, 61_009)), [""; 0], "few on purpose");
    }

    #[test]
    fn given_range_shared_with_sockets_is_a_problem() {
        let found = messages((1_024, 65_535), [PortRange::new(40_000, 49_999), PortRange::default()]);
        assert!(
            found.len() == 1 && found[0].contains("no other range") && found[0].contains("1024-65535"),
            "{found:?}"
        );
    }
}
