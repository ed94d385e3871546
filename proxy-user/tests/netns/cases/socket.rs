//! The socket path: a process on the node.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};

use super::{Case, EMPTY, WEB, ensure_sees_orig_dst, pod, udp, vip};
use crate::fixture::{Fixture, SMALL, Wish};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip};

const WISH: Wish = Wish { pods: 2, services: &[WEB, EMPTY], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "socket::reaches_a_pod_and_sees_the_service", wish: WISH, run: reaches },
    Case { name: "socket::calls_to_other_addresses_are_not_translated", wish: WISH, run: untouched },
    Case {
        name: "socket::unconnected_udp_stays_while_its_backend_does",
        wish: Wish { pods: 3, services: &[ONE], flags: SMALL },
        run: stays,
    },
    Case {
        name: "socket::a_connected_udp_socket_may_name_its_peer_again",
        wish: Wish { pods: 2, services: &[TWO], flags: SMALL },
        run: named_again,
    },
];

/// Returns the same address as an IPv6 socket writes it.
fn mapped(addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), addr.port()).into(),
        IpAddr::V6(_) => addr,
    }
}

/// Returns the addresses of the frontends of a Service.
fn orig_dst(service: Service, kind: SocketKind) -> [SocketAddr; 3] {
    let [v4, v6] = Family::BOTH.map(|family| vip(family, service, kind));
    [v4, v6, mapped(v4)]
}

fn reaches(fixture: &Fixture) -> Result<()> {
    for kind in SocketKind::ALL {
        for to in orig_dst(WEB, kind) {
            let attempt = Attempt::new(kind, to);
            let seen = fixture.local.reach(attempt)?;
            let server = if kind.is_tcp() { "0/8080" } else { "0/5353" };
            ensure!(seen.server == server, "{attempt:?}: served by {}", seen.server);
            ensure_sees_orig_dst(&seen, attempt, to)?;
        }
        for to in orig_dst(EMPTY, kind) {
            let failure = fixture.local.fails(Attempt::new(kind, to), libc::ECONNREFUSED)?;
            let call = if kind == SocketKind::Datagram { "sendto" } else { "connect" };
            ensure!(failure.call == call, "{kind:?} to {to}: refused at {}", failure.call);
        }
    }
    for family in Family::BOTH {
        let to = (cluster_ip(family, WEB.number), 7).into();
        let servers =
            SocketKind::ALL.map(|kind| fixture.local.reach(Attempt::new(kind, to)).map(|seen| seen.server));
        let [by_tcp, by_udp, by_datagram] = servers;
        let servers = [by_tcp?, by_udp?, by_datagram?];
        ensure!(servers == ["0/9090", "1/9090", "1/9090"], "one port of two protocols: {servers:?}");
    }
    Ok(())
}

fn untouched(fixture: &Fixture) -> Result<()> {
    for kind in SocketKind::ALL {
        for family in Family::BOTH {
            let to = pod(family, 1, kind);
            for to in [to, mapped(to)] {
                let attempt = Attempt::new(kind, to);
                ensure_sees_orig_dst(&fixture.local.reach(attempt)?, attempt, to)?;
            }
            // A socket that is not translated has no route there.
            fixture.outside.fails(Attempt::new(kind, vip(family, WEB, kind)), libc::ENETUNREACH)?;
            // A port that no Service has.
            let other = (cluster_ip(family, WEB.number), 8080).into();
            fixture.local.fails(Attempt::new(kind, other), libc::ENETUNREACH)?;
        }
    }
    Ok(())
}

const ONE: Service = Service { name: "names", number: 20, ports: &[udp(53, 5353, &[0])] };
const TWO: Service = Service { ports: &[udp(53, 5353, &[0, 1])], ..ONE };
const OTHERS: Service = Service { ports: &[udp(53, 5353, &[1, 2])], ..ONE };

/// Checks that a resolver's socket keeps its server as long as that endpoint exists, whatever else changes.
fn stays(fixture: &Fixture) -> Result<()> {
    let sockets: Vec<_> = (1..).zip(orig_dst(ONE, SocketKind::Datagram)).collect();
    for (id, to) in &sockets {
        fixture.local.open(*id, Attempt::new(SocketKind::Datagram, *to))?;
    }
    let all_hear = |servers: &[&str]| {
        sockets.iter().try_for_each(|(id, to)| {
            let seen = fixture.local.hears(*id, None)?;
            ensure!(servers.contains(&seen.server.as_str()), "{to} moved to {}", seen.server);
            ensure!(seen.from == Some(*to), "{to}: the answer is from {:?}", seen.from);
            Ok(())
        })
    };
    all_hear(&["0/5353"])?;
    fixture.change(TWO, &["0/5353", "1/5353"])?;
    (0..100).try_for_each(|_| all_hear(&["0/5353"]))?;
    fixture.change(OTHERS, &["1/5353", "2/5353"])?;
    all_hear(&["1/5353", "2/5353"])
}

/// A connected UDP socket may name the address to which it is connected, as Envoy's UDP proxy does.
fn named_again(fixture: &Fixture) -> Result<()> {
    for (id, to) in (1..).zip(orig_dst(TWO, SocketKind::Udp)) {
        fixture.local.open(id, Attempt::new(SocketKind::Udp, to))?;
        let server = fixture.local.hears(id, None)?.server;
        for _ in 0..20 {
            let seen = fixture.local.hears(id, Some(to))?;
            ensure!(seen.server == server && seen.from == Some(to), "{to}: {seen:?}, not {server}");
        }
    }
    Ok(())
}
