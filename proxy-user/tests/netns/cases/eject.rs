//! Passive ejection: endpoints that refuse connections, or do not answer, are skipped, and new ones get a small share first.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use super::{Case, spread, tcp};
use crate::agent::ask;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Load, Peer, SocketKind, Tally};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip, pod_ip, ready, service_object, slices, yaml};

/// A port that pods do not listen on unless a case starts a server.
const LATE: u16 = 7070;
/// One of its two endpoints refuses connections, or does not answer.
const HALF: Service = Service { name: "half", number: 20, ports: &[tcp(80, LATE, &[0, 1])] };
/// Both endpoints accept connections.
const BOTH: Service = Service { name: "both", number: 22, ports: &[tcp(80, 8080, &[0, 1])] };
const ROLLED: u8 = 21;
const PODS: u8 = 6;

pub const CASES: &[Case] = &[
    Case {
        name: "eject::a_rolling_restart_without_probes_fails_few_connections",
        wish: Wish { pods: PODS, services: &[], flags: SMALL },
        run: rolls,
    },
    Case {
        name: "eject::an_endpoint_that_refuses_is_skipped_and_comes_back",
        wish: Wish { pods: 2, services: &[HALF], flags: SMALL },
        run: refuses,
    },
    Case {
        name: "eject::an_endpoint_that_is_silent_is_skipped",
        wish: Wish { pods: 2, services: &[HALF], flags: SMALL },
        run: is_silent,
    },
    Case {
        name: "eject::connections_that_pods_refuse_themselves_eject_nothing",
        wish: Wish { pods: 4, services: &[BOTH], flags: SMALL },
        run: refused_inside,
    },
    Case {
        name: "eject::sockets_of_pods_see_no_refusal_while_endpoints_change",
        wish: Wish { pods: PODS + 1, services: &[], flags: SMALL },
        run: changes,
    },
    Case {
        name: "eject::one_client_alone_skips_for_longer_each_time",
        wish: Wish { pods: 2, services: &[HALF], flags: SMALL },
        run: alone,
    },
];

fn attempt_to(family: Family, number: u8) -> Attempt {
    Attempt::new(SocketKind::Tcp, (cluster_ip(family, number), 80).into())
}

fn serve(fixture: &Fixture, pod: u8, port: u16) -> Result<()> {
    let peer = fixture.pod(pod)?;
    Family::BOTH
        .into_iter()
        .try_for_each(|family| peer.serve(true, (pod_ip(family, pod), port).into(), &format!("{pod}/{port}")))
}

fn count(fixture: &Fixture, reason: Reason) -> Result<u64> {
    Ok(View::open(&fixture.bpffs())?.reasons()?.get(&reason).copied().unwrap_or_default())
}

/// Number of connections that is large enough for each endpoint to be selected.
const MANY: usize = 30;

fn refuses(fixture: &Fixture) -> Result<()> {
    serve(fixture, 1, LATE)?;
    for family in Family::BOTH {
        let to = attempt_to(family, HALF.number);
        eventually(SOON, || fixture.client.reach(to))?;
        // On the packet path, no client notices the refusals. If the first connection above was refused, its client skips
        // the endpoint for some seconds.
        let mut failed = 0;
        let dropped = count(fixture, Reason::RefusalDropped)?;
        eventually(SOON, || {
            let seen = fixture.client.many(to, MANY)?;
            failed += seen.failed;
            ensure!(seen.servers.keys().all(|server| server.starts_with("1/")), "{seen:?}");
            ensure!(
                count(fixture, Reason::RefusalDropped)? > dropped,
                "nothing was refused: {}",
                fixture.reasons()
            );
            Ok(())
        })?;
        ensure!(failed == 0, "{family:?}: {failed} connections failed");
        let before = count(fixture, Reason::EndpointEjected)?;
        ensure!(family == Family::V6 || before == 0, "one client has ejected it: {}", fixture.reasons());
        // A socket sees a refusal once in a while; then the next ones select another endpoint, for one second at most.
        let refused = (0..200).find_map(|_| fixture.local.fails(to, libc::ECONNREFUSED).ok());
        ensure!(refused.is_some(), "{family:?}: no socket was refused");
        eventually(SOON, || {
            // Connections of the packet client and of a socket fail: two clients in a row.
            let failed = fixture.client.many(to, 8)?.failed + fixture.local.many(to, 8)?.failed;
            ensure!(count(fixture, Reason::EndpointEjected)? > before, "{failed}: {}", fixture.reasons());
            Ok(())
        })?;
        let view = View::open(&fixture.bpffs())?;
        eventually(SOON, || {
            let _ = (fixture.client.many(to, 8)?, fixture.local.many(to, 8)?);
            ensure!(!view.ejected()?.is_empty(), "it is not ejected: {}", fixture.reasons());
            Ok(())
        })?;
        let explained = ask(&fixture.node, &["explain", "host", &to.to.to_string()], &fixture.bpffs())?;
        let found = explained["socket"]["steps"].as_array().context("no steps")?;
        let skips = |step: &serde_json::Value| {
            step["rule"] == "ejection" && step["found"].as_str().is_some_and(|text| text.contains("skip"))
        };
        ensure!(found.iter().any(skips), "{explained}");
        // The endpoint listens now, and gets its share again.
        let pod = fixture.pod(0)?;
        pod.serve(true, (pod_ip(family, 0), LATE).into(), "0/late")?;
        eventually(SOON, || {
            for client in [&fixture.client, &fixture.local] {
                let seen = client.many(to, MANY)?;
                ensure!(seen.failed == 0 && seen.servers.len() == 2, "{seen:?}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Tests connections of only one client: the processes of one node, like those that connect to the API servers at an address
/// that Ballast serves.
fn alone(fixture: &Fixture) -> Result<()> {
    /// In this time, failures start a skip of 1 s, of 4 s, and of 16 s.
    const LASTS: Duration = Duration::from_secs(15);
    const MOST: u64 = 3;
    serve(fixture, 0, LATE)?;
    serve(fixture, 1, LATE)?;
    let loads = Family::BOTH.map(|family| Load::new(attempt_to(family, HALF.number), false)).to_vec();
    for load in &loads {
        eventually(SOON, || fixture.client.reach(load.attempt))?;
    }
    let in_pod = |rules: &str| fixture.in_pod_space(0, |space| crate::fixture::nft(space, rules));
    in_pod(
        "table inet refuses {\n chain in {\n type filter hook input priority 0;\n \
         tcp dport 7070 reject with tcp reset\n }\n}\n",
    )?;
    let before = count(fixture, Reason::EndpointEjected)?;
    fixture.local.load(&loads)?;
    sleep(LASTS);
    for tally in fixture.local.stop()? {
        let served: u64 = tally.servers.values().sum();
        ensure!(served > 100 && tally.failed > 0, "the load is too small: {tally:?}");
        ensure!(tally.failed <= MOST, "{} of {} failed: {tally:?}", tally.failed, tally.failed + served);
    }
    ensure!(count(fixture, Reason::EndpointEjected)? == before, "one client has ejected it");
    // The endpoint accepts connections again. Another client still selects it, and the first client learns from its answer.
    in_pod("delete table inet refuses\n")?;
    for load in &loads {
        eventually(Duration::from_secs(5), || {
            for client in [&fixture.client, &fixture.local] {
                let seen = client.many(load.attempt, MANY)?;
                ensure!(seen.failed == 0 && seen.servers.len() == 2, "{seen:?}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Rules inside two pods refuse the pods' own connections, as a sidecar does that does not listen yet.
fn refused_inside(fixture: &Fixture) -> Result<()> {
    let view = View::open(&fixture.bpffs())?;
    let before = count(fixture, Reason::EndpointEjected)?;
    let to = attempt_to(Family::V4, BOTH.number);
    eventually(SOON, || fixture.client.reach(to))?;
    for pod in [2, 3] {
        fixture.pod(pod)?.reach(to)?;
        fixture.in_pod_space(pod, |space| {
            crate::fixture::nft(
                space,
                "table inet refuses {\n chain out {\n type filter hook output priority 0;\n \
                 tcp dport 8080 reject with tcp reset\n }\n}\n",
            )
        })?;
    }
    for _ in 0..20 {
        for pod in [2, 3] {
            fixture.pod(pod)?.fails(to, libc::ECONNREFUSED)?;
        }
    }
    ensure!(view.ejected()?.is_empty(), "{:?}", view.ejected()?);
    ensure!(count(fixture, Reason::EndpointEjected)? == before, "{}", fixture.reasons());
    for client in [&fixture.client, &fixture.local] {
        let seen = client.many(to, MANY)?;
        ensure!(seen.failed == 0 && seen.servers.len() == 2, "{seen:?}");
    }
    Ok(())
}

fn is_silent(fixture: &Fixture) -> Result<()> {
    serve(fixture, 0, LATE)?;
    serve(fixture, 1, LATE)?;
    for family in Family::BOTH {
        let to = attempt_to(family, HALF.number);
        eventually(SOON, || fixture.client.reach(to))?;
    }
    fixture.in_pod_space(0, |space| {
        crate::fixture::nft(
            space,
            "table inet silent {\n chain in {\n type filter hook input priority 0;\n tcp dport 7070 drop\n }\n}\n",
        )
    })?;
    for family in Family::BOTH {
        let to = attempt_to(family, HALF.number);
        eventually(SOON, || fixture.client.reach(to))?;
        for (path, client) in fixture.clients() {
            // On the packet path, a connection to the silent endpoint takes a second longer; on the socket path, it may fail.
            let patient = Attempt { patience: 3, ..to };
            eventually(SOON, || {
                let seen = client.many(patient, 4)?;
                ensure!(seen.failed == 0 && seen.servers.len() == 1, "{path} {family:?}: {seen:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Writes the Service of a Deployment whose pods have these ports.
fn put(fixture: &Fixture, ports: &[u16]) -> Result<()> {
    let spec = json!({"ports": [{"name": "tcp", "port": 80, "protocol": "TCP"}]});
    let service = service_object("rolled", ROLLED, &spec);
    let slices = (0..).zip(ports).flat_map(|(pod, port)| {
        let ports = json!([{"name": "tcp", "port": port, "protocol": "TCP"}]);
        slices("rolled", &format!("rolled-{pod}"), &ports, |family| vec![ready(pod_ip(family, pod))])
    });
    fixture.folder.put_text("rolled", &yaml([service].into_iter().chain(slices)))
}

/// A pod joins, and another one ends before its slices say so, as in a rollout.
fn changes(fixture: &Fixture) -> Result<()> {
    let client = fixture.pod(PODS)?;
    put(fixture, &[8080; PODS as usize - 1])?;
    for family in Family::BOTH {
        eventually(SOON, || client.reach(attempt_to(family, ROLLED)))?;
    }
    put(fixture, &[8080; PODS as usize])?;
    for family in Family::BOTH {
        let last = format!("{}/", PODS - 1);
        eventually(SOON, || {
            let seen = fixture.client.many(attempt_to(family, ROLLED), MANY)?;
            ensure!(seen.servers.keys().any(|server| server.starts_with(&last)), "{seen:?}");
            Ok(())
        })?;
    }
    fixture.in_pod_space(0, |space| {
        crate::fixture::nft(
            space,
            "table inet refuses {\n chain in {\n type filter hook input priority 0;\n \
             tcp dport 8080 reject with tcp reset\n }\n}\n",
        )
    })?;
    for family in Family::BOTH {
        let to = Attempt { patience: 4, ..attempt_to(family, ROLLED) };
        let seen = client.many(to, MANY)?;
        ensure!(seen.failed == 0, "{family:?}: {seen:?}");
        ensure!(seen.servers.keys().all(|server| !server.starts_with("0/")), "{family:?}: {seen:?}");
    }
    ensure!(count(fixture, Reason::RefusalDropped)? > 0, "nothing was refused: {}", fixture.reasons());
    Ok(())
}

/// How long a new pod does not listen yet, and the time until the next pod is replaced.
const STARTS: Duration = Duration::from_millis(700);
const NEXT: Duration = Duration::from_millis(500);

/// Replaces six pods, one after the other, by pods that do not listen yet. Returns what clients saw by sockets and by packets.
fn roll(fixture: &Fixture, first: u16) -> Result<[Tally; 2]> {
    let mut ports = vec![8080; usize::from(PODS)];
    put(fixture, &ports)?;
    for family in Family::BOTH {
        for (_, client) in fixture.clients() {
            eventually(SOON, || client.reach(attempt_to(family, ROLLED)))?;
        }
    }
    let loads: Vec<_> =
        Family::BOTH.map(|family| Load::new(attempt_to(family, ROLLED), false).paced(5)).to_vec();
    let begin = |client: &Peer| client.load(&loads);
    begin(&fixture.local)?;
    begin(&fixture.client)?;
    sleep(NEXT);
    for pod in 0..PODS {
        let port = first + u16::from(pod);
        ports[usize::from(pod)] = port;
        put(fixture, &ports)?;
        sleep(STARTS);
        serve(fixture, pod, port)?;
        sleep(NEXT);
    }
    let end = |client: &Peer| -> Result<Tally> {
        let mut sum = Tally::default();
        for tally in client.stop()? {
            sum.failed += tally.failed;
            sum.failures.extend(tally.failures);
            tally
                .servers
                .into_iter()
                .for_each(|(server, count)| *sum.servers.entry(server).or_default() += count);
        }
        Ok(sum)
    };
    Ok([end(&fixture.local)?, end(&fixture.client)?])
}

fn rolls(fixture: &Fixture) -> Result<()> {
    let [sockets, packets] = roll(fixture, 7100)?;
    let served = |tally: &Tally| tally.servers.values().sum::<u64>();
    ensure!(served(&sockets) > 100 && served(&packets) > 100, "{sockets:?}, {packets:?}");
    ensure!(packets.failed == 0, "refusals of one endpoint reached a client: {packets:?}");
    // Every new endpoint gets its share.
    for port in 7100..7100 + u16::from(PODS) {
        eventually(SOON, || {
            let seen = spread(&fixture.client, attempt_to(Family::V4, ROLLED), 4 * usize::from(PODS))?;
            ensure!(seen.iter().any(|server| server.ends_with(&port.to_string())), "{port}: {seen:?}");
            Ok(())
        })?;
    }
    fixture.setup().flags.extend(["--ejection", "off"].map(str::to_owned));
    fixture.restart()?;
    let [without_ejection, by_packets] = roll(fixture, 7200)?;
    ensure!(by_packets.failed > 0, "without ejection no packet was refused: {by_packets:?}");
    let text = |tally: &Tally| format!("{} of {} failed", tally.failed, tally.failed + served(tally));
    // The share of failed connections is at most a third of that without ejection, compared as products.
    let [with, without] = [(&sockets, &without_ejection), (&without_ejection, &sockets)]
        .map(|(of, by)| of.failed * (by.failed + served(by)));
    ensure!(3 * with <= without, "by sockets {}, without {}", text(&sockets), text(&without_ejection));
    Ok(())
}
