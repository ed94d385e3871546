//! Session affinity of sockets: all sockets of a network namespace stay with one endpoint.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Case, tcp, udp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text_with};

const WISH: Wish = Wish { pods: 4, services: &[], flags: SMALL };
const SET: Service =
    Service { name: "sticky", number: 51, ports: &[tcp(80, 8080, &[0, 1, 2]), udp(53, 5353, &[0, 1, 2])] };
const LARGER: Service =
    Service { ports: &[tcp(80, 8080, &[0, 1, 2, 3]), udp(53, 5353, &[0, 1, 2, 3])], ..SET };
const SETS_OF_TWO: [Service; 3] = [
    Service { ports: &[tcp(80, 8080, &[1, 2]), udp(53, 5353, &[1, 2])], ..SET },
    Service { ports: &[tcp(80, 8080, &[0, 2]), udp(53, 5353, &[0, 2])], ..SET },
    Service { ports: &[tcp(80, 8080, &[0, 1]), udp(53, 5353, &[0, 1])], ..SET },
];
/// Number of connections: by chance, all of them go to one of three endpoints once in 10^9 times.
const MANY: usize = 20;

pub const CASES: &[Case] = &[
    Case { name: "affinity::stays_while_the_endpoint_is_in_the_service", wish: WISH, run: stays },
    Case { name: "affinity::expires_after_the_timeout", wish: WISH, run: ends },
];

fn put(fixture: &Fixture, service: Service, seconds: u32) -> Result<()> {
    let spec = json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
    });
    fixture.folder.put_text(service.name, &text_with(service, &json!({ "spec": spec }))?)
}

/// Returns the only server that [`MANY`] connections reach.
fn only(client: &Peer, kind: SocketKind, family: Family) -> Result<String> {
    let attempt = Attempt::new(kind, vip(family, SET, kind));
    let servers = super::spread(client, attempt, MANY)?;
    ensure!(servers.len() == 1, "{kind:?}: {servers:?}");
    Ok(servers.into_iter().collect())
}

fn begin(fixture: &Fixture, seconds: u32) -> Result<()> {
    put(fixture, SET, seconds)?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            eventually(SOON, || fixture.local.reach(Attempt::new(kind, vip(family, SET, kind))))?;
        }
    }
    Ok(())
}

fn stays(fixture: &Fixture) -> Result<()> {
    begin(fixture, 10_800)?;
    let pod = fixture.pod(3)?;
    for client in [&fixture.local, &*pod] {
        for family in Family::BOTH {
            put(fixture, SET, 10_800)?;
            let tcp = only(client, SocketKind::Tcp, family)?;
            // Connected and unconnected sockets count as one client.
            let udp = only(client, SocketKind::Udp, family)?;
            ensure!(udp == only(client, SocketKind::Datagram, family)?, "one port, two endpoints");
            let before = fixture.log().matches("manifests read").count();
            put(fixture, LARGER, 10_800)?;
            eventually(SOON, || {
                ensure!(fixture.log().matches("manifests read").count() > before, "not read");
                Ok(())
            })?;
            for _ in 0..3 {
                ensure!(only(client, SocketKind::Tcp, family)? == tcp, "moved for no reason");
            }
            let number: usize = tcp.split('/').next().unwrap_or_default().parse()?;
            put(fixture, SETS_OF_TWO[number], 10_800)?;
            let moved = eventually(SOON, || {
                let now = only(client, SocketKind::Tcp, family)?;
                ensure!(now != tcp, "still at the endpoint that left");
                Ok(now)
            })?;
            ensure!(only(client, SocketKind::Tcp, family)? == moved, "moves all the time");
        }
    }
    Ok(())
}

fn ends(fixture: &Fixture) -> Result<()> {
    begin(fixture, 1)?;
    let attempt = Attempt::new(SocketKind::Tcp, vip(Family::V4, SET, SocketKind::Tcp));
    let first = fixture.local.reach(attempt)?.server;
    // Each time, another endpoint is selected with a probability of two in three.
    for _ in 0..MANY {
        std::thread::sleep(Duration::from_millis(1_300));
        if fixture.local.reach(attempt)?.server != first {
            return Ok(());
        }
    }
    anyhow::bail!("{MANY} times at {first}, after more than a second each")
}
