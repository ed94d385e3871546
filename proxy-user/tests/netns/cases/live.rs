//! Changes of a Service while clients use it: type, affinity, policies, and endpoints that terminate.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::exposed::{NODE_PORTS, NUMBER, State, node_ip, node_port, open_up, put, put_in, reach};
use super::{Case, spread};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::cluster_ip;

const WISH: Wish = Wish { pods: 3, services: &[], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "live::the_type_of_a_service_changes", wish: WISH, run: types },
    Case { name: "live::affinity_is_switched_on_and_off", wish: WISH, run: affinity },
    Case { name: "live::endpoints_that_terminate_serve_where_no_other_does", wish: WISH, run: terminating },
    Case { name: "live::health_checks_follow_the_service", wish: WISH, run: health },
];

/// Number of connections: by chance, all of them go to one of two endpoints once in 10^6 times.
const MANY: usize = 20;

fn cluster(family: Family, kind: SocketKind) -> SocketAddr {
    (cluster_ip(family, NUMBER), if kind.is_tcp() { 80 } else { 53 }).into()
}

/// Checks that a client gets no connection: it is refused, or gets no answer.
fn is_closed(client: &Peer, to: SocketAddr) -> Result<()> {
    let outcome = client.once(Attempt::new(SocketKind::Tcp, to).in_vain())?;
    ensure!(outcome.is_err(), "{to} still answers: {outcome:?}");
    Ok(())
}

fn types(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let virtual_ips: [IpAddr; 2] = ["203.0.113.7".parse()?, "fd77::7".parse()?];
    // This connection stays open through all changes.
    put(fixture, &[(0, true)], &json!({}), &[])?;
    eventually(SOON, || reach(fixture, Attempt::new(SocketKind::Tcp, cluster(Family::V4, SocketKind::Tcp))))?;
    fixture.client.open(1, Attempt::new(SocketKind::Tcp, cluster(Family::V4, SocketKind::Tcp)))?;
    let types = ["ClusterIP", "NodePort", "LoadBalancer", "NodePort", "LoadBalancer", "ClusterIP"];
    for (round, kind) in types.into_iter().enumerate() {
        let port = |number: usize| if kind == "ClusterIP" { Value::Null } else { json!(NODE_PORTS[number]) };
        let ingress: &[IpAddr] = if kind == "LoadBalancer" { &virtual_ips } else { &[] };
        let ports = json!([
            {"name": "tcp", "port": 80, "nodePort": port(0), "protocol": "TCP"},
            {"name": "udp", "port": 53, "nodePort": port(1), "protocol": "UDP"},
        ]);
        put(fixture, &[(0, true)], &json!({"type": kind, "ports": ports}), ingress)?;
        for (family, virtual_ip) in Family::BOTH.into_iter().zip(virtual_ips) {
            let place = |error| format!("round {round}, {kind}, {family:?}: {error}");
            eventually(SOON, || match kind {
                "ClusterIP" => is_closed(&fixture.client, node_port(family, SocketKind::Tcp)),
                _ => reach(fixture, Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)))
                    .map(drop),
            })
            .with_context(|| place("node port"))?;
            eventually(SOON, || match kind {
                "LoadBalancer" => {
                    reach(fixture, Attempt::new(SocketKind::Udp, (virtual_ip, 53).into())).map(drop)
                }
                _ => is_closed(&fixture.client, (virtual_ip, 80).into()),
            })
            .with_context(|| place("load balancer"))?;
            for kind in SocketKind::ALL {
                reach(fixture, Attempt::new(kind, cluster(family, kind)))?;
                fixture.local.reach(Attempt::new(kind, cluster(family, kind)))?;
            }
        }
        fixture.client.hears(1, None)?;
    }
    Ok(())
}

fn affinity(fixture: &Fixture) -> Result<()> {
    let on = json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10_800}},
    });
    for (round, spec) in [json!({}), on.clone(), json!({"sessionAffinity": "None"}), on].iter().enumerate() {
        put(fixture, &[(0, true), (1, true)], spec, &[])?;
        let servers = if round % 2 == 0 { 2 } else { 1 };
        for (path, client) in fixture.clients() {
            for family in Family::BOTH {
                for kind in SocketKind::ALL {
                    eventually(SOON, || {
                        let seen = spread(client, Attempt::new(kind, cluster(family, kind)), MANY)?;
                        ensure!(seen.len() == servers, "round {round}, {path} {kind:?}: {seen:?}");
                        Ok(())
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// Policy, endpoints, the pods that serve clients inside, and the pods that serve a client outside at the node port.
type Row<'a> = (&'a Value, &'a [(u8, bool, State)], &'a [&'a str], &'a [&'a str]);

fn terminating(fixture: &Fixture) -> Result<()> {
    use State::{Done, Draining, Ready};
    open_up(fixture)?;
    let local = json!({"externalTrafficPolicy": "Local"});
    let any = json!({});
    let table: [Row<'_>; 6] = [
        (&any, &[(0, true, Ready), (1, true, Draining)], &["0"], &["0"]),
        (&any, &[(0, true, Draining), (1, true, Draining), (2, true, Done)], &["0", "1"], &["0", "1"]),
        (&any, &[(0, true, Done), (1, true, Draining)], &["1"], &["1"]),
        (&local, &[(0, true, Draining), (1, false, Ready)], &["1"], &["0"]),
        (&local, &[(0, true, Ready), (1, true, Draining), (2, false, Ready)], &["0", "2"], &["0"]),
        (&local, &[(0, true, Draining), (1, true, Done), (2, false, Draining)], &["0", "2"], &["0"]),
    ];
    for (row, (spec, pods, inside, outside)) in table.into_iter().enumerate() {
        put_in(fixture, pods, spec, &[])?;
        for family in Family::BOTH {
            for kind in SocketKind::ALL {
                for (who, client, to, expected) in [
                    ("the node", &fixture.local, cluster(family, kind), inside),
                    ("a client outside", &fixture.client, node_port(family, kind), outside),
                ] {
                    let expected: BTreeSet<_> = expected.iter().map(|&pod| pod.to_owned()).collect();
                    eventually(SOON, || {
                        let seen = spread(client, Attempt::new(kind, to), MANY)?;
                        let pods: BTreeSet<_> =
                            seen.iter().filter_map(|name| Some(name.split_once('/')?.0.to_owned())).collect();
                        ensure!(pods == expected, "row {row}, {who}, {kind:?} to {to}: {seen:?}");
                        Ok(())
                    })?;
                }
            }
        }
    }
    // Without any usable endpoint, clients are refused.
    put_in(fixture, &[(0, true, Done)], &any, &[])?;
    for family in Family::BOTH {
        eventually(SOON, || {
            fixture
                .local
                .fails(Attempt::new(SocketKind::Tcp, cluster(family, SocketKind::Tcp)), libc::ECONNREFUSED)?;
            fixture
                .client
                .fails(Attempt::new(SocketKind::Udp, node_port(family, SocketKind::Udp)), libc::ECONNREFUSED)
        })?;
    }
    Ok(())
}

/// Returns what a load balancer outside gets from the health check: status, weight, body.
fn ask(fixture: &Fixture, to: SocketAddr) -> Result<(u16, u64, Value)> {
    let text = fixture.client_space.inside(|| {
        let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(stream, "GET /anything HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })?;
    let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    let weight = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("X-Load-Balancing-Endpoint-Weight").then(|| value.parse().ok())?
    });
    Ok((status, weight.with_context(|| format!("no weight in {head}"))?, serde_json::from_str(body)?))
}

/// Endpoints, and the status and weight that a load balancer gets.
type Round<'a> = (&'a [(u8, bool, State)], u16, u64);

fn health(fixture: &Fixture) -> Result<()> {
    const PORT: u16 = 32_123;
    open_up(fixture)?;
    let spec = json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": PORT});
    let rounds: [Round<'_>; 5] = [
        (&[(0, true, State::Ready)], 200, 1),
        (&[(0, true, State::Ready), (1, true, State::Ready), (2, false, State::Ready)], 200, 2),
        (&[(2, false, State::Ready)], 503, 0),
        (&[(0, true, State::Draining)], 503, 0),
        (&[(0, true, State::Ready)], 200, 1),
    ];
    for (pods, status, weight) in rounds {
        put_in(fixture, pods, &spec, &[])?;
        for family in Family::BOTH {
            let body = json!({
                "service": {"namespace": "default", "name": "open"},
                "localEndpoints": weight,
                "serviceProxyHealthy": true,
            });
            eventually(SOON, || {
                let seen = ask(fixture, (node_ip(family), PORT).into())?;
                ensure!(seen == (status, weight, body.clone()), "{pods:?}: {seen:?}");
                Ok(())
            })?;
        }
    }
    // The port is closed without the policy, and without the Service, and opens again with them.
    let is_open = |open: bool| {
        eventually(SOON, || {
            for family in Family::BOTH {
                let answer = ask(fixture, (node_ip(family), PORT).into());
                ensure!(answer.is_ok() == open, "{family:?}: {answer:?}");
            }
            Ok(())
        })
    };
    put(fixture, &[(0, true)], &json!({}), &[])?;
    is_open(false)?;
    put(fixture, &[(0, true)], &spec, &[])?;
    is_open(true)?;
    fixture.folder.remove("open")?;
    is_open(false)
}
