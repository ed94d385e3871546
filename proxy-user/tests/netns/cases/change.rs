//! Endpoints are added and removed.

use anyhow::{Result, ensure};

use super::{Case, packet::WIDE, tcp, udp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::Service;

const WISH: Wish = Wish { pods: 2, services: &[WIDE], flags: SMALL };
const FIRST: Service = Service { ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])], ..WIDE };
const SECOND: Service = Service { ports: &[tcp(80, 8080, &[1]), udp(53, 5353, &[1])], ..WIDE };
/// The pod of [`FIRST`], with other target ports.
const RENUMBERED: Service = Service { ports: &[tcp(80, 9090, &[0]), udp(53, 9090, &[0])], ..WIDE };
const EMPTY: Service = Service { ports: &[tcp(80, 8080, &[]), udp(53, 5353, &[])], ..WIDE };

pub const CASES: &[Case] = &[
    Case { name: "change::new_connections_go_to_the_new_set_only", wish: WISH, run: new_set },
    Case {
        name: "change::tcp_drains_and_udp_moves",
        wish: WISH,
        run: |fixture| drains(fixture, SECOND, "1/8080", "1/5353"),
    },
    Case {
        name: "change::another_target_port_of_the_same_pod_is_another_endpoint",
        wish: WISH,
        run: |fixture| drains(fixture, RENUMBERED, "0/9090", "0/9090"),
    },
    Case { name: "change::service_without_endpoints_is_refused_until_one_returns", wish: WISH, run: zero },
    Case { name: "change::a_deleted_service_keeps_its_connections", wish: WISH, run: deleted },
];

/// Opens a socket of each kind for each path and family; returns their ids.
fn open(fixture: &Fixture, service: Service) -> Result<Vec<(u32, SocketKind, &'static str, Family)>> {
    let mut sockets = Vec::new();
    for (path, client) in fixture.clients() {
        for family in Family::BOTH {
            for kind in SocketKind::ALL {
                let id = sockets.len() as u32;
                client.open(id, Attempt::new(kind, vip(family, service, kind)))?;
                client.hears(id, None)?;
                sockets.push((id, kind, path, family));
            }
        }
    }
    Ok(sockets)
}

/// Whether the agent ends the socket when its endpoint is removed: a connected UDP socket of the socket path (see
/// `stale_sockets.rs`).
fn is_ended((_, kind, path, _): &(u32, SocketKind, &'static str, Family)) -> bool {
    *kind == SocketKind::Udp && *path == "socket"
}

fn talk(fixture: &Fixture, path: &str, id: u32) -> Result<String> {
    let client = if path == "socket" { &fixture.local } else { &fixture.client };
    Ok(client.hears(id, None)?.server)
}

fn new_set(fixture: &Fixture) -> Result<()> {
    for (service, servers) in [
        (FIRST, &["0/8080"][..]),
        (SECOND, &["1/8080"]),
        (WIDE, &["0/8080", "1/8080"]),
        (SECOND, &["1/8080"]),
    ] {
        fixture.change(service, servers)?;
    }
    Ok(())
}

/// Replaces the endpoints by those of `to`: TCP connections stay with the first endpoint, and UDP moves.
fn drains(fixture: &Fixture, to: Service, by_tcp: &str, by_udp: &str) -> Result<()> {
    fixture.change(FIRST, &["0/8080"])?;
    let sockets = open(fixture, WIDE)?;
    fixture.change(to, &[by_tcp])?;
    for (id, kind, path, family) in sockets.into_iter().filter(|socket| !is_ended(socket)) {
        let server = talk(fixture, path, id)?;
        let expected = if kind.is_tcp() { "0/8080" } else { by_udp };
        ensure!(server == expected, "{kind:?} {path} {family:?}: {server}, not {expected}");
    }
    Ok(())
}

fn is_refused(fixture: &Fixture) -> Result<()> {
    for (_, client) in fixture.clients() {
        for family in Family::BOTH {
            for kind in [SocketKind::Tcp, SocketKind::Udp] {
                client.fails(Attempt::new(kind, vip(family, WIDE, kind)), libc::ECONNREFUSED)?;
            }
        }
    }
    Ok(())
}

fn zero(fixture: &Fixture) -> Result<()> {
    let sockets = open(fixture, WIDE)?;
    fixture.folder.put(EMPTY)?;
    eventually(SOON, || is_refused(fixture))?;
    for (id, _, path, _) in sockets.iter().filter(|(_, kind, ..)| kind.is_tcp()) {
        talk(fixture, path, *id)?;
    }
    fixture.change(WIDE, &["0/8080", "1/8080"])?;
    for (id, _, path, _) in sockets.into_iter().filter(|socket| !is_ended(socket)) {
        talk(fixture, path, id)?;
    }
    Ok(())
}

fn deleted(fixture: &Fixture) -> Result<()> {
    let sockets = open(fixture, WIDE)?;
    let tcp: Vec<_> = sockets.iter().filter(|(_, kind, ..)| kind.is_tcp()).collect();
    fixture.folder.remove(WIDE.name)?;
    eventually(SOON, || {
        for (path, client) in fixture.clients() {
            for family in Family::BOTH {
                let outcome =
                    client.once(Attempt::new(SocketKind::Tcp, vip(family, WIDE, SocketKind::Tcp)))?;
                // The node has no route to an address that no host has.
                let is_gone = outcome.as_ref().is_err_and(|failure| {
                    [Some(libc::ENETUNREACH), Some(libc::EHOSTUNREACH)].contains(&failure.errno)
                });
                ensure!(is_gone, "{path}: {outcome:?}");
            }
        }
        Ok(())
    })?;
    (0..5).try_for_each(|_| tcp.iter().try_for_each(|(id, _, path, _)| talk(fixture, path, *id).map(drop)))
}
