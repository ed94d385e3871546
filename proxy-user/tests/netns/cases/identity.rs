//! Whose a packet is: frames for other machines on a link that floods, containers on the LAN, packets that pods forge, the
//! FORWARD chain, and addresses that are local by a route.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::three_nodes::objects;
use super::three_nodes::rule::{Location, PLACES, node_port};
use super::{NodesCase, xdp};
use crate::fixture::{SOON, eventually, nft};
use crate::nodes::{BRIDGE, Node, Nodes, link_ip, node_ip, pod_ip};
use crate::peer::{Attempt, Peer, SocketKind};
use crate::raw::{self, Wire, device};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, ready_on, service_object, slices, tcp_and_udp, yaml};
use proxy_testbed::space::Space;

pub const CASES: &[NodesCase] = &[
    NodesCase { name: "identity::one_node_answers_on_a_link_that_floods", run: || with(&[], flooded) },
    NodesCase {
        name: "identity::one_node_answers_on_a_bridge_that_floods",
        run: || {
            let mut nodes = Nodes::without_vlan()?;
            on_a_bridge(&mut nodes)?;
            // The NIC is a veth here, which is taken for a guest's if it is a port of a bridge.
            begin(nodes, &["--uplinks", "eth0"], flooded)
        },
    },
    NodesCase {
        name: "identity::one_node_answers_by_xdp_on_a_link_that_floods",
        run: || {
            let (nodes, _ends) = xdp::wired()?;
            begin(nodes, &["--xdp", "native"], flooded)
        },
    },
    NodesCase { name: "identity::a_container_on_the_lan_reaches_other_nodes", run: || with(&[], on_the_lan) },
    NodesCase { name: "identity::a_forged_address_of_the_node_blocks_no_client", run: || with(&[], forged) },
    NodesCase {
        name: "identity::masquerade_all_obeys_the_forward_chain",
        run: || with(&["--masquerade-all"], forward_chain),
    },
    NodesCase {
        name: "identity::node_ports_answer_at_local_routes",
        run: || with(&["--nodeport-addresses", "all,localhost"], local_routes),
    },
];

/// Ports of the Service `vip`, for TCP and UDP.
const PORTS: [u16; 2] = [80, 53];
/// A MAC address that no machine has.
const NOT_A_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x99];
/// Number of exchanges of each kind.
const MANY: u16 = 20;

/// Returns the external address of the Service `vip`.
fn vip(family: Family) -> IpAddr {
    link_ip(family, 30, 60)
}

fn orig_dst(family: Family, kind: SocketKind) -> SocketAddr {
    (vip(family), PORTS[usize::from(!kind.is_tcp())]).into()
}

/// Returns all objects: those of `three_nodes`, and a Service with external addresses and an endpoint on node 3.
fn text() -> String {
    let mut all = objects::objects();
    let spec = json!({
        "type": "ClusterIP", "externalIPs": Family::BOTH.map(vip), "ports": tcp_and_udp(PORTS),
    });
    all.push(service_object("vip", 90, &spec));
    let endpoints = |family| vec![ready_on(pod_ip(family, 3, 2), "node3")];
    all.extend(slices("vip", "vip", &tcp_and_udp([8080, 5353]), endpoints));
    yaml(all)
}

/// Builds three nodes with these flags, and runs the test.
fn with(flags: &[&str], test: fn(&mut Nodes) -> Result<()>) -> Result<()> {
    begin(Nodes::without_vlan()?, flags, test)
}

/// Lets three nodes with these flags read the objects, and runs the test.
fn begin(mut nodes: Nodes, flags: &[&str], test: fn(&mut Nodes) -> Result<()>) -> Result<()> {
    nodes.folder.put_text("all", &text())?;
    let flags: Vec<_> = flags.iter().map(|&flag| flag.to_owned()).collect();
    let begun = nodes.begin(&flags).and_then(|()| test(&mut nodes));
    begun.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

/// Returns the MAC address at which a node receives frames.
fn mac(nodes: &Nodes, node: usize) -> Result<[u8; 6]> {
    let space = &nodes.all[node - 1].space;
    Ok(device(space, "br0").or_else(|_| device(space, "eth0"))?.0)
}

/// Sets where a machine on the link sends packets for the Service.
fn leads_to(space: &Space, mac: [u8; 6]) -> Result<()> {
    let mac = mac.map(|octet| format!("{octet:02x}")).join(":");
    Family::BOTH.into_iter().try_for_each(|family| {
        space.ip(&format!("neigh replace {} lladdr {mac} dev eth0 nud permanent\n", vip(family)))
    })
}

/// Returns how many packets of clients a node has counted for the Service.
fn packets(node: &Node) -> Result<u64> {
    let shown = node.ask(&["service", "show", "default/vip"])?.to_string();
    let number = |rest: &str| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok();
    Ok(shown.split("\"packets\":").skip(1).filter_map(number).sum())
}

/// Puts each node's NIC into a bridge that has the node's addresses and a MAC address of its own.
fn on_a_bridge(nodes: &mut Nodes) -> Result<()> {
    for (number, node) in (1..).zip(&nodes.all) {
        let own = Family::BOTH.map(|family| node_ip(family, number));
        node.space.ip(&format!(
            "link add br0 type bridge mcast_snooping 0\nlink set br0 address 02:00:00:00:01:0{number}\n\
             link set br0 up\nlink set eth0 master br0\n\
             addr flush dev eth0\naddr add {}/24 dev br0\naddr add {}/64 dev br0 nodad\n\
             route replace default via 172.30.0.254\nroute replace default via fd30::fe\n",
            own[0], own[1]
        ))?;
        for other in (1..=3).filter(|other| *other != number) {
            for (family, length) in Family::BOTH.into_iter().zip([24, 64]) {
                let (range, via) = (pod_ip(family, other, 0), node_ip(family, other));
                node.space.ip(&format!("route replace {range}/{length} via {via}\n"))?;
            }
        }
    }
    Ok(())
}

/// A link whose switch has learned no address sends each frame to every machine.
fn flooded(nodes: &mut Nodes) -> Result<()> {
    for port in ["n1", "n2", "n3", "c0"] {
        nodes.fabric.ip(&format!("link set {port} type bridge_slave learning off flood on\n"))?;
    }
    nodes.fabric.ip("link set br0 type bridge fdb_flush\n")?;
    leads_to(&nodes.clients[0], mac(nodes, 1)?)?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = orig_dst(family, kind);
            eventually(SOON, || nodes.outside.reach(Attempt::new(kind, to)))?;
            for port in 20_000..20_000 + MANY {
                let seen = nodes.outside.reach(Attempt::new(kind, to).at_port(port))?;
                ensure!(seen.client.ip() == node_ip(family, 1), "{to}: the endpoint sees {}", seen.client);
                ensure!(seen.syn_retransmits == 0, "{to}: a SYN was lost");
            }
        }
    }
    let counts = || nodes.all.iter().map(packets).collect::<Result<Vec<_>>>();
    let served = counts()?;
    ensure!(served[0] >= 4 * u64::from(MANY), "node 1 counts {served:?}");
    ensure!(served[1..] == [0, 0], "nodes that were not asked count {served:?}");
    leads_to(&nodes.clients[0], NOT_A_MAC)?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let attempt = Attempt::new(kind, orig_dst(family, kind)).in_vain();
            ensure!(nodes.outside.once(attempt)?.is_err(), "a machine answers at a MAC address of none");
        }
    }
    let after = counts()?;
    ensure!(after == served, "{after:?} after {served:?}");
    Ok(())
}

/// A container with a macvlan device on the NIC of node 2 connects to the Service through node 1.
fn on_the_lan(nodes: &mut Nodes) -> Result<()> {
    let container = Space::new("container")?;
    nodes.all[1].space.ip(&format!(
        "link add mv0 link eth0 type macvlan mode bridge\nlink set mv0 netns {}\n",
        container.path()
    ))?;
    let own = Family::BOTH.map(|family| link_ip(family, 30, 150));
    container.ip(&format!(
        "link set mv0 name eth0\naddr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\nlink set eth0 up\n",
        own[0], own[1]
    ))?;
    leads_to(&container, mac(nodes, 1)?)?;
    let peer = Peer::start(&container, None)?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = orig_dst(family, kind);
            eventually(SOON, || peer.reach(Attempt { patience: 3, ..Attempt::new(kind, to) }))?;
        }
    }
    ensure!(packets(&nodes.all[1])? == 0, "node 2 has taken the container's packets for its own");
    ensure!(packets(&nodes.all[0])? > 0, "node 1 has not served");
    Ok(())
}

/// A pod sends a datagram that looks like one of node 1's own, from a node port to a client.
fn forged(nodes: &mut Nodes) -> Result<()> {
    let node = &nodes.all[0];
    let wire = Wire::new(node.pod_space(0), "eth0", (&node.space, BRIDGE))?;
    for (family, from) in Family::BOTH.into_iter().zip([21_000, 21_100]) {
        let port = node_port(0, Location::Far, SocketKind::Datagram);
        let own: SocketAddr = (node_ip(family, 1), port).into();
        eventually(SOON, || nodes.outside.reach(Attempt::new(SocketKind::Datagram, own)))?;
        for at in from..from + MANY {
            wire.send(&raw::udp(own, (link_ip(family, 30, 100), at).into(), b"forged"))?;
        }
        std::thread::sleep(Duration::from_millis(300));
        for at in from..from + MANY {
            let attempt = Attempt { patience: 3, ..Attempt::new(SocketKind::Datagram, own).at_port(at) };
            nodes.outside.reach(attempt)?;
        }
    }
    Ok(())
}

/// Pod 3 of node 1 connects to pod 2 by a cluster address. A rule of the FORWARD chain denies it.
fn forward_chain(nodes: &mut Nodes) -> Result<()> {
    let places = [Location::Near, Location::Far];
    let to = |family, location: Location| -> SocketAddr {
        let at = PLACES.iter().position(|place| *place == location);
        (cluster_ip(family, objects::CLUSTER + at.unwrap_or_default() as u8), 80).into()
    };
    let client = nodes.all[0].pod(1);
    for family in Family::BOTH {
        for location in places {
            let seen =
                eventually(SOON, || client.reach(Attempt::new(SocketKind::Tcp, to(family, location))))?;
            let own = if location == Location::Near { pod_ip(family, 1, 3) } else { node_ip(family, 1) };
            ensure!(seen.client.ip() == own, "{location:?}: the endpoint sees {}", seen.client);
        }
    }
    let rule = |family, word| {
        let (client, server) = (pod_ip(family, 1, 3), pod_ip(family, 1, 2));
        format!("{word} saddr {client} {word} daddr {server} drop;\n")
    };
    nft(
        &nodes.all[0].space,
        &format!(
            "table inet policies {{\nchain forward {{\ntype filter hook forward priority filter;\n{}{}}}\n}}\n",
            rule(Family::V4, "ip"),
            rule(Family::V6, "ip6")
        ),
    )?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Tcp, to(family, Location::Near)).in_vain();
        ensure!(client.once(attempt)?.is_err(), "{family:?}: the policy has no effect");
    }
    Ok(())
}

/// Addresses of node 1 that no device has: by a route of its own, and 127.0.0.2.
fn local_routes(nodes: &mut Nodes) -> Result<()> {
    let own = Family::BOTH.map(|family| link_ip(family, 34, 7));
    nodes.all[0]
        .space
        .ip(&format!("route add local {} dev lo\nroute add local {} dev lo\n", own[0], own[1]))?;
    for (family, own) in Family::BOTH.into_iter().zip(own) {
        nodes.clients[0].ip(&format!("route add {own} via {}\n", node_ip(family, 1)))?;
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = (own, node_port(0, Location::Far, kind)).into();
            eventually(SOON, || nodes.outside.reach(Attempt { patience: 3, ..Attempt::new(kind, to) }))?;
        }
    }
    let status = nodes.all[0].ask(&["status"])?;
    ensure!(status["nodePorts"].to_string().contains("172.34.0.7"), "{status}");
    for loopback in [[127, 0, 0, 1], [127, 9, 8, 7]] {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = (IpAddr::from(loopback), node_port(0, Location::Far, kind)).into();
            nodes.all[0].host.reach(Attempt { patience: 3, ..Attempt::new(kind, to) })?;
        }
    }
    Ok(())
}
