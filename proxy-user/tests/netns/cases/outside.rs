//! Clients outside: node ports, load balancers and external addresses, with endpoints on this node and on other nodes.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use super::exposed::{NUMBER, node_ip, node_port, open_up, put, reach};
use super::{Case, client_ip, ensure_sees_orig_dst, is_snat_port, spread};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};

const WISH: Wish = Wish { pods: 2, services: &[], flags: SMALL };
/// [`SMALL`], with the range of Service addresses.
#[rustfmt::skip]
const RANGES: &[&str] = &[
    "--service-cidrs", "10.96.0.0/16,fd96::/112",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

pub const CASES: &[Case] = &[
    Case { name: "outside::a_node_port_leads_to_another_node", wish: WISH, run: remote },
    Case { name: "outside::unreachable_endpoint_is_reported", wish: WISH, run: unreachable },
    Case { name: "outside::an_endpoint_here_sees_the_client", wish: WISH, run: local },
    Case { name: "outside::policy_local", wish: WISH, run: policy_local },
    Case { name: "outside::load_balancer_and_external_addresses", wish: WISH, run: addresses },
    Case { name: "outside::a_client_stays_with_its_endpoint", wish: WISH, run: affinity },
    Case {
        name: "outside::unknown_addresses_and_ports_pass",
        wish: Wish { flags: RANGES, ..WISH },
        run: nothing_there,
    },
];

fn remote(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let to = node_port(family, kind);
            eventually(SOON, || {
                let seen = reach(fixture, Attempt::new(kind, to))?;
                ensure!(seen.client.ip() == node_ip(family), "the pod saw {}", seen.client);
                Ok(())
            })?;
            for size in [10, 1400] {
                let seen = reach(fixture, Attempt::new(kind, to).size(size))?;
                ensure!(seen.client.ip() == node_ip(family), "the pod saw {}", seen.client);
                ensure!(is_snat_port(seen.client.port()), "the pod saw {}", seen.client);
            }
        }
        // The kernel cuts these segments only when they leave.
        reach(fixture, Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp)).size(1_000_000))?;
        // A client outside connects to a cluster address.
        let attempt = Attempt::new(SocketKind::Tcp, (cluster_ip(family, NUMBER), 80).into());
        let seen = reach(fixture, attempt)?;
        ensure!(seen.client.ip() == node_ip(family), "the pod saw {}", seen.client);
    }
    // Without offloads, the packets arrive with complete checksums.
    let output = fixture.client_space.command("ethtool").args(["-K", "eth0", "tx", "off"]).output()?;
    ensure!(output.status.success(), "ethtool: {}", String::from_utf8_lossy(&output.stderr));
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            reach(fixture, Attempt::new(kind, node_port(family, kind)).size(1400))?;
        }
    }
    Ok(())
}

/// The client gets the error that the kernel's own answer gives: `icmp_err_convert`, `tab_unreach`. A connected UDP socket gets none for
/// these.
fn unreachable(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp));
        eventually(SOON, || reach(fixture, attempt).map(drop))?;
    }
    for family in Family::BOTH {
        let (no_route, prohibited) = match family {
            Family::V4 => (libc::EHOSTUNREACH, libc::EHOSTUNREACH),
            Family::V6 => (libc::ENETUNREACH, libc::EACCES),
        };
        let pod = pod_ip(family, 0);
        for (kind, errno) in [("unreachable", no_route), ("prohibit", prohibited)] {
            fixture.node.ip(&format!("route add {kind} {pod}\n"))?;
            let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp));
            fixture.client.fails(attempt, errno).with_context(|| format!("{kind} {pod}"))?;
            fixture.node.ip(&format!("route del {kind} {pod}\n"))?;
        }
        let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp));
        eventually(SOON, || reach(fixture, attempt).map(drop))?;
    }
    let reasons = View::open(&fixture.bpffs())?.reasons()?;
    ensure!(reasons.get(&Reason::Unreachable).is_some_and(|count| *count >= 4), "{reasons:?}");
    Ok(())
}

fn local(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(0, true)], &json!({}), &[])?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, node_port(family, kind));
            eventually(SOON, || {
                let seen = reach(fixture, attempt)?;
                ensure!(seen.client.ip() == client_ip(family), "the pod saw {}", seen.client);
                Ok(())
            })?;
        }
    }
    // The pod connects to the node port that leads to itself, and so does the node.
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, node_port(family, kind));
            let seen = fixture.pod(0)?.reach(attempt)?;
            ensure_sees_orig_dst(&seen, attempt, attempt.to)?;
            ensure_sees_orig_dst(&fixture.local.reach(attempt)?, attempt, attempt.to)?;
        }
    }
    Ok(())
}

fn policy_local(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let policy = json!({"externalTrafficPolicy": "Local"});
    put(fixture, &[(0, true), (1, false)], &policy, &[])?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, node_port(family, kind));
            eventually(SOON, || {
                let servers = spread(&fixture.client, attempt, 24)?;
                ensure!(
                    servers.len() == 1 && servers.iter().all(|name| name.starts_with("0/")),
                    "{servers:?}"
                );
                Ok(())
            })?;
            let seen = reach(fixture, attempt)?;
            ensure!(seen.client.ip() == client_ip(family), "the pod saw {}", seen.client);
            // The node itself reaches all endpoints.
            let servers = spread(&fixture.local, attempt, 32)?;
            ensure!(servers.len() == 2, "{kind:?}: the node reaches {servers:?}");
        }
    }
    // Only other nodes have endpoints: clients outside get no answer, and nothing changes for the node.
    put(fixture, &[(1, false)], &policy, &[])?;
    for family in Family::BOTH {
        let attempt = Attempt::new(SocketKind::Udp, node_port(family, SocketKind::Udp));
        eventually(SOON, || {
            let errno = fixture.client.once(attempt.in_vain())?.err().and_then(|failure| failure.errno);
            ensure!(errno == Some(libc::EAGAIN), "not silence, but {errno:?}");
            Ok(())
        })?;
        ensure!(fixture.local.reach(attempt)?.server.starts_with("1/"));
    }
    Ok(())
}

fn addresses(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let ingress: [IpAddr; 2] = ["203.0.113.7".parse()?, "fd77::7".parse()?];
    let external: [IpAddr; 2] = ["203.0.113.8".parse()?, "fd77::8".parse()?];
    let spec = json!({
        "externalIPs": external,
        "loadBalancerSourceRanges": ["10.98.0.2/32", "fd98::2/128"],
    });
    put(fixture, &[(0, false), (1, true)], &spec, &ingress)?;
    for ip in ingress.into_iter().chain(external) {
        for (kind, port) in [(SocketKind::Tcp, 80), (SocketKind::Udp, 53)] {
            let attempt = Attempt::new(kind, (ip, port).into());
            eventually(SOON, || reach(fixture, attempt))?;
            let servers = spread(&fixture.client, attempt, 32)?;
            ensure!(servers.len() == 2, "{ip}: {servers:?}");
        }
    }
    // Other clients may use the external address and the node port, but not the load balancer's address.
    let spec = json!({
        "externalIPs": external,
        "loadBalancerSourceRanges": ["192.0.2.0/24", "fd66::/64"],
    });
    put(fixture, &[(0, false), (1, true)], &spec, &ingress)?;
    for (ip, other) in ingress.into_iter().zip(external) {
        let attempt = Attempt::new(SocketKind::Udp, (ip, 53).into());
        eventually(SOON, || {
            let errno = fixture.client.once(attempt.in_vain())?.err().and_then(|failure| failure.errno);
            ensure!(errno == Some(libc::EAGAIN), "{ip}: not silence, but {errno:?}");
            Ok(())
        })?;
        reach(fixture, Attempt::new(SocketKind::Udp, (other, 53).into()))?;
        let family = Family::of(ip);
        reach(fixture, Attempt::new(SocketKind::Udp, node_port(family, SocketKind::Udp)))?;
    }
    Ok(())
}

fn affinity(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let spec = json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 3600}},
    });
    put(fixture, &[(0, true), (1, false)], &spec, &[])?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let attempt = Attempt::new(kind, node_port(family, kind));
            eventually(SOON, || reach(fixture, attempt))?;
            let servers = spread(&fixture.client, attempt, 24)?;
            ensure!(servers.len() == 1, "{kind:?}: one client, and {servers:?}");
            // At the cluster address, it is the same client of the same Service.
            let cluster = (cluster_ip(family, NUMBER), if kind.is_tcp() { 80 } else { 53 }).into();
            let again = spread(&fixture.client, Attempt::new(kind, cluster), 12)?;
            ensure!(
                again == servers,
                "{kind:?}: {servers:?} by the node port, {again:?} by the cluster address"
            );
        }
    }
    Ok(())
}

fn nothing_there(fixture: &Fixture) -> Result<()> {
    put(fixture, &[(0, true)], &json!({}), &[])?;
    for family in Family::BOTH {
        let there = Attempt::new(SocketKind::Tcp, (cluster_ip(family, NUMBER), 80).into());
        eventually(SOON, || reach(fixture, there))?;
        // An address of a Service refuses a port that it does not have; an address without a Service gives no answer.
        fixture.client.fails(
            Attempt::new(SocketKind::Tcp, (cluster_ip(family, NUMBER), 81).into()),
            libc::ECONNREFUSED,
        )?;
        let unused = Attempt::new(SocketKind::Udp, (cluster_ip(family, NUMBER + 1), 53).into());
        let errno = fixture.client.once(unused.in_vain())?.err().and_then(|failure| failure.errno);
        ensure!(errno == Some(libc::EAGAIN), "not silence, but {errno:?}");
    }
    Ok(())
}
