//! Passive ejection through node ports, with clients outside: Services whose endpoints all refuse, and clients whose packets
//! to an endpoint are dropped.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::{Value, json};

use super::{Case, tcp};
use crate::agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, pod_ip, text_with};

/// A port that pods do not listen on unless a case starts a server.
const LATE: u16 = 7071;
const TWO: Service = Service { name: "two", number: 22, ports: &[tcp(80, LATE, &[0, 1])] };
const THREE: Service = Service { name: "three", number: 23, ports: &[tcp(80, LATE, &[0, 1, 2])] };
const SIX: Service = Service { name: "six", number: 24, ports: &[tcp(80, LATE, &[0, 1, 2, 3, 4, 5])] };
const STICKY: Service = Service { name: "sticky", number: 25, ports: &[tcp(80, LATE, &[0, 1])] };
/// A client that waits for the second SYN has waited for a second; more is for a busy machine.
const ONE_BACKOFF: Duration = Duration::from_millis(2_900);

pub const CASES: &[Case] = &[
    Case {
        name: "eject::service_whose_endpoints_all_refuse_is_refused",
        wish: Wish { pods: 6, services: &[], flags: SMALL },
        run: all_refuse,
    },
    Case {
        name: "eject::denied_clients_change_nothing_for_others",
        wish: Wish { pods: 5, services: &[], flags: SMALL },
        run: denied,
    },
];

/// Adds a node port to a Service.
#[expect(clippy::needless_pass_by_value, reason = "callers build the value in place")]
fn put(fixture: &Fixture, service: Service, node_port: u16, more: Value) -> Result<()> {
    let mut spec = json!({"type": "NodePort", "ports": [{ "nodePort": node_port }]});
    proxy_testbed::manifest::merge(&mut spec, &more);
    fixture.folder.put_text(service.name, &text_with(service, &json!({ "spec": spec }))?)
}

/// An attempt to a node port from outside.
fn to_node(family: Family, node_port: u16) -> Attempt {
    let node: IpAddr = match family {
        Family::V4 => [10, 98, 0, 1].into(),
        Family::V6 => [0xfd98, 0, 0, 0, 0, 0, 0, 1].into(),
    };
    Attempt::new(SocketKind::Tcp, SocketAddr::new(node, node_port))
}

fn serve(fixture: &Fixture, pod: u8) -> Result<()> {
    let peer = fixture.pod(pod)?;
    Family::BOTH
        .into_iter()
        .try_for_each(|family| peer.serve(true, (pod_ip(family, pod), LATE).into(), &format!("{pod}/late")))
}

/// Checks that connections of a client are refused, each within a time. The machine may pause during one of them.
fn is_refused(client: &Peer, to: Attempt, limit: Duration) -> Result<()> {
    let mut late = Vec::new();
    for _ in 0..10 {
        let begun = Instant::now();
        client.fails(to, libc::ECONNREFUSED)?;
        late.extend(Some(begun.elapsed()).filter(|took| *took >= limit));
    }
    ensure!(late.len() <= 1, "{to:?}: refused after {late:?}");
    Ok(())
}

fn all_refuse(fixture: &Fixture) -> Result<()> {
    let (_space, late) = fixture.add_client()?;
    for (service, node_port) in [(TWO, 30_072), (THREE, 30_073), (SIX, 30_076)] {
        put(fixture, service, node_port, json!({}))?;
        for family in Family::BOTH {
            let to = to_node(family, node_port);
            // Before the Service is programmed, the node itself refuses the connection; if that happens in the same moment, its RST
            // counts as a packet of a process at the node port and gets another source port, and the client sends its SYN again.
            eventually(SOON, || {
                let list = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?.to_string();
                ensure!(list.contains(&node_port.to_string()), "not programmed: {list}");
                fixture.client.fails(to, libc::ECONNREFUSED)
            })?;
            for client in [&fixture.client, &late] {
                is_refused(client, to, Duration::from_millis(900))?;
            }
        }
    }
    let hidden = |fixture: &Fixture| count(fixture, Reason::RefusalDropped);
    ensure!(hidden(fixture)? == 0, "refusals were hidden: {}", fixture.reasons());
    // The endpoints have answered lately, and then all refuse.
    (0..6).try_for_each(|pod| serve(fixture, pod))?;
    for family in Family::BOTH {
        let to = to_node(family, 30_076);
        eventually(SOON, || {
            let seen = fixture.client.many(to, 40)?;
            ensure!(seen.failed == 0 && seen.servers.len() == 6, "{seen:?}");
            Ok(())
        })?;
    }
    for pod in 0..6 {
        fixture.in_pod_space(pod, |space| {
            nft(
                space,
                "table inet refuses {\n chain in {\n type filter hook input priority 0;\n \
                 tcp dport 7071 reject with tcp reset\n }\n}\n",
            )
        })?;
    }
    for family in Family::BOTH {
        for client in [&fixture.client, &late] {
            is_refused(client, to_node(family, 30_076), ONE_BACKOFF)?;
        }
    }
    ensure!(hidden(fixture)? > 0, "no refusal was hidden: {}", fixture.reasons());
    Ok(())
}

fn count(fixture: &Fixture, reason: Reason) -> Result<u64> {
    Ok(View::open(&fixture.bpffs())?.reasons()?.get(&reason).copied().unwrap_or_default())
}

/// Three clients are denied at the first endpoint: two pods, and a host outside.
fn denied(fixture: &Fixture) -> Result<()> {
    let (_space, host) = fixture.add_client()?;
    (0..2).try_for_each(|pod| serve(fixture, pod))?;
    put(fixture, TWO, 30_072, json!({}))?;
    put(fixture, STICKY, 30_075, json!({"sessionAffinity": "ClientIP"}))?;
    for family in Family::BOTH {
        for node_port in [30_072, 30_075] {
            eventually(SOON, || fixture.client.reach(to_node(family, node_port)))?;
        }
    }
    let sources = |family: Family| {
        let pods = [2, 3].map(|pod| pod_ip(family, pod).to_string()).join(", ");
        let host = if family == Family::V4 { "10.97.0.0/24" } else { "fd97::/16" };
        format!("{{ {pods}, {host} }}")
    };
    let rules = format!(
        "table inet policies {{\n chain in {{\n type filter hook input priority 0;\n \
         ip saddr {} tcp dport {LATE} drop\n ip6 saddr {} tcp dport {LATE} drop\n }}\n}}\n",
        sources(Family::V4),
        sources(Family::V6)
    );
    let stays: Vec<_> = Family::BOTH
        .into_iter()
        .map(|family| fixture.client.reach(to_node(family, 30_075)).map(|seen| seen.server))
        .collect::<Result<_>>()?;
    for pod in 0..2 {
        if stays.iter().any(|server| server.starts_with(&format!("{pod}/"))) {
            fixture.in_pod_space(pod, |space| nft(space, &rules))?;
            break;
        }
    }
    let (two, three) = (fixture.pod(2)?, fixture.pod(3)?);
    for (family, server) in Family::BOTH.into_iter().zip(&stays) {
        for client in [&*two, &*three, &host] {
            for node_port in [30_072, 30_075] {
                for _ in 0..4 {
                    // The client may be served by the other endpoint, or not at all.
                    let _ = client.once(Attempt { patience: 2, ..to_node(family, node_port) })?;
                }
            }
        }
        ensure!(count(fixture, Reason::EndpointEjected)? == 0, "{}", fixture.reasons());
        ensure!(View::open(&fixture.bpffs())?.ejected()?.is_empty(), "an endpoint is ejected");
        // Another client stays with its endpoint, and selects each of them at once.
        for _ in 0..5 {
            let seen = fixture.client.reach(to_node(family, 30_075))?;
            ensure!(&seen.server == server, "{family:?}: moved from {server} to {}", seen.server);
        }
        let seen = fixture.client.many(to_node(family, 30_072), 30)?;
        ensure!(seen.failed == 0 && seen.servers.len() == 2 && seen.syn_retransmits == 0, "{seen:?}");
        one_lost_syn(fixture, family, server)?;
    }
    Ok(())
}

/// One SYN of a client with session affinity is lost on its way to the endpoint.
fn one_lost_syn(fixture: &Fixture, family: Family, server: &str) -> Result<()> {
    let pod: u8 = server.split('/').next().unwrap_or_default().parse()?;
    let (ip, client) = if family == Family::V4 { ("ip", "10.98.0.0/16") } else { ("ip6", "fd98::/16") };
    let rule = format!(
        "table inet loss {{\n chain in {{\n type filter hook input priority -1;\n {ip} saddr {client} \
         tcp dport {LATE} tcp flags syn limit rate 1/day burst 1 packets drop\n }}\n}}\n"
    );
    fixture.in_pod_space(pod, |space| nft(space, &rule))?;
    let first = fixture.client.reach(to_node(family, 30_075))?;
    ensure!(first.syn_retransmits > 0, "no SYN was lost: {first:?}");
    for seen in [first, fixture.client.reach(to_node(family, 30_075))?] {
        ensure!(seen.server == server, "{family:?}: moved from {server} to {}", seen.server);
    }
    fixture.in_pod_space(pod, |space| nft(space, "delete table inet loss\n"))
}
