//! Checks settings, ports and devices of the network.

use proxy_common::config::PortRange;

use super::{CheckLine, some};
use crate::cli::check::facts::{Device, Network};
use proxy_core::model::DeviceKind;
use proxy_core::model::ports::{better_local_ports, overlap, shared, snat_ports, text};

/// Enough ports for SNAT.
const FOR_SNAT: [PortRange; 1] = [PortRange::new(57_344, 65_535)];
/// Minimum header size of a tunnel, in bytes: an IPv4 header.
const LEAST_HEADER: u32 = 20;

pub(super) fn judge(network: &Network) -> Vec<CheckLine> {
    vec![forwarding(network), ports(network), mtu(network), uplink(network)]
}

fn forwarding(network: &Network) -> CheckLine {
    const CHECK: &str = "ip-forward";
    let name = |v6| if v6 { "net.ipv6.conf.all.forwarding" } else { "net.ipv4.ip_forward" };
    let off4 = network.has_ipv4 && network.forwards4 == Some(false);
    let off6 = network.has_ipv6 && network.forwards6 == Some(false);
    let off: Vec<_> =
        [(off4, false), (off6, true)].into_iter().filter(|(off, _)| *off).map(|(_, v6)| name(v6)).collect();
    if off.is_empty() {
        return CheckLine::pass(CHECK, "IP forwarding is on");
    }
    let (seen, set): (Vec<_>, Vec<_>) =
        off.iter().map(|name| (format!("{name} is 0"), format!("{name}=1"))).unzip();
    let seen =
        format!("{}: the node does not forward packets of pods and of clients outside", seen.join(" and "));
    let advice = format!("`sysctl -w {}`, and set it in /etc/sysctl.d", set.join(" "));
    // Most clusters are not dual-stack: a node with an IPv6 address may have only IPv4 pods, so this is only a warning.
    if off4 { CheckLine::fail(CHECK, seen, advice) } else { CheckLine::warn(CHECK, seen, advice) }
}

fn ports(network: &Network) -> CheckLine {
    const CHECK: &str = "port-ranges";
    let (local, nodes) = (&network.local_ports, network.node_ports);
    let both: Vec<_> = local.iter().map(|range| overlap(*range, nodes)).collect();
    let better = better_local_ports(nodes).map_or_else(String::new, |range| {
        format!("`sysctl -w net.ipv4.ip_local_port_range=\"{} {}\"`, or ", range.first, range.last())
    });
    if shared(local, &[nodes]) != 0 {
        return CheckLine::warn(
            CHECK,
            format!(
                "the node port range {} and net.ipv4.ip_local_port_range, {}, overlap in {}: a socket can get the port of a Service",
                text(&[nodes]),
                text(local),
                text(&both)
            ),
            format!("{better}add {} to net.ipv4.ip_local_reserved_ports", text(&both)),
        );
    }
    let left = snat_ports(local, nodes);
    if shared(&left, local) != 0 {
        return CheckLine::warn(
            CHECK,
            format!(
                "net.ipv4.ip_local_port_range is {}, which leaves too few ports for SNAT: SNAT uses {}, which sockets use, too, so \
                 connections of the node itself from these ports to endpoints take entries of the flow table",
                text(local),
                text(&left)
            ),
            format!(
                "{better}add ports for SNAT to net.ipv4.ip_local_reserved_ports, for example {}",
                text(&FOR_SNAT)
            ),
        );
    }
    CheckLine::pass(
        CHECK,
        format!("no overlap: node ports {}, sockets {}, SNAT {}", text(&[nodes]), text(local), text(&left)),
    )
}

fn mtu(network: &Network) -> CheckLine {
    const CHECK: &str = "mtu";
    let uplinks = network.devices.iter().filter(|device| device.is_uplink);
    let Some(uplink) = uplinks.min_by_key(|device| device.mtu) else {
        return CheckLine::pass(CHECK, "not compared: no device has a default route");
    };
    let too_large = |device: &&Device| match device.kind {
        _ if device.is_uplink => false,
        DeviceKind::Veth | DeviceKind::Bridge => device.mtu > uplink.mtu,
        DeviceKind::Tunnel => device.mtu.saturating_add(LEAST_HEADER) > uplink.mtu,
        _ => false,
    };
    let large: Vec<_> = network
        .devices
        .iter()
        .filter(too_large)
        .map(|device| format!("{} {}", device.name, device.mtu))
        .collect();
    if large.is_empty() {
        return CheckLine::pass(
            CHECK,
            format!("{} has {}, and no pod device has more", uplink.name, uplink.mtu),
        );
    }
    CheckLine::warn(
        CHECK,
        format!(
            "{} has MTU {}, less than full-sized packets of {} need: large packets are lost if ICMP is filtered",
            uplink.name,
            uplink.mtu,
            some(large)
        ),
        "set the MTU of the CNI plugin to the MTU of the uplink minus the tunnel header",
    )
}

fn uplink(network: &Network) -> CheckLine {
    const CHECK: &str = "uplink";
    let uplinks: Vec<_> =
        network.devices.iter().filter(|device| device.is_uplink).map(|device| device.name.as_str()).collect();
    if uplinks.is_empty() {
        return CheckLine::warn(
            CHECK,
            "no default route: Ballast recognizes uplinks only by the kinds and addresses of devices",
            "if `ballast status -o wide` does not show all uplinks, name them with --uplinks",
        );
    }
    CheckLine::pass(CHECK, format!("the default route uses {}", some(uplinks)))
}
