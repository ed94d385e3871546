//! Every kind of client x detect mode x external policy x place of the endpoint, on three nodes: which clients are served, by
//! which endpoints, what the endpoint sees, and whether the answer comes from the original destination.
//!
//! `rule.rs` states the rule; `look.rs` observes, and prints what was seen as the table of `docs/datapath.md`. A new kind of
//! client is a variant of [`Who`], a new place of the endpoint a variant of [`Location`], a new mode a case here.

mod look;
pub mod objects;
pub mod rule;

use std::collections::BTreeSet;
use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use self::look::{cells, table};
use self::objects::{CLUSTER, node_object, objects};
use self::rule::{Location, Mode, POLICIES, Who, node_port};
use super::NodesCase;
use crate::fixture::{SOON, eventually};
use crate::nodes::{BRIDGE, Node, Nodes, PREFIX, node_ip};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, ready_on, service_object, slices, tcp_and_udp, yaml};

pub const CASES: &[NodesCase] = &[
    NodesCase { name: "three_nodes::kubeadms_configuration", run: || matrix(Mode::Kubeadm) },
    NodesCase { name: "three_nodes::by_devices", run: || matrix(Mode::Devices) },
    NodesCase { name: "three_nodes::cluster_cidr", run: || matrix(Mode::ClusterCidr) },
    NodesCase { name: "three_nodes::node_cidr", run: || matrix(Mode::NodeCidr) },
    NodesCase { name: "three_nodes::bridge_interface", run: || matrix(Mode::Bridge) },
    NodesCase { name: "three_nodes::interface_name_prefix", run: || matrix(Mode::Prefix) },
    NodesCase { name: "three_nodes::one_port_to_a_node_port_and_a_cluster_address", run: one_port },
    NodesCase {
        name: "three_nodes::call_of_a_node_to_an_endpoint_that_is_a_frontend_is_translated_once",
        run: frontend_is_endpoint,
    },
];

/// Returns the flags of the mode, which are the same on every node.
fn flags(mode: Mode, nodes: &Nodes) -> Result<Vec<String>> {
    let mut flags = Vec::new();
    // Remove kubeadm's kubeconfig: there is no cluster, and the agent would ask for one in addition to the folder.
    let kubeadm = include_str!("kubeadm.yaml").replace("/var/lib/kube-proxy/kubeconfig.conf", "\"\"");
    let config = || nodes.file("kubeadm.yaml", &kubeadm);
    let more: Vec<&str> = match mode {
        Mode::Devices => vec![],
        Mode::ClusterCidr => {
            vec!["--detect-local-mode", "ClusterCIDR", "--cluster-cidr", "10.244.0.0/16,fd44::/16"]
        }
        Mode::Kubeadm => {
            flags.extend(["--config".to_owned(), config()?.display().to_string()]);
            vec![]
        }
        // Only node 1 has an API server, and only the mode of node 1 matters.
        Mode::NodeCidr => vec!["--detect-local-mode", "NodeCIDR"],
        Mode::Bridge => vec!["--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", BRIDGE],
        Mode::Prefix => {
            vec!["--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", PREFIX]
        }
    };
    flags.extend(more.into_iter().map(str::to_owned));
    Ok(flags)
}

/// A process of node 2 uses one UDP port for a node port of node 1, which translates its packets, and for the same Service's
/// cluster address, which its own node translates. Checks that each answer comes from the original destination.
fn one_port() -> Result<()> {
    let mut nodes = Nodes::new()?;
    nodes.folder.put_text("all", &yaml(objects()))?;
    nodes.begin(&[])?;
    let client = &nodes.all[1].host;
    for (family, port) in Family::BOTH.into_iter().zip([24_000, 24_001]) {
        let remote = (node_ip(family, 1), node_port(0, Location::Near, SocketKind::Datagram)).into();
        let cluster = (cluster_ip(family, CLUSTER), 53).into();
        let id = u32::from(port);
        let attempt = Attempt { patience: 5, ..Attempt::new(SocketKind::Datagram, remote).at_port(port) };
        eventually(SOON, || client.reach(Attempt::new(SocketKind::Datagram, remote)))?;
        client.open(id, attempt)?;
        for (round, to) in [remote, cluster].into_iter().cycle().take(20).enumerate() {
            let seen = client.hears(id, Some(to)).with_context(|| format!("message {round}"))?;
            ensure!(seen.from == Some(to), "message {round}: {to} answers from {:?}", seen.from);
            ensure!(seen.server == "1/2", "message {round}: served by {}", seen.server);
        }
    }
    Ok(())
}

/// The endpoints of a Service are the nodes' processes, and its external addresses the nodes', with the same ports. Were the node's
/// packets to the endpoint of another node translated again, some would lead to its own process, which they cannot reach.
fn frontend_is_endpoint() -> Result<()> {
    const NUMBER: u8 = 60;
    let mut nodes = Nodes::new()?;
    let addresses =
        Family::BOTH.into_iter().flat_map(|family| (1..=3).map(move |node| node_ip(family, node)));
    let spec = json!({
        "externalIPs": addresses.collect::<Vec<_>>(),
        "ports": [
            {"name": "tcp", "port": 8080, "protocol": "TCP"},
            {"name": "udp", "port": 5353, "protocol": "UDP"},
        ],
    });
    let slices = slices("ingress", "ingress", &tcp_and_udp([8080, 5353]), |family| {
        (1..=3).map(|node| ready_on(node_ip(family, node), &format!("node{node}"))).collect()
    });
    let service = service_object("ingress", NUMBER, &spec);
    nodes.folder.put_text("all", &yaml([service].into_iter().chain(slices)))?;
    nodes.begin(&[])?;
    let client = &nodes.all[0].host;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let port = if kind.is_tcp() { 8080 } else { 5353 };
            for to in [cluster_ip(family, NUMBER), node_ip(family, 1), node_ip(family, 2)] {
                let attempt = Attempt { patience: 5, ..Attempt::new(kind, (to, port).into()) };
                eventually(SOON, || client.reach(attempt))?;
                let mut servers = BTreeSet::new();
                for round in 0..24 {
                    let seen = client.reach(attempt).with_context(|| format!("{kind:?} to {to}: {round}"))?;
                    servers.insert(seen.server);
                }
                ensure!(servers.len() == 3, "{kind:?} to {to}: served by {servers:?}");
            }
        }
    }
    Ok(())
}

fn matrix(mode: Mode) -> Result<()> {
    let mut nodes = Nodes::new()?;
    let objects = objects();
    nodes.folder.put_text("all", &yaml(objects.clone()))?;
    if mode == Mode::NodeCidr {
        nodes.ask_api_server(objects.into_iter().chain([node_object()]).collect())?;
    }
    let flags = flags(mode, &nodes)?;
    let result = nodes.begin(&flags).and_then(|()| look(mode, &mut nodes));
    result.with_context(|| nodes.all.iter().map(Node::log).collect::<Vec<_>>().join("\n"))
}

fn look(mode: Mode, nodes: &mut Nodes) -> Result<()> {
    for family in Family::BOTH {
        for policy in 0..POLICIES.len() {
            let to = (node_ip(family, 1), node_port(policy, Location::Near, SocketKind::Tcp)).into();
            eventually(SOON, || nodes.all[0].host.reach(Attempt::new(SocketKind::Tcp, to)))?;
        }
    }
    let Nodes { all, outside, second, vlan, .. } = nodes;
    let [one, two, _] = all.as_mut_slice() else { anyhow::bail!("three nodes") };
    let ((host, of_one), (_, of_two)) = (one.peers(), two.peers());
    let pods = of_one.into_iter().skip(1).chain(of_two);
    let peers = Who::ALL.into_iter().zip(pods.chain([host, outside, second]).chain(vlan.iter_mut()));
    // Each client has a thread of its own, so that a client that gets no answer does not delay the others.
    let cells: Result<Vec<_>> = std::thread::scope(|scope| {
        let threads: Vec<_> = peers.map(|(who, peer)| scope.spawn(move || cells(mode, who, peer))).collect();
        let joined =
            threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread died"))?);
        joined.collect::<Result<Vec<_>>>().map(|all| all.into_iter().flatten().collect())
    });
    let cells = cells?;
    let _ = writeln!(std::io::stdout(), "{}", table(mode, &cells));
    let wrong = cells.iter().filter(|cell| !cell.is_right).map(|cell| {
        let (who, policy, location) = cell.at;
        format!("{}, {}, {}: {}", who.label(), POLICIES[policy], location.label(), cell.what)
    });
    let wrong: Vec<_> = wrong.collect();
    ensure!(wrong.is_empty(), "{} of {} cells:\n{}", wrong.len(), cells.len(), wrong.join("\n"));
    Ok(())
}
