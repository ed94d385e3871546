//! Direct server return on three nodes: clients outside reach node 1, and the endpoints are on nodes 2 and 3.
//!
//! `objects.rs` has the objects that the agents read, `bulk.rs` has large transfers, `segments.rs` has datagrams in segments,
//! `by_xdp.rs` has XDP at both ends, and `ranges.rs` has sources of a range.

mod bulk;
mod by_xdp;
mod objects;
mod ranges;
mod segments;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use self::objects::{NODE_PORTS, PORTS, Wish, text, vip};
use super::NodesCase;
use super::path_mtu::{never_cut, path_mtu};
use crate::fixture::{SOON, eventually};
use crate::nodes::{BRIDGE, Node, Nodes, link_ip, node_ip, pod_ip};
use crate::peer::{Attempt, Load, Seen, SocketKind};
use crate::raw::{self, Wire};
use proxy_testbed::Family;

pub const CASES: &[NodesCase] = &[
    NodesCase { name: "dsr::endpoints_answer_clients_directly", run: || with(Wish::default(), direct) },
    NodesCase {
        name: "dsr::hybrid_uses_dsr_for_tcp_and_snat_for_udp",
        run: || with(Wish { mode: "hybrid", ..Wish::default() }, hybrid),
    },
    NodesCase {
        name: "dsr::both_families_work_on_nodes_with_v4_addresses_only",
        run: || with(Wish { nodes: &[Family::V4], ..Wish::default() }, |nodes| answers(nodes, &[Family::V4])),
    },
    NodesCase {
        name: "dsr::both_families_work_on_nodes_with_v6_addresses_only",
        run: || with(Wish { nodes: &[Family::V6], ..Wish::default() }, |nodes| answers(nodes, &[Family::V6])),
    },
    NodesCase {
        name: "dsr::without_node_objects_packets_get_snat",
        run: || with(Wish { nodes: &[], ..Wish::default() }, fallback),
    },
    NodesCase {
        name: "dsr::large_transfers_arrive_complete",
        run: || with(Wish::default(), bulk::with_and_without_offloads),
    },
    NodesCase {
        name: "dsr::segmented_datagrams_are_forwarded_to_a_third_node",
        run: || with(Wish::default(), segments::on_to_a_third_node),
    },
    NodesCase { name: "dsr::xdp_encapsulates_and_takes_out", run: || by_xdp::both_ends(&Family::BOTH) },
    NodesCase { name: "dsr::xdp_encapsulates_v6_in_v4", run: || by_xdp::both_ends(&[Family::V4]) },
    NodesCase { name: "dsr::xdp_encapsulates_v4_in_v6", run: || by_xdp::both_ends(&[Family::V6]) },
    NodesCase { name: "dsr::nodes_accept_sources_of_their_own_range", run: ranges::sources },
    NodesCase { name: "dsr::client_learns_the_mtu_between_nodes", run: || with(Wish::default(), learns_mtu) },
    NodesCase { name: "dsr::pods_cannot_forge_encapsulated_packets", run: || with(Wish::default(), forged) },
    NodesCase { name: "dsr::connections_survive_a_change_of_the_mode", run: || with(Wish::default(), live) },
    NodesCase {
        name: "dsr::connections_survive_lost_flows_of_the_first_node",
        run: || with(Wish::default(), forgets),
    },
    NodesCase {
        name: "dsr::connections_survive_a_move_of_the_address",
        run: || with(Wish::default(), moves),
    },
    NodesCase {
        name: "dsr::connections_survive_a_move_while_endpoints_change_and_a_node_dies",
        run: || with(Wish::default(), second_chance),
    },
    NodesCase {
        name: "dsr::connections_survive_moves_changes_and_lost_flows_in_turn",
        run: || with(Wish::default(), churn),
    },
];

/// Number of long connections of each family in the cases that lose the first node.
const HELD: usize = 1_000;

/// Builds three nodes, lets them read the objects of a wish, and runs the test.
fn with(wish: Wish, test: fn(&mut Nodes) -> Result<()>) -> Result<()> {
    let mut nodes = Nodes::without_vlan()?;
    nodes.folder.put_text("all", &text(&wish))?;
    lead(&nodes, 1)?;
    let begun =
        nodes.begin(&["--tenant-annotations".to_owned(), "all".to_owned()]).and_then(|()| test(&mut nodes));
    begun.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

/// Routes clients outside to the Service's own address through this node.
fn lead(nodes: &Nodes, node: u8) -> Result<()> {
    Family::BOTH.into_iter().try_for_each(|family| {
        nodes.clients[0].ip(&format!("route replace {} via {}\n", vip(family), node_ip(family, node)))
    })
}

/// Returns what clients connect to, by family and kind: the Service's own address, and the node port.
fn orig_dst(family: Family, kind: SocketKind) -> [SocketAddr; 2] {
    let at = usize::from(!kind.is_tcp());
    [(vip(family), PORTS[at]).into(), (node_ip(family, 1), NODE_PORTS[at]).into()]
}

/// Returns how many replies went through node 1 in total.
fn replies(nodes: &Nodes) -> Result<u64> {
    sum(nodes, "replyPackets")
}

/// Returns the sum of node 1's counters with this name, over all ports of the Service.
fn sum(nodes: &Nodes, name: &str) -> Result<u64> {
    let shown = nodes.all[0].ask(&["service", "show", "default/dsr"])?;
    let (text, name) = (shown.to_string(), format!("\"{name}\":"));
    let sum = text
        .split(&name)
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok());
    Ok(sum.sum())
}

/// Makes one exchange, which has to succeed.
fn exchange(nodes: &Nodes, kind: SocketKind, to: SocketAddr) -> Result<Seen> {
    eventually(SOON, || nodes.outside.reach(Attempt::new(kind, to)))
}

/// Waits until an exchange of this kind is answered directly.
fn is_direct(nodes: &Nodes, kind: SocketKind, to: SocketAddr) -> Result<Seen> {
    let own = link_ip(Family::of(to.ip()), 30, 100);
    eventually(SOON, || {
        let seen = nodes.outside.reach(Attempt::new(kind, to))?;
        ensure!(seen.client.ip() == own, "{to}: the endpoint sees {}", seen.client);
        Ok(seen)
    })
}

/// The nodes' router forwards packets of up to 1,400 bytes from node 1 to the other nodes.
fn learns_mtu(nodes: &mut Nodes) -> Result<()> {
    const MTU: i32 = 1400;
    for family in Family::BOTH {
        let gateway = link_ip(family, 30, 254);
        for to in [2, 3].map(|node| node_ip(family, node)) {
            let length = if family == Family::V4 { 32 } else { 128 };
            nodes.all[0].space.ip(&format!("route add {to}/{length} via {gateway}\n"))?;
            nodes.fabric.ip(&format!("route add {to}/{length} dev br0 mtu lock {MTU}\n"))?;
        }
        let header = if family == Family::V4 { 20 } else { 40 };
        let [to, _] = orig_dst(family, SocketKind::Udp);
        is_direct(nodes, SocketKind::Udp, to)?;
        nodes.clients[0].inside(|| {
            let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
            socket.connect(to)?;
            never_cut(&socket, family)?;
            eventually(SOON, || {
                // An error that the kernel has noted fails the call.
                let _ = socket.send(&[b'x'; 1400]);
                let known = path_mtu(&socket, family)?;
                ensure!(known == MTU - header, "{to}: believes in {known}");
                Ok(())
            })
        })?;
    }
    Ok(())
}

fn direct(nodes: &mut Nodes) -> Result<()> {
    answers(nodes, &Family::BOTH)
}

/// Checks that clients are answered directly at the Service's own addresses, and at the node ports of these families:
/// other nodes do not know the node ports of an address that no Node has.
fn answers(nodes: &Nodes, node_ports: &[Family]) -> Result<()> {
    let orig_dst = |family, kind| {
        let [own, node_port] = orig_dst(family, kind);
        [Some(own), node_ports.contains(&family).then_some(node_port)].into_iter().flatten()
    };
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp, SocketKind::Datagram] {
            for to in orig_dst(family, kind) {
                is_direct(nodes, kind, to)?;
            }
        }
    }
    let before = replies(nodes)?;
    // Two flows from one client port to one endpoint would need SNAT for the second one.
    let mut ports = 20_000..;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp, SocketKind::Datagram] {
            for to in orig_dst(family, kind) {
                for port in ports.by_ref().take(8) {
                    let seen = nodes.outside.reach(Attempt::new(kind, to).at_port(port))?;
                    let own = (link_ip(family, 30, 100), seen.local.port()).into();
                    ensure!(seen.client == own, "{to}: the endpoint sees {}, not {own}", seen.client);
                    ensure!(
                        seen.from.is_none_or(|from| from == to),
                        "{to}: the answer is from {:?}",
                        seen.from
                    );
                    ensure!(
                        ["2/2", "3/2"].contains(&seen.server.as_str()),
                        "{to}: served by {}",
                        seen.server
                    );
                }
            }
        }
    }
    let after = replies(nodes)?;
    ensure!(after == before, "{} replies went through the first node", after - before);
    Ok(())
}

/// Pod 3 of node 2, which node 2 masquerades, and pod 2 of node 3 send encapsulated packets of a client to node 3.
fn forged(nodes: &mut Nodes) -> Result<()> {
    let [to, _] = orig_dst(Family::V4, SocketKind::Udp);
    is_direct(nodes, SocketKind::Udp, to)?;
    let inner = raw::udp((link_ip(Family::V4, 30, 100), 33_333).into(), to, b"forged");
    for (node, pod) in [(2, 3), (3, 2)] {
        let sender = &nodes.all[usize::from(node) - 1];
        let (own, third) = (pod_ip(Family::V4, node, pod), node_ip(Family::V4, 3));
        let wire = Wire::new(sender.pod_space(usize::from(pod) - 2), "eth0", (&sender.space, BRIDGE))?;
        for from in [own, node_ip(Family::V4, 1)] {
            wire.send(&raw::encapsulated(from, third, &inner))?;
        }
        eventually(SOON, || {
            let reasons = sender.ask(&["status"])?["reasons"].clone();
            ensure!(reasons["local_tunnel"]["count"] == 2, "node {node}: {reasons}");
            Ok(())
        })?;
    }
    for node in &nodes.all {
        let flows = node.ask(&["flow", "list"])?.to_string();
        ensure!(!flows.contains(":33333"), "a forged packet began a flow: {flows}");
    }
    Ok(())
}

fn hybrid(nodes: &mut Nodes) -> Result<()> {
    for family in Family::BOTH {
        let [to, _] = orig_dst(family, SocketKind::Tcp);
        is_direct(nodes, SocketKind::Tcp, to)?;
        let [to, _] = orig_dst(family, SocketKind::Udp);
        let seen = exchange(nodes, SocketKind::Udp, to)?;
        ensure!(seen.client.ip() == node_ip(family, 1), "{to}: the endpoint sees {}", seen.client);
    }
    Ok(())
}

fn fallback(nodes: &mut Nodes) -> Result<()> {
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let [to, _] = orig_dst(family, kind);
            let seen = exchange(nodes, kind, to)?;
            ensure!(seen.client.ip() == node_ip(family, 1), "{to}: the endpoint sees {}", seen.client);
        }
    }
    Ok(())
}

/// Changes the mode of the Service while connections continue and new ones begin.
fn live(nodes: &mut Nodes) -> Result<()> {
    let mut loads = Vec::new();
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let [to, _] = orig_dst(family, kind);
            is_direct(nodes, kind, to)?;
            let load = |is_one_socket| Load { attempt: Attempt::new(kind, to), is_one_socket, pause: 10 };
            loads.extend([load(true), load(false)]);
        }
    }
    nodes.outside.load(&loads)?;
    for mode in ["snat", "dsr", "hybrid", "dsr"] {
        goes_on(nodes)?;
        nodes.folder.put_text("all", &text(&Wish { mode, ..Wish::default() }))?;
    }
    goes_on(nodes)?;
    let tallies = nodes.outside.stop()?;
    for (load, tally) in loads.iter().zip(tallies) {
        super::is_clean(&tally, &format!("{:?}", load.attempt), &["2/2", "3/2"])?;
    }
    Ok(())
}

/// Lets traffic flow for a while, and on a busy machine until the clients have sent enough.
fn goes_on(nodes: &Nodes) -> Result<()> {
    const PACKETS: u64 = 400;
    let before = sum(nodes, "packets")?;
    std::thread::sleep(Duration::from_millis(700));
    eventually(SOON, || {
        let sent = sum(nodes, "packets")? - before;
        ensure!(sent >= PACKETS, "only {sent} packets");
        Ok(())
    })
}

/// Opens long connections to the Service's own address, through node 1.
fn hold(nodes: &Nodes) -> Result<()> {
    for family in Family::BOTH {
        for node in [2, 3] {
            let at: SocketAddr = (pod_ip(family, node, 2), objects::MANY).into();
            nodes.all[usize::from(node) - 1].pod(0).serve_many(at, &format!("{node}/2"))?;
        }
        let to = (vip(family), objects::MANY).into();
        is_direct(nodes, SocketKind::Tcp, to)?;
        let held = nodes.outside.hold(Attempt { patience: 30, ..Attempt::new(SocketKind::Tcp, to) }, HELD)?;
        ensure!(held.lost == 0, "{held:?}");
    }
    lives(nodes, "at first")
}

/// Checks that all connections answer, each from the server that it began with.
fn lives(nodes: &Nodes, when: &str) -> Result<()> {
    let held = nodes.outside.pulse(30)?;
    ensure!(held.lost == 0 && held.alive == 2 * HELD as u64, "{when}: {held:?}");
    ensure!(held.servers.len() == 2, "{when}: only {:?} serve", held.servers);
    Ok(())
}

fn forgets(nodes: &mut Nodes) -> Result<()> {
    hold(nodes)?;
    nodes.all[0].forget_flows()?;
    lives(nodes, "without flows")?;
    nodes.all[0].restart(&[])?;
    lives(nodes, "with another agent")?;
    nodes.all[0].forget_flows()?;
    lives(nodes, "without flows again")
}

fn moves(nodes: &mut Nodes) -> Result<()> {
    hold(nodes)?;
    // Nodes 3 and 2 have endpoints themselves.
    for node in [3, 2, 1] {
        lead(nodes, node)?;
        lives(nodes, &format!("through node {node}"))?;
    }
    let other: IpAddr = vip(Family::V4);
    is_direct(nodes, SocketKind::Tcp, (other, PORTS[0]).into())?;
    Ok(())
}

/// Adds two endpoints, which take about half of the Maglev table. The node that the address moves to, and other nodes,
/// have no flows of the connections, and would now select another endpoint for them.
fn second_chance(nodes: &mut Nodes) -> Result<()> {
    hold(nodes)?;
    change(nodes, &[(1, 2), (2, 3)], 4)?;
    // Remove the flows of node 1, as if it had never been the first node.
    nodes.all[0].forget_flows()?;
    lead(nodes, 2)?;
    lives(nodes, "through node 2, with more endpoints")?;
    // Node 1 fails, and its endpoint is removed.
    nodes.all[0].space.ip("link set eth0 down\n")?;
    change(nodes, &[(2, 3)], 3)?;
    nodes.all[1].forget_flows()?;
    nodes.all[2].forget_flows()?;
    lives(nodes, "through node 2, with a node less and no flows")?;
    lead(nodes, 3)?;
    lives(nodes, "through node 3")
}

/// Again and again, an endpoint joins or leaves, the address moves, and a node loses all its flows. The endpoints of the
/// connections stay, on the other nodes.
fn churn(nodes: &mut Nodes) -> Result<()> {
    const CHANGES: [(&[(u8, u8)], usize); 4] =
        [(&[(1, 2)], 3), (&[(1, 2), (2, 3)], 4), (&[(2, 3)], 3), (&[], 2)];
    hold(nodes)?;
    let rounds = CHANGES.into_iter().cycle().take(10).enumerate();
    for ((round, (more, count)), first) in rounds.zip([2, 3, 1].into_iter().cycle()) {
        change(nodes, more, count)?;
        lead(nodes, first)?;
        if round % 3 == 2 {
            nodes.all[0].forget_flows()?;
        }
        lives(nodes, &format!("round {round}, through node {first}"))?;
    }
    Ok(())
}

/// Makes all nodes serve with these additional endpoints, and waits until each node has `count` endpoints in each family.
fn change(nodes: &Nodes, more: &'static [(u8, u8)], count: usize) -> Result<()> {
    nodes.folder.put_text("all", &text(&Wish { more, ..Wish::default() }))?;
    nodes.all.iter().try_for_each(|node| {
        eventually(SOON, || {
            let shown = node.ask(&["service", "show", "default/dsr"])?;
            let ports = shown["ports"].as_array().into_iter().flatten();
            let rows = ports.flat_map(|port| port["backends"].as_array().into_iter().flatten());
            let serves = |row: &&Value| {
                let address = row["address"].as_str().unwrap_or_default();
                row["state"] == "active" && address.ends_with(&format!(":{}", objects::MANY))
            };
            let endpoints = rows.filter(serves).count();
            ensure!(endpoints == 2 * count, "{endpoints} endpoints: {shown}");
            Ok(())
        })
    })
}
