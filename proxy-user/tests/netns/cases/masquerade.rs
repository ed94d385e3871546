//! netfilter allocates source ports for its connections beside Ballast, for the same address and towards the same
//! endpoint: each answer has to reach the right client.
//!
//! To add an order, or another kind of source, add a row to [`CASES`].

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_user::maps::view::View;

use super::exposed::{is_sent_on, node_ip, open_up};
use super::held::{self, TARGETS, node_port};
use super::{Case, client_ip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually, nft};
use crate::manifest::{Family, pod_ip};
use crate::peer::{Attempt, SocketKind};
use crate::space::Space;

const WISH: Wish = Wish { pods: 2, services: &[], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "masquerade::udp_in_turn", wish: WISH, run: udp },
    Case {
        name: "masquerade::tcp_after_ballast_gets_another_port",
        wish: WISH,
        run: |fixture| tcp(fixture, true),
    },
    Case {
        name: "masquerade::tcp_before_ballast_keeps_its_port",
        wish: WISH,
        run: |fixture| tcp(fixture, false),
    },
    Case { name: "masquerade::under_the_number_of_a_node_port", wish: WISH, run: under_node_port },
];

/// Number of connections of each side in each family: 10,000 by UDP in all.
const FLOWS: usize = 2_500;
/// The same number for TCP.
const CONNECTIONS: usize = 1_500;
/// Timeout for all connections together, in seconds.
const PATIENCE: u64 = 60;

/// Rewrites the source of the second pod's packets to the first pod to the node's address, as MASQUERADE with
/// `--random-fully` does it on the device that has this address.
fn masquerade(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    held::put(fixture, &[(0, false)])?;
    for family in Family::BOTH {
        let name = if family == Family::V4 { "ip" } else { "ip6" };
        let (from, to, source) = (pod_ip(family, 1), pod_ip(family, 0), node_ip(family));
        let source = if source.is_ipv4() { format!("{source}") } else { format!("[{source}]") };
        let rule = |proto| {
            format!(
                "meta l4proto {proto} {name} saddr {from} {name} daddr {to} \
                 snat to {source}:1024-65535 fully-random\n"
            )
        };
        let rules = ["tcp", "udp"].map(rule).concat();
        let chain = format!("chain postrouting {{\ntype nat hook postrouting priority srcnat\n{rules}}}\n");
        nft(&fixture.node, &format!("table {name} shared {{\n{chain}}}\n"))?;
    }
    Ok(())
}

/// Returns how many of netfilter's connections Ballast moved to another source port.
fn moved(fixture: &Fixture) -> Result<usize> {
    let flows = View::open(&fixture.bpffs())?.flows()?;
    Ok(flows.iter().filter(|flow| flow.service == 0 && flow.source != flow.client).count())
}

/// Sends back every datagram, until `is_over` is set.
fn echo(socket: &UdpSocket, is_over: &AtomicBool) {
    let mut text = [0; 64];
    while !is_over.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut text) else { continue };
        // A client that is gone must not stop the server.
        let _ = socket.send_to(&text[..length], from);
    }
}

fn sockets(space: &Space, from: IpAddr, to: SocketAddr) -> Result<Vec<UdpSocket>> {
    let open = |_| {
        let socket = UdpSocket::bind((from, 0))?;
        socket.set_read_timeout(Some(Duration::from_secs(20)))?;
        socket.connect(to)?;
        Ok(socket)
    };
    space.inside(|| (0..FLOWS).map(open).collect())
}

/// Sends a number, and checks that the same number comes back.
fn hears(socket: &UdpSocket, number: usize, wrong: &mut Vec<String>) -> Result<()> {
    let mut text = [0; 64];
    socket.send(&number.to_be_bytes())?;
    match socket.recv(&mut text) {
        Ok(length) if text[..length] == number.to_be_bytes() => {}
        Ok(length) => wrong.push(format!("{number} heard {:?}", &text[..length])),
        Err(error) => wrong.push(format!("{number} heard nothing: {error}")),
    }
    Ok(())
}

fn udp(fixture: &Fixture) -> Result<()> {
    masquerade(fixture)?;
    for family in Family::BOTH {
        let (service, endpoint) = (node_port(family, false), (pod_ip(family, 0), TARGETS[1]));
        let server = fixture.in_pod(0, || Ok(UdpSocket::bind(endpoint)?))?;
        server.set_read_timeout(Some(Duration::from_millis(100)))?;
        let is_over = AtomicBool::new(false);
        let wrong = std::thread::scope(|scope| {
            scope.spawn(|| echo(&server, &is_over));
            let result = exchange(fixture, family, service, endpoint.into());
            is_over.store(true, Ordering::Relaxed);
            result
        })?;
        ensure!(
            wrong.is_empty(),
            "{family:?}: {} of {} are wrong: {:?}",
            wrong.len(),
            2 * FLOWS,
            wrong.first_chunk::<3>().unwrap_or(&Default::default())
        );
    }
    let moved = moved(fixture)?;
    ensure!(moved > 0, "no port was taken twice");
    Ok(())
}

fn exchange(
    fixture: &Fixture,
    family: Family,
    service: SocketAddr,
    endpoint: SocketAddr,
) -> Result<Vec<String>> {
    // Wait until the Service is served.
    eventually(SOON, || {
        let mut wrong = Vec::new();
        let probe = sockets_of(&fixture.client_space, client_ip(family), service)?;
        hears(&probe, 0, &mut wrong)?;
        ensure!(wrong.is_empty(), "{wrong:?}");
        Ok(())
    })?;
    let ours = sockets(&fixture.client_space, client_ip(family), service)?;
    let theirs = fixture.in_pod_space(1, |pod| sockets(pod, pod_ip(family, 1), endpoint))?;
    let mut wrong = Vec::new();
    // In the first round, the two sides allocate ports in turn; in the second round, all connections are known.
    for _ in 0..2 {
        for (number, (our, their)) in ours.iter().zip(&theirs).enumerate() {
            hears(our, 2 * number, &mut wrong)?;
            hears(their, 2 * number + 1, &mut wrong)?;
        }
    }
    Ok(wrong)
}

fn sockets_of(space: &Space, from: IpAddr, to: SocketAddr) -> Result<UdpSocket> {
    space.inside(|| {
        let socket = UdpSocket::bind((from, 0))?;
        socket.set_read_timeout(Some(Duration::from_millis(200)))?;
        socket.connect(to)?;
        Ok(socket)
    })
}

/// Opens connections of both sides; those of the second side meet the ports of the first.
fn tcp(fixture: &Fixture, ballast_first: bool) -> Result<()> {
    masquerade(fixture)?;
    held::serve(fixture, 0)?;
    for family in Family::BOTH {
        is_sent_on(fixture, node_port(family, true), SocketKind::Tcp)?;
    }
    let theirs = || -> Result<()> {
        for family in Family::BOTH {
            let attempt = Attempt {
                patience: PATIENCE,
                ..Attempt::new(SocketKind::Tcp, (pod_ip(family, 0), TARGETS[0]).into())
            };
            let held = fixture.pod(1)?.hold(attempt, CONNECTIONS)?;
            ensure!(held.lost == 0 && held.syn_retransmits == 0, "{family:?}, by netfilter: {held:?}");
        }
        Ok(())
    };
    if ballast_first {
        held::hold(fixture, CONNECTIONS)?;
        theirs()?;
        ensure!(moved(fixture)? > 0, "no port was taken twice");
    } else {
        theirs()?;
        held::hold(fixture, CONNECTIONS)?;
    }
    for _ in 0..2 {
        held::nothing_is_lost(fixture, "Ballast's")?;
        let held = fixture.pod(1)?.pulse(PATIENCE).context("netfilter's")?;
        ensure!(held.lost == 0, "netfilter's: {held:?}");
    }
    Ok(())
}

/// netfilter does not know node ports, and allocates their numbers too: each answer then arrives at a node port of this node.
fn under_node_port(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    held::put(fixture, &[(0, false)])?;
    held::serve(fixture, 0)?;
    for family in Family::BOTH {
        is_sent_on(fixture, node_port(family, true), SocketKind::Tcp)?;
        let outside = client_ip(family);
        fixture.client.serve(true, (outside, TARGETS[0]).into(), "outside")?;
        fixture.client.serve(false, (outside, TARGETS[1]).into(), "outside")?;
        let name = if family == Family::V4 { "ip" } else { "ip6" };
        let rule = |(proto, is_tcp)| {
            format!(
                "meta l4proto {proto} {name} saddr {} snat to {}\n",
                pod_ip(family, 1),
                node_port(family, is_tcp)
            )
        };
        let rules = [("tcp", true), ("udp", false)].map(rule).concat();
        let chain = format!("chain postrouting {{\ntype nat hook postrouting priority srcnat\n{rules}}}\n");
        nft(&fixture.node, &format!("table {name} numbers {{\n{chain}}}\n"))?;
    }
    for family in Family::BOTH {
        for (kind, target) in [(SocketKind::Tcp, TARGETS[0]), (SocketKind::Udp, TARGETS[1])] {
            for (at, server) in [(pod_ip(family, 0), "0"), (client_ip(family), "outside")] {
                if kind == SocketKind::Udp && server == "0" {
                    // The socket programs translate the answer of the pod's server to the node port like a client's
                    // call (docs/coexistence.md).
                    continue;
                }
                let attempt = Attempt { patience: 5, ..Attempt::new(kind, (at, target).into()) };
                let flows = || View::open(&fixture.bpffs()).and_then(|view| view.flows());
                let seen = fixture.pod(1)?.reach(attempt).with_context(|| format!("flows: {:?}", flows()))?;
                let source = node_port(family, kind.is_tcp());
                ensure!(
                    seen.server == server && seen.client == source,
                    "{attempt:?}: {seen:?}, not from {source}"
                );
            }
        }
    }
    Ok(())
}
