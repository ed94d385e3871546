//! One client port, two ways to one endpoint: through a Service and directly. Each answer has to come from the original
//! destination.
//!
//! To add a way to connect, or an order, add a row to a table here; the same test across nodes is in `three_nodes/`.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{NUMBER, is_sent_on, node_port, open_up, put};
use super::{Case, client_ip, pod};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::cluster_ip;

const WISH: Wish = Wish { pods: 1, services: &[], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "shared_port::udp_to_an_endpoint_here", wish: WISH, run: |fixture| udp(fixture, true) },
    Case {
        name: "shared_port::udp_to_an_endpoint_elsewhere",
        wish: WISH,
        run: |fixture| udp(fixture, false),
    },
    Case { name: "shared_port::tcp_by_the_service_first", wish: WISH, run: tcp },
    Case { name: "shared_port::tcp_straight_first", wish: WISH, run: tcp_straight_first },
];

const ROUNDS: usize = 10;

fn begin(fixture: &Fixture, here: bool) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, here)], &json!({}), &[])?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = node_port(family, kind);
            eventually(SOON, || fixture.client.reach(Attempt::new(kind, to)))?;
            if !here {
                is_sent_on(fixture, to, kind)?;
            }
        }
    }
    Ok(())
}

/// Returns an attempt with a short timeout: nothing here takes long, and a wrong answer never comes.
fn attempt(kind: SocketKind, to: SocketAddr, port: u16) -> Attempt {
    Attempt { patience: 5, ..Attempt::new(kind, to).at_port(port) }
}

/// Sends from one socket to three addresses: each of them first, and then in turn.
fn udp(fixture: &Fixture, here: bool) -> Result<()> {
    begin(fixture, here)?;
    let mut wrong = Vec::new();
    for (family, first_port) in Family::BOTH.into_iter().zip([24_000, 24_100]) {
        let kind = SocketKind::Datagram;
        let cluster: SocketAddr = (cluster_ip(family, NUMBER), 53).into();
        let [service, direct] = [node_port(family, kind), pod(family, 0, kind)];
        let orders = [
            ("node port first", vec![service, direct]),
            ("straight first", vec![direct, service]),
            ("cluster address first", vec![cluster, direct]),
            ("all three", vec![service, direct, cluster]),
        ];
        for ((what, order), port) in orders.into_iter().zip(first_port..) {
            let id = u32::from(port);
            fixture.client.open(id, attempt(kind, order[0], port))?;
            for to in order.iter().cycle().take(ROUNDS * order.len()) {
                let heard = fixture.client.talk(id, Some(*to))?;
                let from = heard.as_ref().ok().and_then(|seen| seen.from);
                if from != Some(*to) {
                    wrong.push(format!("{family:?}, {what}: {to} answers from {from:?} ({heard:?})"));
                    break;
                }
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Opens two connections from one port, which are open at the same time.
fn tcp(fixture: &Fixture) -> Result<()> {
    begin(fixture, true)?;
    let mut wrong = Vec::new();
    for (family, port) in Family::BOTH.into_iter().zip([24_200, 24_210]) {
        let order = [node_port(family, SocketKind::Tcp), pod(family, 0, SocketKind::Tcp)];
        let live = || {
            for (id, to) in (u32::from(port)..).zip(order) {
                fixture
                    .client
                    .open(id, attempt(SocketKind::Tcp, to, port))
                    .with_context(|| format!("connects to {to}"))?;
                fixture.client.hears(id, None).with_context(|| format!("asks {to}"))?;
            }
            for id in (u32::from(port)..).take(2).cycle().take(2 * ROUNDS) {
                let seen = fixture.client.hears(id, None)?;
                ensure!(seen.syn_retransmits == 0, "a SYN was lost");
            }
            Ok(())
        };
        if let Err(error) = live() {
            wrong.push(format!("{family:?}: {error:#}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Opens the direct connection first. Only its ends know it, until the endpoint answers the SYN of the connection through the
/// Service with a segment of the direct one. The SYN that the client then retransmits gets another source port.
fn tcp_straight_first(fixture: &Fixture) -> Result<()> {
    begin(fixture, true)?;
    for (family, port) in Family::BOTH.into_iter().zip([24_200, 24_210]) {
        let id = u32::from(port);
        let [service, direct] = [node_port(family, SocketKind::Tcp), pod(family, 0, SocketKind::Tcp)];
        fixture.client.open(id, attempt(SocketKind::Tcp, direct, port))?;
        fixture.client.hears(id, None)?;
        fixture
            .client
            .open(id + 1, attempt(SocketKind::Tcp, service, port))
            .with_context(|| format!("{service} after {direct}"))?;
        for id in [id, id + 1].into_iter().cycle().take(2 * ROUNDS) {
            fixture.client.hears(id, None).with_context(|| format!("{direct} beside {service}"))?;
        }
        // The endpoint sees another client port for the second connection.
        let seen = fixture.client.hears(id + 1, None)?;
        ensure!(seen.client.ip() == client_ip(family) && seen.client.port() != port, "{seen:?}");
    }
    Ok(())
}
