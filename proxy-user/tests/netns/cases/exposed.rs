//! A Service of type LoadBalancer, and a node with an uplink.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use proxy_user::maps::view::View;
use serde_json::{Value, json};

use super::ensure_sees_orig_dst;
use crate::fixture::{Fixture, SOON, eventually};
use crate::peer::{Attempt, Seen, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{pod_ip, service_object, slices, tcp_and_udp, yaml};

pub const NODE_PORTS: [u16; 2] = [30_080, 30_053];
pub const NUMBER: u8 = 40;
/// Name of the Service's file in the folder.
pub const FILE: &str = "open";

/// State of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    /// The endpoint terminates, and still serves.
    Draining,
    /// The endpoint terminates, and no longer serves.
    Done,
}

/// Writes a Service of type LoadBalancer in both families, TCP and UDP, with these endpoints: number of the pod, and whether the
/// slice says that it is on this node. `spec` is merged into the Service; `ingress` are its load balancer addresses.
pub fn put(fixture: &Fixture, pods: &[(u8, bool)], spec: &Value, ingress: &[IpAddr]) -> Result<()> {
    let pods: Vec<_> = pods.iter().map(|(pod, here)| (*pod, *here, State::Ready)).collect();
    put_in(fixture, &pods, spec, ingress)
}

/// Like [`put`], with endpoints in any state.
pub fn put_in(fixture: &Fixture, pods: &[(u8, bool, State)], spec: &Value, ingress: &[IpAddr]) -> Result<()> {
    fixture.folder.put_text(FILE, &text(pods, spec, ingress))
}

/// Returns the text that [`put_in`] writes.
pub fn text(pods: &[(u8, bool, State)], spec: &Value, ingress: &[IpAddr]) -> String {
    let ports = json!([
        {"name": "tcp", "port": 80, "nodePort": NODE_PORTS[0], "protocol": "TCP"},
        {"name": "udp", "port": 53, "nodePort": NODE_PORTS[1], "protocol": "UDP"},
    ]);
    let mut service = service_object(FILE, NUMBER, &json!({"type": "LoadBalancer", "ports": ports}));
    for (key, value) in spec.as_object().into_iter().flatten() {
        service["spec"][key] = value.clone();
    }
    let ingress: Vec<_> = ingress.iter().map(|ip| json!({"ip": ip})).collect();
    service["status"] = json!({"loadBalancer": {"ingress": ingress}});
    let endpoint = |family, (pod, here, state): &(u8, bool, State)| {
        json!({
            "addresses": [pod_ip(family, *pod)],
            "conditions": {
                "ready": *state == State::Ready,
                "serving": *state != State::Done,
                "terminating": *state != State::Ready,
            },
            "nodeName": if *here { "node" } else { "another" },
        })
    };
    let slices = slices(FILE, FILE, &tcp_and_udp([8080, 5353]), |family| {
        pods.iter().map(|pod| endpoint(family, pod)).collect()
    });
    yaml([service].into_iter().chain(slices))
}

/// Makes the device towards the client the uplink. If an agent runs, waits until the programs know the uplink.
pub fn open_up(fixture: &Fixture) -> Result<()> {
    fixture.node.ip("route replace default via 10.98.0.2\nroute replace default via fd98::2\n")?;
    if fixture.agent_mut().is_err() {
        return Ok(());
    }
    eventually(SOON, || {
        let [first, ..] = View::open(&fixture.bpffs())?.node_config()?.uplinks;
        ensure!(first != 0, "the programs know no uplink");
        Ok(())
    })
}

pub fn node_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 98, 0, 1].into(),
        Family::V6 => [0xfd98, 0, 0, 0, 0, 0, 0, 1].into(),
    }
}

pub fn node_port(family: Family, kind: SocketKind) -> SocketAddr {
    (node_ip(family), NODE_PORTS[usize::from(!kind.is_tcp())]).into()
}

/// Waits until the node port leads to another node, with this node's address as source.
pub fn is_sent_on(fixture: &Fixture, to: SocketAddr, kind: SocketKind) -> Result<()> {
    let family = Family::of(to.ip());
    eventually(SOON, || {
        // A datagram from before the change may be lost.
        let seen = fixture.client.reach(Attempt { patience: 5, ..Attempt::new(kind, to) })?;
        ensure!(seen.client.ip() == node_ip(family), "the pod saw {}", seen.client);
        Ok(())
    })
}

/// Makes an exchange of the packet client, and checks which addresses the client sees.
pub fn reach(fixture: &Fixture, attempt: Attempt) -> Result<Seen> {
    let seen = fixture.client.reach(attempt)?;
    ensure_sees_orig_dst(&seen, attempt, attempt.to)?;
    Ok(seen)
}
