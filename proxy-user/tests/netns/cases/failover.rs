//! A load balancer address whose Service has policy Local and no endpoint on this node (`ballast.io/external-failover`). Another
//! site answers at the same address; the node has a route to it.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use super::{Case, client_ip, tcp, udp};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, pod_ip, text_with};

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--tenant-annotations", "external-failover",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[Case {
    name: "failover::passthrough_forwards_clients_outside_to_another_site",
    wish: Wish { pods: 2, services: &[], flags: FLAGS },
    run: passthrough,
}];

/// The endpoint, pod 0, has no node.
const ANYCAST: Service =
    Service { name: "anycast", number: 60, ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])] };

fn address(family: Family) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, 60].into(),
        Family::V6 => [0xfdaa, 0, 0, 0, 0, 0, 0, 60].into(),
    }
}

fn frontend(family: Family, kind: SocketKind) -> SocketAddr {
    (address(family), if kind.is_tcp() { 80 } else { 53 }).into()
}

fn put(fixture: &Fixture, failover: &str) -> Result<()> {
    let ingress = Family::BOTH.map(|family| json!({"ip": address(family)}));
    let more = json!({
        "metadata": {"annotations": {"ballast.io/external-failover": failover}},
        "spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"},
        "status": {"loadBalancer": {"ingress": ingress}},
    });
    fixture.folder.put_text(ANYCAST.name, &text_with(ANYCAST, &more)?)
}

fn count(fixture: &Fixture, reason: Reason) -> Result<u64> {
    Ok(View::open(&fixture.bpffs())?.reasons()?.get(&reason).copied().unwrap_or_default())
}

fn attempts() -> impl Iterator<Item = (Family, Attempt)> {
    Family::BOTH.into_iter().flat_map(|family| {
        [SocketKind::Tcp, SocketKind::Udp].map(|kind| (family, Attempt::new(kind, frontend(family, kind))))
    })
}

fn passthrough(fixture: &Fixture) -> Result<()> {
    super::exposed::open_up(fixture)?;
    for family in Family::BOTH {
        let (address, site) = (address(family), pod_ip(family, 1));
        // A server cannot use an address while the kernel looks for duplicates of it.
        let nodad = if family == Family::V6 { " nodad" } else { "" };
        fixture.in_pod_space(1, |space| space.ip(&format!("addr add {address} dev lo{nodad}\n")))?;
        fixture.node.ip(&format!("route add {address} via {site}\n"))?;
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            fixture.pod(1)?.serve(kind.is_tcp(), frontend(family, kind), "site")?;
        }
    }
    put(fixture, "off")?;
    eventually(SOON, || {
        let before = count(fixture, Reason::NoLocalEndpoint)?;
        for (_, attempt) in attempts() {
            ensure!(fixture.client.once(attempt.in_vain())?.is_err(), "{attempt:?} is answered");
        }
        ensure!(count(fixture, Reason::NoLocalEndpoint)? >= before + 4, "{}", fixture.reasons());
        Ok(())
    })?;
    put(fixture, "passthrough")?;
    for (family, attempt) in attempts() {
        let seen = eventually(SOON, || fixture.client.reach(attempt))?;
        ensure!(seen.server.starts_with("site"), "{attempt:?}: served by {}", seen.server);
        ensure!(seen.client.ip() == client_ip(family), "{attempt:?}: the site sees {}", seen.client);
        // Clients inside use any endpoint.
        let seen = fixture.local.reach(attempt)?;
        ensure!(seen.server.starts_with("0/"), "{attempt:?} of the node: served by {}", seen.server);
    }
    ensure!(count(fixture, Reason::PassedOn)? >= 4, "{}", fixture.reasons());
    Ok(())
}
