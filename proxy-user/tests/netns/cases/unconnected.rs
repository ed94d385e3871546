//! UDP sockets that send to several addresses: what the socket programs keep for them, and for how long.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use proxy_common::socket::SOCKET_PEERS;

use super::{Case, pod, udp, vip};
use crate::fixture::{Fixture, Wish};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Port, Service, cluster_ip};

/// One endpoint: after `connect(AF_UNSPEC)`, an IPv6 socket still receives from its former peer only (Linux 6.18).
const ONE: Service = Service { name: "one", number: 63, ports: &[udp(53, 5353, &[1])] };
const THREE: Service = Service { name: "three", number: 60, ports: &[udp(53, 5353, &[0, 1, 2])] };
/// One more port than a socket's storage holds peers.
const PORTS: Service = Service {
    name: "ports",
    number: 61,
    ports: &[
        port("a", 1001),
        port("b", 1002),
        port("c", 1003),
        port("d", 1004),
        port("e", 1005),
        port("f", 1006),
        port("g", 1007),
        port("h", 1008),
        port("i", 1009),
        port("j", 1010),
    ],
};
/// Maps for few sockets.
#[rustfmt::skip]
const FEW_SOCKETS: &[&str] = &[
    "--max-sockets", "512",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384",
];
const WISH: Wish = Wish { pods: 3, services: &[ONE, THREE, PORTS], flags: FEW_SOCKETS };

pub const CASES: &[Case] = &[
    Case { name: "unconnected::short_lived_sockets_move_no_long_lived_one", wish: WISH, run: churn },
    Case { name: "unconnected::a_socket_has_more_services_than_its_storage", wish: WISH, run: many_peers },
    Case { name: "unconnected::a_disconnected_socket_sees_the_endpoint", wish: WISH, run: disconnects },
];

const fn port(name: &'static str, number: u16) -> Port {
    Port { name, is_tcp: false, number, target: 5353, pods: &[0, 1, 2] }
}

/// Long-lived sockets keep endpoint and Service address while many short-lived ones come and go.
fn churn(fixture: &Fixture) -> Result<()> {
    // So many that each of three endpoints is selected.
    const SOCKETS: u32 = 40;

    let long = |id: u32| if id.is_multiple_of(2) { Family::V4 } else { Family::V6 };
    let to = |id| vip(long(id), THREE, SocketKind::Datagram);
    let mut servers = Vec::new();
    for id in 0..SOCKETS {
        fixture.local.open(id, Attempt::new(SocketKind::Datagram, to(id)))?;
        servers.push(fixture.local.hears(id, None)?.server);
    }
    ensure!(servers.iter().collect::<BTreeSet<_>>().len() == 3, "all endpoints serve: {servers:?}");
    for family in Family::BOTH {
        let tally = fixture
            .local
            .many(Attempt::new(SocketKind::Datagram, vip(family, THREE, SocketKind::Datagram)), 3000)?;
        ensure!(tally.failed == 0, "{tally:?}");
    }
    for (id, server) in (0..SOCKETS).zip(&servers) {
        let seen = fixture.local.hears(id, None)?;
        ensure!(seen.server == *server, "socket {id} moved from {server} to {}", seen.server);
        ensure!(seen.from == Some(to(id)), "socket {id}: the answer is from {:?}", seen.from);
    }
    Ok(())
}

/// A socket that sends to more Services than its storage holds keeps endpoint and address for each of them.
fn many_peers(fixture: &Fixture) -> Result<()> {
    ensure!(PORTS.ports.len() > SOCKET_PEERS, "the storage holds them all");
    for (id, family) in (1..).zip(Family::BOTH) {
        let address = |port: &Port| (cluster_ip(family, PORTS.number), port.number).into();
        fixture.local.open(id, Attempt::new(SocketKind::Datagram, address(&PORTS.ports[0])))?;
        let mut servers = Vec::new();
        for round in 0..3 {
            for (place, port) in PORTS.ports.iter().enumerate() {
                let seen = fixture.local.hears(id, Some(address(port)))?;
                ensure!(
                    seen.from == Some(address(port)),
                    "{}: the answer is from {:?}",
                    port.name,
                    seen.from
                );
                if round == 0 {
                    servers.push(seen.server);
                } else {
                    ensure!(seen.server == servers[place], "{} moved to {}", port.name, seen.server);
                }
            }
        }
    }
    Ok(())
}

/// After `connect(AF_UNSPEC)`, and after a datagram to the endpoint itself, the application sees the endpoint's address.
fn disconnects(fixture: &Fixture) -> Result<()> {
    for (id, family) in (1..).zip(Family::BOTH) {
        let service = vip(family, ONE, SocketKind::Udp);
        fixture.local.open(id, Attempt::new(SocketKind::Udp, service))?;
        let seen = fixture.local.hears(id, None)?;
        ensure!(seen.from == Some(service), "{family:?}: connected, the answer is from {:?}", seen.from);
        let number = seen.server.split('/').next().unwrap_or_default().parse()?;
        let endpoint = pod(family, number, SocketKind::Udp);
        fixture.local.disconnect(id)?;
        let seen = fixture.local.hears(id, Some(endpoint))?;
        ensure!(seen.from == Some(endpoint), "{family:?}: the answer of {endpoint} is from {:?}", seen.from);
        // Unconnected: to the Service, directly to the same endpoint, and to the Service again.
        let seen = fixture.local.hears(id, Some(service))?;
        ensure!(seen.from == Some(service), "{family:?}: the answer is from {:?}", seen.from);
        let number = seen.server.split('/').next().unwrap_or_default().parse()?;
        let endpoint = pod(family, number, SocketKind::Udp);
        let seen = fixture.local.hears(id, Some(endpoint))?;
        ensure!(seen.from == Some(endpoint), "{family:?}: the answer of {endpoint} is from {:?}", seen.from);
        let seen = fixture.local.hears(id, Some(service))?;
        ensure!(seen.from == Some(service), "{family:?}: at last, the answer is from {:?}", seen.from);
    }
    Ok(())
}
