//! Packets that are forwarded under the node's address: as many connections as ports, neighbours that change, and ICMP
//! errors about Services whose ports are in the range of the node's own source ports.
//!
//! Cases about which clients are served, and what an endpoint sees, are in `outside.rs` or `three_nodes/`.

use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{is_sent_on, node_port, open_up, put};
use super::path_mtu::{never_cut, path_mtu};
use super::{Case, held, udp};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use crate::raw;
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip, pod_ip};
use proxy_testbed::space::Space;

const WISH: Wish = Wish { pods: 2, services: &[], flags: SMALL };
/// The port of this Service is one of the node's source ports.
const HIGH: Service = Service { name: "high", number: 45, ports: &[udp(61_005, 7071, &[0])] };

pub const CASES: &[Case] = &[
    Case { name: "forwarding::five_thousand_connections_to_one_endpoint_work", wish: WISH, run: many },
    Case {
        name: "forwarding::new_mac_of_the_next_hop_is_used",
        wish: WISH,
        run: |fixture| neighbour(fixture, Family::V4, false),
    },
    Case {
        name: "forwarding::new_mac_of_the_next_hop_is_used_v6",
        wish: WISH,
        run: |fixture| neighbour(fixture, Family::V6, false),
    },
    Case {
        name: "forwarding::the_stack_notices_a_changed_next_hop",
        wish: WISH,
        run: |fixture| Family::BOTH.into_iter().try_for_each(|family| neighbour(fixture, family, true)),
    },
    Case {
        name: "forwarding::errors_about_a_high_service_port_are_translated",
        wish: Wish { services: &[HIGH], ..WISH },
        run: high_port,
    },
];

fn many(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    held::serve(fixture, 0)?;
    held::put(fixture, &[(0, false)])?;
    for family in Family::BOTH {
        is_sent_on(fixture, held::node_port(family, true), SocketKind::Tcp)?;
    }
    held::hold(fixture, 5_000)?;
    let held = held::nothing_is_lost(fixture, "all at once")?;
    ensure!(held.alive == 10_000, "{held:?}");
    Ok(())
}

/// Sysctls that let the kernel notice a changed neighbour within about two seconds.
const NEIGHBOUR: [(&str, &str); 3] =
    [("base_reachable_time_ms", "1000"), ("delay_first_probe_time", "1"), ("retrans_time_ms", "200")];
/// Timeout of the recovery: several times as long.
const RECOVERS: Duration = Duration::from_secs(15);

/// Gives the pod permanent neighbour entries for the node: a neighbour solicitation would tell the node the pod's new address.
fn knows_the_node(fixture: &Fixture) -> Result<()> {
    let (mac, _) = raw::device(&fixture.node, "p0")?;
    let node: Vec<_> = mac.iter().map(|octet| format!("{octet:02x}")).collect();
    let node = node.join(":");
    let [first, second, third, fourth, fifth, sixth] = mac.map(u16::from);
    let halves = [(first ^ 2) << 8 | second, third << 8 | 0xff, 0xfe00 | fourth, fifth << 8 | sixth];
    let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, halves[0], halves[1], halves[2], halves[3]).to_string();
    let line = |gateway: &str| format!("neigh replace {gateway} lladdr {node} dev eth0 nud permanent\n");
    let lines: String = ["10.99.0.1", "fd99::1", &link_local].into_iter().map(line).collect();
    fixture.in_pod_space(0, |pod| pod.ip(&lines))
}

/// Changes the Ethernet address of the endpoint's machine without an announcement; checks that traffic recovers.
fn neighbour(fixture: &Fixture, family: Family, here: bool) -> Result<()> {
    open_up(fixture)?;
    for version in ["ipv4", "ipv6"] {
        for (name, value) in NEIGHBOUR {
            fixture.node.sysctl(&format!("net/{version}/neigh/p0/{name}"), value)?;
        }
    }
    knows_the_node(fixture)?;
    put(fixture, &[(0, here)], &json!({}), &[])?;
    let to = node_port(family, SocketKind::Udp);
    if !here {
        is_sent_on(fixture, to, SocketKind::Udp)?;
    }
    fixture.client.open(0, Attempt { patience: 1, ..Attempt::new(SocketKind::Udp, to) })?;
    eventually(SOON, || fixture.client.hears(0, None))?;
    // Give the kernel time to find the neighbour stale.
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        eventually(SOON, || fixture.client.hears(0, None))?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let last = if family == Family::V4 { 4 } else { 6 };
    fixture.in_pod_space(0, |pod| pod.ip(&format!("link set eth0 address 02:00:00:00:77:{last:02x}\n")))?;
    let start = Instant::now();
    knows_the_node(fixture)?;
    eventually(RECOVERS, || fixture.client.hears(0, None))?;
    ensure!(start.elapsed() > Duration::from_millis(500), "nothing was lost at all");
    Ok(())
}

/// Returns sockets at both ends of the Service; the endpoint's socket is connected to the client, as the endpoint sees it.
fn pair(fixture: &Fixture, client: &Space, family: Family) -> Result<(UdpSocket, UdpSocket)> {
    let to: SocketAddr = (cluster_ip(family, HIGH.number), 61_005).into();
    let any = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
    // The previous socket may still be closing: see `is_refused`.
    let endpoint =
        eventually(SOON, || fixture.in_pod(0, || Ok(UdpSocket::bind((pod_ip(family, 0), 7071))?)))?;
    let client_socket = client.inside(|| Ok(UdpSocket::bind(any)?))?;
    for socket in [&endpoint, &client_socket] {
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    }
    client_socket.connect(to)?;
    let (mut text, end) = ([0; 16], Instant::now() + SOON);
    loop {
        client_socket.send(b"hello")?;
        match endpoint.recv_from(&mut text) {
            Ok((_, from)) => {
                endpoint.connect(from)?;
                break;
            }
            Err(_) if Instant::now() < end => {}
            Err(error) => return Err(error).context("the Service does not work"),
        }
    }
    endpoint.send(b"hello")?;
    client_socket.recv(&mut text).context("no answer")?;
    Ok((client_socket, endpoint))
}

/// Sends to a closed socket, and checks that the error arrives. This may take a while: if another thread starts a
/// process meanwhile, the child has the closed socket, too, between fork and exec.
fn is_refused(socket: &UdpSocket) -> Result<()> {
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    socket.send(b"anybody?")?;
    let errno = socket.recv(&mut [0; 16]).err().and_then(|error| error.raw_os_error());
    ensure!(errno == Some(libc::ECONNREFUSED), "{errno:?}, not ECONNREFUSED");
    Ok(())
}

fn high_port(fixture: &Fixture) -> Result<()> {
    let far = Space::new("far")?;
    fixture.client_space.join(&far, "f0", "10.97.5", "fd97:5:")?;
    fixture.client_space.ip("link set f0 mtu 1300\n")?;
    fixture.node.ip("route add 10.97.5.0/24 via 10.98.0.2\nroute add fd97:5::/64 via fd98::2\n")?;
    let mut wrong = Vec::new();
    for family in Family::BOTH {
        let mut refused = |what: &str, socket: &UdpSocket| {
            if let Err(error) = eventually(SOON, || is_refused(socket)) {
                wrong.push(format!("{family:?}, {what}: {error:#}"));
            }
        };
        // The endpoint gets an error after the client has closed its socket.
        let (client_socket, endpoint) = pair(fixture, &fixture.client_space, family)?;
        drop(client_socket);
        refused("the client is gone", &endpoint);
        drop(endpoint);
        // The client gets an error after the endpoint has closed its socket.
        let (client_socket, endpoint) = pair(fixture, &fixture.client_space, family)?;
        drop(endpoint);
        refused("the endpoint is gone", &client_socket);
        // The endpoint learns the MTU of the client's link.
        let (_client, endpoint) = pair(fixture, &far, family)?;
        never_cut(&endpoint, family)?;
        endpoint.send(&[b'x'; 1400])?;
        let knows = eventually(Duration::from_secs(5), || {
            let mtu = path_mtu(&endpoint, family)?;
            ensure!(mtu == 1300, "believes in {mtu}");
            Ok(())
        });
        if let Err(error) = knows {
            wrong.push(format!("{family:?}, the path MTU: the endpoint {error:#}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
