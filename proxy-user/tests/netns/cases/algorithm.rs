//! Changes of a Service's algorithm and weights while connections are open, and the count of open connections.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Case, packet::WIDE, tcp, udp, vip};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, pod_ip, text_with};
use proxy_user::maps::view::View;

const WISH: Wish = Wish { pods: 2, services: &[WIDE], flags: SMALL };
/// A Service whose endpoints the test itself serves.
const ASKED: Service = Service { name: "asked", number: 32, ports: &[udp(53, 9053, &[0, 1])] };
/// How long a late endpoint takes to answer: less than the longest time that counts.
const LATE: Duration = Duration::from_millis(100);
/// [`SMALL`], with slow start: the share of a new endpoint grows for a while.
#[rustfmt::skip]
const SLOW: &[&str] = &[
    "--slow-start", "30s",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// Longer than the agent takes to confirm that a count is wrong.
const CORRECTED: Duration = Duration::from_mins(1);

pub const CASES: &[Case] = &[
    Case { name: "algorithm::a_change_on_a_live_service_breaks_no_connection", wish: WISH, run: changes },
    Case {
        name: "algorithm::new_connections_go_to_the_endpoint_with_fewer_open_ones",
        wish: WISH,
        run: counts,
    },
    Case { name: "algorithm::the_count_survives_a_restart_and_is_corrected", wish: WISH, run: survives },
    Case {
        name: "algorithm::an_endpoint_that_answers_late_gets_few_connections",
        wish: Wish { services: &[ASKED], ..WISH },
        run: avoids_late,
    },
    Case { name: "algorithm::an_endpoint_starts_slowly", wish: Wish { flags: SLOW, ..WISH }, run: slowly },
];

/// Returns the servers of `count` connections in a row.
fn row(client: &Peer, family: Family, count: usize) -> Result<Vec<String>> {
    let to = Attempt::new(SocketKind::Tcp, vip(family, WIDE, SocketKind::Tcp));
    (0..count).map(|_| Ok(client.reach(to)?.server)).collect()
}

fn annotate(fixture: &Fixture, algorithm: &str, weights: &str) -> Result<()> {
    let annotations = json!({"ballast.io/algorithm": algorithm, "ballast.io/weights": weights});
    let text = text_with(WIDE, &json!({"metadata": {"annotations": annotations}}))?;
    fixture.folder.put_text(WIDE.name, &text)
}

fn changes(fixture: &Fixture) -> Result<()> {
    let mut open = Vec::new();
    for (path, client) in fixture.clients() {
        for family in Family::BOTH {
            let id = open.len() as u32;
            client.open(id, Attempt::new(SocketKind::Tcp, vip(family, WIDE, SocketKind::Tcp)))?;
            let server = client.hears(id, None)?.server;
            open.push((id, path, client, family, server));
        }
    }
    for (algorithm, holds) in [
        ("rr", alternates as fn(&[String]) -> bool),
        ("dh", is_one),
        ("sh", is_one),
        ("wrr", alternates),
        ("mh", is_any),
        ("lc", is_any),
        ("nq", is_any),
        ("latency", is_any),
        ("nonsense", is_any),
        ("random", is_any),
    ] {
        annotate(fixture, algorithm, "")?;
        for (path, client) in fixture.clients() {
            for family in Family::BOTH {
                eventually(SOON, || {
                    let servers = row(client, family, 12)?;
                    ensure!(holds(&servers), "{algorithm}, {path} {family:?}: {servers:?}");
                    Ok(())
                })?;
            }
        }
        for (id, path, client, family, server) in &open {
            let now = client.hears(*id, None)?.server;
            ensure!(now == *server, "{algorithm}, {path} {family:?}: {now}, not {server}");
        }
    }
    weights(fixture)?;
    for (id, _, client, _, server) in &open {
        ensure!(client.hears(*id, None)?.server == *server, "an open connection has moved");
    }
    Ok(())
}

/// Checks two endpoints: with weight 0, one gets no new connections, and with weight 3, three of four.
fn weights(fixture: &Fixture) -> Result<()> {
    let first = Family::BOTH.map(|family| pod_ip(family, 0).to_string());
    annotate(fixture, "wrr", &format!("{}=0, {}=0, *=3", first[0], first[1]))?;
    let (_, client) = fixture.clients().into_iter().next().context("no client")?;
    for family in Family::BOTH {
        eventually(SOON, || {
            let servers = row(client, family, 8)?;
            ensure!(servers.iter().all(|server| server.starts_with("1/")), "{family:?}: {servers:?}");
            Ok(())
        })?;
    }
    annotate(fixture, "wrr", &format!("{}=3, {}=3", first[0], first[1]))?;
    for family in Family::BOTH {
        eventually(SOON, || {
            let servers = row(client, family, 8)?;
            let count = servers.iter().filter(|server| server.starts_with("0/")).count();
            ensure!(count == 6, "{family:?}: {servers:?}");
            Ok(())
        })?;
    }
    Ok(())
}

fn alternates(servers: &[String]) -> bool {
    servers.windows(2).all(|pair| pair[0] != pair[1])
}

fn is_one(servers: &[String]) -> bool {
    servers.iter().collect::<BTreeSet<_>>().len() == 1
}

fn is_any(servers: &[String]) -> bool {
    servers.iter().collect::<BTreeSet<_>>().len() == 2
}

/// Returns the number of open TCP connections by endpoint address; endpoints without any are left out.
fn open(fixture: &Fixture, service: &str) -> Result<BTreeMap<String, u64>> {
    let rows = agent::ask(&fixture.node, &["backend", "list", service], &fixture.bpffs())?;
    let rows = rows["backends"].as_array().context("no list")?;
    let count = |row: &serde_json::Value| {
        let address = row["address"].as_str()?;
        (row["protocol"] == "TCP").then(|| row["open"].as_u64().map(|open| (address.to_owned(), open)))?
    };
    Ok(rows.iter().filter_map(count).filter(|(_, open)| *open > 0).collect())
}

fn is_open(fixture: &Fixture, expected: &[(Family, u8, u64)]) -> Result<()> {
    let address = |family, pod| SocketAddr::new(pod_ip(family, pod), 8080).to_string();
    let expected: BTreeMap<_, _> =
        expected.iter().map(|(family, pod, count)| (address(*family, *pod), *count)).collect();
    eventually(SOON, || {
        let open = open(fixture, WIDE.name)?;
        ensure!(open == expected, "open are {open:?}, not {expected:?}");
        Ok(())
    })
}

/// Opens a connection that stays open; returns the number of its pod.
fn open_one(client: &Peer, id: u32, family: Family) -> Result<u8> {
    client.open(id, Attempt::new(SocketKind::Tcp, vip(family, WIDE, SocketKind::Tcp)))?;
    let server = client.hears(id, None)?.server;
    server.split_once('/').and_then(|(pod, _)| pod.parse().ok()).context("a name without a pod")
}

fn programmed(fixture: &Fixture, algorithm: &str) -> Result<()> {
    eventually(SOON, || {
        let rows = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?;
        let rows = rows["frontends"].as_array().context("no list")?;
        ensure!(rows.iter().all(|row| row["algorithm"] == algorithm), "not all are {algorithm}: {rows:?}");
        Ok(())
    })
}

fn counts(fixture: &Fixture) -> Result<()> {
    for algorithm in ["lc", "wlc", "sed", "nq"] {
        annotate(fixture, algorithm, "")?;
        programmed(fixture, algorithm)?;
        for (path, client) in fixture.clients() {
            for family in Family::BOTH {
                counts_of(fixture, client, family)
                    .with_context(|| format!("{algorithm}, {path}, {family:?}"))?;
            }
        }
    }
    // Sockets that connect again and again, and sockets whose connect fails, leave no count behind either.
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = vip(family, WIDE, kind);
            fixture.local.many(Attempt::new(kind, to), 2_000)?;
        }
    }
    is_open(fixture, &[])
}

/// Checks the counts while one client opens connections, some of which stay open.
fn counts_of(fixture: &Fixture, client: &Peer, family: Family) -> Result<()> {
    is_open(fixture, &[])?;
    let held = open_one(client, 1, family)?;
    let other = 1 - held;
    is_open(fixture, &[(family, held, 1)])?;
    // Short connections all go to the other pod, since each has ended when the next one begins.
    let to = Attempt::new(SocketKind::Tcp, vip(family, WIDE, SocketKind::Tcp));
    for _ in 0..10 {
        let server = client.reach(to)?.server;
        ensure!(server.starts_with(&format!("{other}/")), "{server}, where {held} has an open connection");
        is_open(fixture, &[(family, held, 1)])?;
    }
    let second = open_one(client, 2, family)?;
    ensure!(second == other, "both went to {held}");
    is_open(fixture, &[(family, 0, 1), (family, 1, 1)])?;
    client.close(1)?;
    is_open(fixture, &[(family, other, 1)])?;
    client.close(2)?;
    is_open(fixture, &[])
}

/// With `latency`, the late one of two endpoints gets few flows, also when the other one is late instead.
fn avoids_late(fixture: &Fixture) -> Result<()> {
    let text = text_with(ASKED, &json!({"metadata": {"annotations": {"ballast.io/algorithm": "latency"}}}))?;
    fixture.folder.put_text(ASKED.name, &text)?;
    programmed(fixture, "latency")?;
    for family in Family::BOTH {
        let (late, is_over) = (AtomicU8::new(0), AtomicBool::new(false));
        let bind = |pod| fixture.in_pod(pod, || Ok(UdpSocket::bind((pod_ip(family, pod), 9053))?));
        let servers = [bind(0)?, bind(1)?];
        thread::scope(|scope| {
            for (server, pod) in servers.iter().zip(0..) {
                let (late, is_over) = (&late, &is_over);
                scope.spawn(move || answer(server, pod, late, is_over));
            }
            let run = || {
                for pod in [0, 1] {
                    late.store(pod, Ordering::Relaxed);
                    let seen = fixture
                        .client_space
                        .inside(|| (0..50).map(|_| asks(family)).collect::<Result<Vec<u8>>>())?;
                    let count: usize = seen.iter().map(|seen| usize::from(*seen == pod)).sum();
                    ensure!(count <= 10, "{family:?}: the late endpoint {pod} got {count} of 50: {seen:?}");
                }
                Ok(())
            };
            let result = run();
            is_over.store(true, Ordering::Relaxed);
            result
        })?;
    }
    Ok(())
}

/// Answers datagrams with the number of the pod, late if it is the late one.
fn answer(server: &UdpSocket, pod: u8, late: &AtomicU8, is_over: &AtomicBool) -> Result<()> {
    server.set_read_timeout(Some(Duration::from_millis(100)))?;
    while !is_over.load(Ordering::Relaxed) {
        let Ok((_, client)) = server.recv_from(&mut [0; 16]) else { continue };
        if late.load(Ordering::Relaxed) == pod {
            thread::sleep(LATE);
        }
        server.send_to(&[pod], client)?;
    }
    Ok(())
}

/// Asks the Service from a new port; returns the number of the pod that answers.
fn asks(family: Family) -> Result<u8> {
    let any: IpAddr = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(SOON))?;
    socket.connect(vip(family, ASKED, SocketKind::Udp))?;
    socket.send(b"?")?;
    let mut pod = [0];
    socket.recv(&mut pod)?;
    Ok(pod[0])
}

fn survives(fixture: &Fixture) -> Result<()> {
    annotate(fixture, "lc", "")?;
    programmed(fixture, "lc")?;
    for (client, first) in [(&fixture.local, 0), (&fixture.client, 10)] {
        for id in first..first + 6 {
            open_one(client, id, Family::V4)?;
        }
    }
    let all = [(Family::V4, 0, 6), (Family::V4, 1, 6)];
    is_open(fixture, &all)?;
    fixture.restart()?;
    is_open(fixture, &all)?;
    // Connections end while no agent runs.
    fixture.kill()?;
    for id in 0..6 {
        fixture.local.close(id)?;
    }
    fixture.begin()?;
    is_open(fixture, &[(Family::V4, 0, 3), (Family::V4, 1, 3)])?;
    // The test writes wrong counts, while no connection begins or ends.
    let view = View::open(&fixture.bpffs())?;
    let ids: Vec<u32> = view.recount()?.noted.into_keys().collect();
    ensure!(ids.len() == 2, "{ids:?}");
    view.correct(&[(ids[0], 100), (ids[1], -40)].into())?;
    eventually(CORRECTED, || {
        let noted: Vec<i64> = view.recount()?.noted.into_values().collect();
        ensure!(noted == [3, 3], "{noted:?}");
        Ok(())
    })?;
    // The agent writes the maps before it logs.
    eventually(SOON, || {
        ensure!(fixture.log().contains("corrected the count of open connections"), "the log does not say it");
        Ok(())
    })?;
    // The agent knows the counted sockets besides the flows, so it does not correct their count.
    let third = open_one(&fixture.local, 0, Family::V4)?;
    is_open(fixture, &[(Family::V4, third, 4), (Family::V4, 1 - third, 3)])?;
    thread::sleep(Duration::from_secs(12));
    is_open(fixture, &[(Family::V4, third, 4), (Family::V4, 1 - third, 3)])
}

/// Returns the weights of the endpoints of both pods.
fn weights_of_pods(fixture: &Fixture) -> Result<(u64, u64)> {
    let rows = agent::ask(&fixture.node, &["backend", "list", WIDE.name], &fixture.bpffs())?;
    let rows = rows["backends"].as_array().context("no list")?;
    let weight = |pod| {
        let address = SocketAddr::new(pod_ip(Family::V4, pod), 8080).to_string();
        let row = rows.iter().find(|row| row["address"] == address.as_str() && row["state"] == "active");
        row.context("no such endpoint")?["weight"].as_u64().context("no weight")
    };
    Ok((weight(0)?, weight(1)?))
}

fn slowly(fixture: &Fixture) -> Result<()> {
    const ONE: Service = Service { ports: &[tcp(80, 8080, &[0])], ..WIDE };
    const TWO: Service = Service { ports: &[tcp(80, 8080, &[0, 1])], ..WIDE };
    fixture.change(ONE, &["0/8080"])?;
    fixture.folder.put(TWO)?;
    let mut seen = BTreeSet::new();
    eventually(2 * SOON, || {
        let weights = weights_of_pods(fixture)?;
        seen.insert(weights);
        ensure!(weights == (1, 1) && seen.len() > 1, "{weights:?} still, after {seen:?}");
        Ok(())
    })?;
    ensure!(seen.iter().any(|(old, new)| *old == 10 && *new < 10), "no share was smaller: {seen:?}");
    let steps: BTreeSet<u64> = seen.iter().filter(|(old, _)| *old == 10).map(|(_, new)| *new).collect();
    ensure!(steps.len() >= 5, "the share did not grow: {seen:?}");
    let (_, client) = fixture.clients().into_iter().next().context("no client")?;
    // A newcomer gets no connection for two seconds.
    eventually(SOON, || {
        ensure!(is_any(&row(client, Family::V4, 40)?), "one endpoint serves alone");
        Ok(())
    })
}
