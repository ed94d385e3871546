//! The packet path: a client in a namespace, whose sockets are not translated.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Context as _, Result, ensure};

use super::exposed::open_up;
use super::{Case, EMPTY, WEB, client_ip, ensure_sees_orig_dst, pod, spread, tcp, udp, vip};
use crate::fixture::{Fixture, SMALL, Wish};
use crate::peer::{Attempt, Close, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, pod_ip};

/// The next source port; only [`reaches`] uses these ports.
static PORT: AtomicU16 = AtomicU16::new(21_000);

const WISH: Wish = Wish { pods: 2, services: &[WEB, EMPTY, WIDE, TWIN], flags: SMALL };
/// [`SMALL`], without TCX.
#[rustfmt::skip]
pub const CLSACT: &[&str] = &[
    "--packet-hook", "clsact",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// A Service with two pods.
pub const WIDE: Service =
    Service { name: "wide", number: 30, ports: &[tcp(80, 8080, &[0, 1]), udp(53, 5353, &[0, 1])] };
/// A Service with the same pod as [`WEB`].
const TWIN: Service =
    Service { name: "twin", number: 31, ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])] };

pub const CASES: &[Case] = &[
    Case { name: "packet::reaches_pods_and_sees_the_service", wish: WISH, run: reaches },
    Case { name: "packet::no_endpoint_is_refused_at_once", wish: WISH, run: refuses },
    Case { name: "packet::one_client_port_to_two_services_of_one_pod", wish: WISH, run: collides },
    Case { name: "packet::a_client_port_is_used_again_and_again", wish: WISH, run: again },
    Case { name: "packet::datagram_of_the_node_waits_for_the_neighbour", wish: WISH, run: waits },
    Case { name: "packet::reaches_pods_by_clsact", wish: Wish { flags: CLSACT, ..WISH }, run: by_clsact },
];

fn reaches(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let to = vip(family, WEB, kind);
            for size in [10, 1400] {
                // The client's port would not be kept if a flow to another Service had it.
                let port = PORT.fetch_add(1, Ordering::Relaxed);
                let attempt = Attempt::new(kind, to).size(size).at_port(port);
                let seen = fixture.client.reach(attempt)?;
                ensure_sees_orig_dst(&seen, attempt, to)?;
                ensure!(seen.client.ip() == client_ip(family), "the pod saw {}", seen.client);
                ensure!(seen.client == (client_ip(family), seen.local.port()).into(), "{seen:?}");
            }
            let wide = spread(&fixture.client, Attempt::new(kind, vip(family, WIDE, kind)), 32)?;
            let port = if kind.is_tcp() { 8080 } else { 5353 };
            ensure!(wide == BTreeSet::from([format!("0/{port}"), format!("1/{port}")]), "{kind:?}: {wide:?}");
            let direct = Attempt::new(kind, pod(family, 1, kind));
            ensure_sees_orig_dst(&fixture.client.reach(direct)?, direct, direct.to)?;
        }
        // More data than one segment can hold.
        fixture
            .client
            .reach(Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp)).size(1_000_000))?;
    }
    Ok(())
}

/// A datagram is not retransmitted.
fn waits(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Udp, vip(family, WEB, SocketKind::Udp));
        // The gateway of the route to the Service address is resolved afterwards.
        fixture.outside.reach(attempt)?;
        fixture.node.ip(&format!("neigh flush to {} nud all\n", pod_ip(family, 0)))?;
        fixture.outside.reach(attempt).with_context(|| format!("{family:?}, without the neighbour"))?;
    }
    Ok(())
}

fn refuses(fixture: &Fixture) -> Result<()> {
    refuses_all(fixture)?;
    // Without offloads, the kernel completes the checksums of the answers, and then the client's packets arrive with theirs.
    for (space, device) in [(&fixture.node, "c0"), (&fixture.client_space, "eth0")] {
        let output = space.command("ethtool").args(["-K", device, "tx", "off"]).output();
        let output = output.map_err(|error| anyhow::anyhow!("ethtool (apt-get install ethtool): {error}"))?;
        ensure!(output.status.success(), "ethtool: {}", String::from_utf8_lossy(&output.stderr));
        refuses_all(fixture).with_context(|| format!("{device} without offloads"))?;
    }
    reaches(fixture)
}

fn refuses_all(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        for (kind, size, call) in [
            (SocketKind::Tcp, 10, "connect"),
            (SocketKind::Udp, 10, "recvfrom"),
            (SocketKind::Udp, 1400, "recvfrom"),
        ] {
            let attempt = Attempt::new(kind, vip(family, EMPTY, kind)).size(size);
            let failure = fixture.client.fails(attempt, libc::ECONNREFUSED)?;
            ensure!(failure.call == call, "{attempt:?}: refused at {}", failure.call);
        }
    }
    Ok(())
}

/// Opens connections from one client port to two Services of one pod: for the pod, both would have the same address and port.
fn collides(fixture: &Fixture) -> Result<()> {
    for (index, family) in (0..).zip(Family::BOTH) {
        let (port, first) = (25_000 + index, 10 * u32::from(index));
        for (id, service) in [(first, WEB), (first + 1, TWIN)] {
            fixture.client.open(
                id,
                Attempt::new(SocketKind::Tcp, vip(family, service, SocketKind::Tcp)).at_port(port),
            )?;
        }
        // One socket for two Services.
        let both = first + 2;
        fixture.client.open(
            both,
            Attempt::new(SocketKind::Datagram, vip(family, WEB, SocketKind::Datagram)).at_port(port),
        )?;
        for _ in 0..20 {
            let seen = [fixture.client.hears(first, None)?, fixture.client.hears(first + 1, None)?];
            ensure!(seen[0].client != seen[1].client, "the pod sees one client: {seen:?}");
            for (seen, service) in seen.iter().zip([WEB, TWIN]) {
                ensure!(seen.client.ip() == client_ip(family), "{seen:?}");
                ensure!(seen.peer == Some(vip(family, service, SocketKind::Tcp)), "{seen:?}");
            }
            for service in [WEB, TWIN] {
                let to = vip(family, service, SocketKind::Datagram);
                let from = fixture.client.hears(both, Some(to))?.from;
                ensure!(from == Some(to), "{to} answers from {from:?}");
            }
        }
    }
    Ok(())
}

/// Uses one client port again and again: the pods may still know the previous connection when the next one comes.
fn again(fixture: &Fixture) -> Result<()> {
    for (index, family) in (0..).zip(Family::BOTH) {
        for (port, close) in [(26_000, Close::Reset), (26_010, Close::Server)] {
            let to = vip(family, WIDE, SocketKind::Tcp);
            let attempt = Attempt::new(SocketKind::Tcp, to).at_port(port + index).close(close);
            (0..200).try_for_each(|_| ensure_sees_orig_dst(&fixture.client.reach(attempt)?, attempt, to))?;
        }
    }
    Ok(())
}

fn by_clsact(fixture: &Fixture) -> Result<()> {
    let log = fixture.log();
    ensure!(log.contains("tcx=false"), "not by clsact");
    reaches(fixture)?;
    refuses_all(fixture)?;
    fixture.restart()?;
    reaches(fixture)
}
