//! netfilter allocates source ports for its connections beside Ballast, for the same address and towards the same
//! endpoint: each answer has to reach the right client.
//!
//! To add an order, or another kind of source, add a row to [`CASES`].

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_user::maps::view::View;
use socket2::{Domain, Socket, Type};

use super::exposed::{is_sent_on, node_ip, open_up};
use super::held::{self, TARGETS, node_port};
use super::routes::MASQUERADE;
use super::{Case, client_ip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::pod_ip;
use proxy_testbed::space::Space;

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
    Case {
        name: "masquerade::snat_shares_ports_with_sockets_that_use_nearly_all",
        wish: WISH,
        run: shared_with_sockets,
    },
    Case { name: "masquerade::under_the_number_of_a_node_port", wish: WISH, run: under_node_port },
    Case {
        name: "masquerade::udp_client_with_the_port_of_the_node_port_is_answered",
        wish: Wish { flags: MASQUERADE, ..WISH },
        run: from_the_node_port,
    },
    Case {
        name: "masquerade::connections_older_than_a_node_port_stay",
        wish: WISH,
        run: older_than_node_port,
    },
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

/// Opens connections to the endpoint itself in each family, none of which may wait for a retransmission.
fn hold_endpoint(peer: &Peer, of: &str) -> Result<()> {
    for family in Family::BOTH {
        let to = (pod_ip(family, 0), TARGETS[0]).into();
        let held =
            peer.hold(Attempt { patience: PATIENCE, ..Attempt::new(SocketKind::Tcp, to) }, CONNECTIONS)?;
        ensure!(held.lost == 0 && held.syn_retransmits == 0, "{family:?}, of {of}: {held:?}");
    }
    Ok(())
}

/// Opens connections of both sides; those of the second side meet the ports of the first.
fn tcp(fixture: &Fixture, ballast_first: bool) -> Result<()> {
    masquerade(fixture)?;
    held::serve(fixture, 0)?;
    for family in Family::BOTH {
        is_sent_on(fixture, node_port(family, true), SocketKind::Tcp)?;
    }
    let theirs = || hold_endpoint(&*fixture.pod(1)?, "netfilter");
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

/// With `ip_local_port_range` of nearly all ports, SNAT takes ports that sockets of the node use towards the same endpoint.
fn shared_with_sockets(fixture: &Fixture) -> Result<()> {
    fixture.node.sysctl("net/ipv4/ip_local_port_range", "1024 65000")?;
    // As towards an endpoint of another node, both use one address.
    fixture.node.ip(
        "route replace 10.99.0.0/24 dev p0 src 10.98.0.1\nroute replace fd99::/64 dev p0 src fd98::1\n",
    )?;
    fixture.restart()?;
    // The kernel gives adjacent ports, from a random one on: with the whole range, SNAT may use none of them.
    fixture.node.sysctl("net/ipv4/ip_local_port_range", "1024 29999")?;
    open_up(fixture)?;
    held::put(fixture, &[(0, false)])?;
    held::serve(fixture, 0)?;
    for family in Family::BOTH {
        is_sent_on(fixture, node_port(family, true), SocketKind::Tcp)?;
    }
    let of_the_node = || hold_endpoint(&fixture.outside, "the node");
    of_the_node()?;
    held::hold(fixture, CONNECTIONS)?;
    of_the_node()?;
    ensure!(moved(fixture)? > 0, "no port was taken twice");
    for _ in 0..2 {
        held::nothing_is_lost(fixture, "Ballast's")?;
        let held = fixture.outside.pulse(PATIENCE).context("the node's")?;
        ensure!(held.lost == 0, "the node's: {held:?}");
    }
    Ok(())
}

/// The other end of a connection that a pod or the node has begun, outside.
struct Far<T> {
    near: T,
    far: T,
}

/// Connects by TCP from a namespace to the client's, and exchanges a byte.
fn connected(fixture: &Fixture, from: &Space, own: SocketAddr, to: SocketAddr) -> Result<Far<TcpStream>> {
    let listener = fixture.client_space.inside(|| Ok(TcpListener::bind(to)?))?;
    let near = from.inside(|| {
        let socket = Socket::new(Domain::for_address(own), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&own.into())?;
        socket.connect_timeout(&to.into(), Duration::from_secs(PATIENCE))?;
        Ok(TcpStream::from(socket))
    })?;
    let far = listener.accept()?.0;
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(Duration::from_secs(PATIENCE)))?;
    }
    let mut pair = Far { near, far };
    pair.exchange().context("before the Service")?;
    Ok(pair)
}

impl Far<TcpStream> {
    /// The far end sends first: no packet of the near end tells that it still has the connection.
    fn exchange(&mut self) -> Result<()> {
        let mut byte = [0];
        self.far.write_all(b"x")?;
        self.near.read_exact(&mut byte)?;
        self.near.write_all(b"y")?;
        Ok(self.far.read_exact(&mut byte)?)
    }
}

/// Connects a UDP socket in a namespace to one of the client's, and exchanges a datagram.
fn associated(fixture: &Fixture, from: &Space, own: SocketAddr, to: SocketAddr) -> Result<Far<UdpSocket>> {
    let far = fixture.client_space.inside(|| Ok(UdpSocket::bind(to)?))?;
    let near = from.inside(|| {
        let socket = UdpSocket::bind(own)?;
        socket.connect(to)?;
        Ok(socket)
    })?;
    for socket in [&near, &far] {
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    }
    Ok(Far { near, far })
}

impl Far<UdpSocket> {
    /// Sends a datagram to the far end; returns its source.
    fn send(&self) -> Result<SocketAddr> {
        self.near.send(b"y")?;
        Ok(self.far.recv_from(&mut [0; 8])?.1)
    }

    fn answer(&self, to: SocketAddr) -> Result<()> {
        self.far.send_to(b"x", to)?;
        let length = self.near.recv(&mut [0; 8])?;
        ensure!(length == 1, "{length} bytes");
        Ok(())
    }
}

/// Connections of a masqueraded pod and of the node have the numbers of node ports before the Service exists.
fn older_than_node_port(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    for family in Family::BOTH {
        let name = if family == Family::V4 { "ip" } else { "ip6" };
        let (from, to) = (pod_ip(family, 1), node_port(family, true));
        let rules = format!("meta l4proto tcp {name} saddr {from} snat to {to}\n");
        let chain = format!("chain postrouting {{\ntype nat hook postrouting priority srcnat\n{rules}}}\n");
        nft(&fixture.node, &format!("table {name} numbers {{\n{chain}}}\n"))?;
    }
    let (mut streams, mut of_node) = (Vec::new(), Vec::new());
    for family in Family::BOTH {
        let to = |port| SocketAddr::from((client_ip(family), port));
        let own = (pod_ip(family, 1), 0).into();
        fixture.in_pod_space(1, |pod| {
            streams.push(connected(fixture, pod, own, to(7080))?);
            Ok(())
        })?;
        let socket = associated(fixture, &fixture.node, node_port(family, false), to(7082))?;
        ensure!(socket.send()? == node_port(family, false), "not from the node port's address");
        of_node.push((socket, node_port(family, false)));
    }
    held::put(fixture, &[(0, false)])?;
    held::serve(fixture, 0)?;
    for family in Family::BOTH {
        is_sent_on(fixture, node_port(family, true), SocketKind::Tcp)?;
    }
    let stay = |streams: &mut Vec<Far<TcpStream>>| {
        for stream in streams {
            stream.exchange().with_context(|| format!("TCP of a pod: {:?}", stream.near))?;
        }
        for (socket, source) in &of_node {
            socket.answer(*source).with_context(|| format!("UDP of the node: {:?}", socket.near))?;
        }
        Ok::<_, anyhow::Error>(())
    };
    stay(&mut streams)?;
    fixture.restart()?;
    stay(&mut streams).context("after a restart of the agent")
}

/// A client outside sends from the number of the node port. A server in a pod answers by a socket call to the address that it sees.
fn from_the_node_port(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    held::put(fixture, &[(0, true)])?;
    for family in Family::BOTH {
        fixture.pod(0)?.serve(false, (pod_ip(family, 0), TARGETS[1]).into(), "0")?;
        let to = node_port(family, false);
        let attempt = Attempt { source_port: to.port(), patience: 1, ..Attempt::new(SocketKind::Udp, to) };
        let seen = eventually(SOON, || fixture.client.reach(attempt))?;
        ensure!(seen.client.port() != to.port() && seen.client.ip() != client_ip(family), "{seen:?}");
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
