//! Rollouts of pods that have no readiness probe and do not wait before they end: no client's connection fails.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use super::Case;
use super::exposed::{node_ip, open_up};
use super::socket_lb::attends;
use crate::fixture::{Fixture, SOON, Wish, eventually, nft};
use crate::peer::{Attempt, Load, Peer, SocketKind, Tally};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip, ready_on, service_object, slices, yaml};

const PODS: u8 = 6;
const NUMBER: u8 = 66;
const NODE_PORT: u16 = 30_066;
/// Port of the pods before the rollout; each has a server there.
const OLD: u16 = 8080;
/// Port of the first pod after the rollout.
const NEW: u16 = 7100;
/// How long a new pod does not listen yet.
const STARTS: Duration = Duration::from_millis(500);
/// How long a pod that has ended is still an endpoint.
const LINGERS: Duration = Duration::from_millis(300);

macro_rules! wish {
    ($($flag:literal),*) => {
        Wish {
            pods: PODS + 1,
            services: &[],
            flags: &[
                $($flag,)*
                "--service-cidrs", "10.96.0.0/16,fd96::/112",
                "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
                "--max-flows", "16384", "--max-sockets", "4096",
            ],
        }
    };
}

pub const CASES: &[Case] = &[
    Case { name: "rollout::pods_without_probes_lose_no_connection", wish: wish!(), run: loses_none },
    Case {
        name: "rollout::pods_without_probes_lose_no_connection_with_host_only",
        wish: wish!("--socket-lb", "host-only"),
        run: loses_none,
    },
    Case { name: "rollout::node_without_route_is_served", wish: wish!(), run: without_route },
];

fn load_balancer(family: Family) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, 66].into(),
        Family::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, 66].into(),
    }
}

/// Writes the Service with these endpoints: pods and their ports.
fn put(fixture: &Fixture, endpoints: &[(u8, u16)]) -> Result<()> {
    let spec = json!({
        "type": "LoadBalancer",
        "ports": [{"name": "tcp", "port": 80, "nodePort": NODE_PORT, "protocol": "TCP"}],
    });
    let mut service = service_object("bare", NUMBER, &spec);
    let ingress = Family::BOTH.map(|family| json!({"ip": load_balancer(family)}));
    service["status"] = json!({"loadBalancer": {"ingress": ingress}});
    let slices = endpoints.iter().flat_map(|(pod, port)| {
        let ports = json!([{"name": "tcp", "port": port, "protocol": "TCP"}]);
        slices("bare", &format!("bare-{pod}-{port}"), &ports, |family| {
            vec![ready_on(pod_ip(family, *pod), "node")]
        })
    });
    fixture.folder.put_text("bare", &yaml([service].into_iter().chain(slices)))
}

fn inside() -> Vec<SocketAddr> {
    Family::BOTH.map(|family| (cluster_ip(family, NUMBER), 80).into()).to_vec()
}

fn outside() -> Vec<SocketAddr> {
    let to = |family| [(node_ip(family), NODE_PORT).into(), (load_balancer(family), 80).into()];
    Family::BOTH.into_iter().flat_map(to).collect()
}

fn attempt(to: SocketAddr) -> Attempt {
    Attempt::new(SocketKind::Tcp, to)
}

/// Replaces the pods one after the other: the new one is an endpoint before it listens, the old one after it has ended.
fn roll(fixture: &Fixture) -> Result<()> {
    let mut endpoints: Vec<_> = (0..PODS).map(|pod| (pod, OLD)).collect();
    for pod in 0..PODS {
        let new = NEW + u16::from(pod);
        endpoints.push((pod, new));
        put(fixture, &endpoints)?;
        sleep(STARTS);
        for family in Family::BOTH {
            fixture.pod(pod)?.serve(true, (pod_ip(family, pod), new).into(), &format!("{pod}/{new}"))?;
        }
        sleep(LINGERS);
        // Established connections are finished, as by a server that ends gracefully.
        fixture.in_pod_space(pod, |space| {
            nft(
                space,
                "table inet ended {\n chain in {\n type filter hook input priority 0;\n \
                 tcp dport 8080 tcp flags & (syn | ack) == syn reject with tcp reset\n }\n}\n",
            )
        })?;
        sleep(LINGERS);
        endpoints.retain(|endpoint| *endpoint != (pod, OLD));
        put(fixture, &endpoints)?;
        sleep(LINGERS);
    }
    Ok(())
}

/// Returns what the clients see during a rollout, by their names.
fn during_rollout(fixture: &Fixture) -> Result<Vec<(&'static str, Vec<Tally>)>> {
    attends(fixture)?;
    put(fixture, &(0..PODS).map(|pod| (pod, OLD)).collect::<Vec<_>>())?;
    let pod = fixture.pod(PODS)?;
    let clients: [(_, &Peer, _); 3] = [
        ("a pod", &pod, inside()),
        ("the node", &fixture.local, inside()),
        ("outside", &fixture.client, outside()),
    ];
    for (_, client, to) in &clients {
        for to in to {
            eventually(SOON, || client.reach(attempt(*to)))?;
        }
    }
    for (_, client, to) in &clients {
        let loads: Vec<_> = to.iter().map(|to| Load::new(attempt(*to), false).paced(20)).collect();
        client.load(&loads)?;
    }
    sleep(LINGERS);
    roll(fixture)?;
    clients.into_iter().map(|(name, client, _)| Ok((name, client.stop()?))).collect()
}

fn dropped(fixture: &Fixture) -> Result<u64> {
    Ok(View::open(&fixture.bpffs())?.reasons()?.get(&Reason::RefusalDropped).copied().unwrap_or_default())
}

fn loses_none(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    for (name, tallies) in during_rollout(fixture)? {
        for tally in tallies {
            ensure!(tally.servers.values().sum::<u64>() > 50, "{name}: the load is too small: {tally:?}");
            ensure!(tally.failed == 0 && tally.most_retransmits <= 1, "{name}: {tally:?}");
        }
    }
    ensure!(dropped(fixture)? > 0, "nothing was refused: {}", fixture.reasons());
    Ok(())
}

/// The node has no route to addresses of Services: its sockets are translated, also while endpoints change.
fn without_route(fixture: &Fixture) -> Result<()> {
    for (name, tallies) in during_rollout(fixture)?.into_iter().filter(|(name, _)| *name != "outside") {
        for tally in tallies {
            let refused = tally.failures.iter().all(|(_, why)| why.errno == Some(libc::ECONNREFUSED));
            ensure!(refused && tally.most_retransmits <= 1, "{name}: {tally:?}");
            ensure!(tally.servers.values().sum::<u64>() > 50 && tally.failed < 30, "{name}: {tally:?}");
            ensure!(name == "the node" || tally.failed == 0, "{name}: {tally:?}");
        }
    }
    Ok(())
}
