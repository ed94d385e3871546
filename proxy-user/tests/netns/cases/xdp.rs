//! `--xdp`: packets to other nodes are forwarded before tc sees them, and no connection is affected when the mode changes.

use anyhow::{Context as _, Result, ensure};
use aya::Ebpf;
use aya::programs::{Xdp, XdpMode};
use proxy_user::programs::EMBEDDED;

use super::three_nodes::objects::objects;
use super::three_nodes::rule::{Location, node_port};
use super::{NodesCase, is_clean};
use crate::fixture::{SOON, eventually};
use crate::nodes::{Node, Nodes, link_ip, node_ip};
use crate::peer::{Attempt, Load, SocketKind};
use crate::raw::{self, Tap};
use proxy_testbed::Family;
use proxy_testbed::manifest::yaml;
use proxy_testbed::space::Space;

pub const CASES: &[NodesCase] = &[
    NodesCase { name: "xdp::native_forwards_to_other_nodes", run: || forwards("native") },
    NodesCase { name: "xdp::generic_forwards_to_other_nodes", run: || forwards("generic") },
    NodesCase { name: "xdp::switching_under_traffic_loses_nothing", run: switches },
    NodesCase { name: "xdp::auto_leaves_virtual_devices_alone", run: auto },
];

/// Number of exchanges of each kind.
const EXCHANGES: usize = 40;

fn ethtool(space: &Space, device: &str, feature: &str, state: &str) -> Result<()> {
    let output = space.command("ethtool").args(["-K", device, feature, state]).output()?;
    ensure!(output.status.success(), "ethtool {device}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Builds three nodes whose links behave like wires: checksums are complete, and packets that XDP sends arrive.
pub(super) fn wired() -> Result<(Nodes, Ebpf)> {
    let nodes = Nodes::without_vlan()?;
    // A veth sends packets of `XDP_TX` only if a program is at its other end (`veth_xdp_flush`).
    let mut ebpf = aya::EbpfLoader::new().btf(None).load(EMBEDDED)?;
    let idle: &mut Xdp = ebpf.program_mut("xdp_nop").context("no xdp_nop")?.try_into()?;
    idle.load()?;
    for name in ["n1", "n2", "n3"] {
        let (_, ifindex) = raw::device(&nodes.fabric, name)?;
        nodes.fabric.inside(|| Ok(idle.attach_to_if_index(ifindex.cast_unsigned(), XdpMode::Driver)?))?;
    }
    let (_, second) = raw::device(&nodes.clients[1], "eth0")?;
    nodes.clients[1].inside(|| Ok(idle.attach_to_if_index(second.cast_unsigned(), XdpMode::Driver)?))?;
    ethtool(&nodes.clients[1], "eth0", "tx", "off")?;
    ethtool(&nodes.all[0].space, "eth1", "tx", "off")?;
    for (node, pods) in nodes.all.iter().zip([2, 3, 1]) {
        ethtool(&node.space, "eth0", "tx", "off")?;
        (0..pods).try_for_each(|pod| ethtool(node.pod_space(pod), "eth0", "tx", "off"))?;
    }
    ethtool(&nodes.clients[0], "eth0", "tx", "off")?;
    nodes.folder.put_text("all", &yaml(objects()))?;
    Ok((nodes, ebpf))
}

fn with_logs(nodes: &Nodes, result: Result<()>) -> Result<()> {
    result.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

fn far(family: Family, kind: SocketKind) -> (std::net::IpAddr, u16) {
    (node_ip(family, 1), node_port(0, Location::Far, kind))
}

fn forwards(mode: &str) -> Result<()> {
    let (mut nodes, _ends) = wired()?;
    // With a source of their own for these devices, XDP would leave the first packet of each flow to tc.
    for (family, length, flag) in [(Family::V4, 32, ""), (Family::V6, 128, "nodad")] {
        for device in ["eth1", "vx0"] {
            let address = node_ip(family, 1);
            nodes.all[0].space.ip(&format!("addr add {address}/{length} dev {device} {flag}\n"))?;
        }
    }
    let begun = nodes.begin(&["--xdp".to_owned(), mode.to_owned()]);
    with_logs(&nodes, begun.and_then(|()| look(&nodes, mode)))
}

fn look(nodes: &Nodes, mode: &str) -> Result<()> {
    let node = &nodes.all[0];
    node.says(&["XDP program attached", "\"eth0\"", mode])?;
    let status = node.ask(&["status"])?;
    let of_eth0 = |row: &&serde_json::Value| row["device"] == "eth0";
    let row =
        status["xdp"].as_array().and_then(|rows| rows.iter().find(of_eth0)).context("no XDP in status")?;
    ensure!(row["mode"] == mode, "{row}");
    let hooks = status["attachments"].as_array().into_iter().flatten();
    ensure!(
        hooks.into_iter().any(|hook| hook["program"] == "xdp_ingress" && hook["place"] == "eth0"),
        "{status}"
    );
    let tap = Tap::new(&node.space, "eth0")?;
    by_the_second_uplink(nodes)?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            let to = far(family, kind);
            eventually(SOON, || nodes.outside.reach(Attempt::new(kind, to.into())))?;
            tap.count(to.1);
            for round in 0..EXCHANGES {
                let seen = nodes.outside.reach(Attempt::new(kind, to.into()))?;
                let answers = if kind.is_tcp() { seen.peer } else { seen.from };
                ensure!(answers == Some(to.into()), "{round}: answered by {answers:?}");
                ensure!(seen.client.ip() == node_ip(family, 1), "{round}: the endpoint sees {}", seen.client);
            }
            // A UDP exchange has one packet, a TCP connection has at least five. A few packets are left to tc, to probe
            // the next hop.
            let seen = tap.count(to.1);
            ensure!(seen < EXCHANGES / 2, "{family:?} {kind:?}: {seen} packets were left to tc");
        }
        // XDP leaves some packets to tc: segments that were merged on receive, and fragments.
        let large = [(SocketKind::Tcp, 200_000), (SocketKind::Datagram, 4_000)];
        for (kind, size) in large {
            let attempt = Attempt::new(kind, far(family, kind).into()).size(size);
            nodes.outside.reach(attempt).with_context(|| format!("{size} bytes"))?;
        }
        // Packets to an endpoint of this node are left to tc.
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            let to = (node_ip(family, 1), node_port(0, Location::Near, kind));
            nodes.outside.reach(Attempt::new(kind, to.into()))?;
        }
    }
    Ok(())
}

/// Tests a client behind another NIC: requests leave by `eth0` and answers by `eth1`, and neither by the device on
/// which they arrived.
fn by_the_second_uplink(nodes: &Nodes) -> Result<()> {
    let node = &nodes.all[0];
    node.says(&["XDP program attached", "\"eth1\""])?;
    let tap = Tap::new(&node.space, "eth1")?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            let to = (link_ip(family, 31, 1), node_port(0, Location::Far, kind));
            eventually(SOON, || nodes.second.reach(Attempt::new(kind, to.into())))?;
            tap.count(to.1);
            for round in 0..EXCHANGES {
                let seen = nodes.second.reach(Attempt::new(kind, to.into()))?;
                let answers = if kind.is_tcp() { seen.peer } else { seen.from };
                ensure!(answers == Some(to.into()), "{round}: answered by {answers:?}");
            }
            let seen = tap.count(to.1);
            ensure!(seen < EXCHANGES / 2, "{family:?} {kind:?}: {seen} packets were left to tc");
        }
    }
    Ok(())
}

fn auto() -> Result<()> {
    let (mut nodes, _ends) = wired()?;
    let begun = nodes.begin(&[]);
    let check = |nodes: &Nodes| {
        let node = &nodes.all[0];
        node.says(&["no XDP on this uplink", "\"eth0\"", "virtual"])?;
        let status = node.ask(&["status"])?;
        ensure!(!status["attachments"].to_string().contains("xdp_ingress"), "{status}");
        Ok(())
    };
    with_logs(&nodes, begun.and_then(|()| check(&nodes)))
}

/// Restarts the agent of the node in the path with each mode in turn, while connections and datagrams continue.
fn switches() -> Result<()> {
    let (mut nodes, _ends) = wired()?;
    let begun = nodes.begin(&["--xdp".to_owned(), "off".to_owned()]);
    let result = begun.and_then(|()| switch(&mut nodes));
    with_logs(&nodes, result)
}

fn switch(nodes: &mut Nodes) -> Result<()> {
    let mut loads = Vec::new();
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Datagram] {
            let attempt = Attempt::new(kind, far(family, kind).into());
            eventually(SOON, || nodes.outside.reach(attempt))?;
            loads.extend([true, false].map(|is_one_socket| Load::new(attempt, is_one_socket)));
        }
    }
    nodes.outside.load(&loads)?;
    for mode in ["native", "off", "generic", "native", "native", "off"] {
        nodes.all[0].restart(&["--xdp", mode])?;
        if mode == "off" {
            nodes.all[0].says(&["no XDP on this uplink", "\"eth0\"", "--xdp off"])?;
        } else {
            nodes.all[0].says(&["XDP program attached", "\"eth0\"", mode])?;
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    for (tally, load) in nodes.outside.stop()?.iter().zip(&loads) {
        let what =
            format!("{:?} to {}, one socket: {}", load.attempt.kind, load.attempt.to, load.is_one_socket);
        is_clean(tally, &what, &["3/2"])?;
    }
    Ok(())
}
