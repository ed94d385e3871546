//! A tenant's Service that does not fit changes nothing for its neighbour, for the node's health and for a rollout.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Case, tcp};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text_with};

const WISH: Wish =
    Wish { pods: 1, services: &[], flags: &["--max-source-ranges", "16384", "--sync-period", "1s"] };
const NEIGHBOUR: Service = Service { name: "neighbour", number: 53, ports: &[tcp(80, 8080, &[0])] };

pub const CASES: &[Case] =
    &[Case { name: "tenants::a_service_of_17_000_ranges_and_its_neighbour", wish: WISH, run: ranges }];

fn address(family: Family) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, 53].into(),
        Family::V6 => [0xfdaa, 0, 0, 0, 0, 0, 0, 53].into(),
    }
}

/// Writes the neighbour, whose load balancer admits the node and these clients.
fn put(fixture: &Fixture, more: &str) -> Result<()> {
    let ingress = Family::BOTH.map(|family| json!({"ip": address(family)}));
    let object = json!({
        "spec": {
            "type": "LoadBalancer", "loadBalancerSourceRanges": ["10.98.0.1/32", "fd98::1/128", more],
            "externalTrafficPolicy": "Local", "healthCheckNodePort": 32_053,
        },
        "status": {"loadBalancer": {"ingress": ingress}},
    });
    fixture.folder.put_text(NEIGHBOUR.name, &text_with(NEIGHBOUR, &object)?)
}

/// Writes a Service of another namespace with this many source ranges.
fn put_greedy(fixture: &Fixture, count: usize) -> Result<()> {
    let range = |at: usize| format!("{}.{}.{}.0/24", 11 + at / 65_536, at / 256 % 256, at % 256);
    let object = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "greedy", "namespace": "tenant"},
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.1.60", "clusterIPs": ["10.96.1.60"],
            "ports": [{"name": "http", "port": 80}],
            "loadBalancerSourceRanges": (0..count).map(range).collect::<Vec<_>>(),
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.60"}]}},
    });
    fixture.folder.put_text("greedy", &format!("---\n{object}\n"))
}

fn is_well(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        fixture.local.reach(Attempt::new(SocketKind::Tcp, (address(family), 80).into()))?;
    }
    for path in ["/healthz", "/livez", "/readyz"] {
        for host in [IpAddr::from([127, 0, 0, 1]), Ipv6Addr::LOCALHOST.into()] {
            let (code, body) = agent::get_from(&fixture.node, SocketAddr::new(host, 10_256), path, "*/*")?;
            ensure!(code == 200, "{path} at {host}: {code} {body}");
        }
    }
    Ok(())
}

fn ranges(fixture: &Fixture) -> Result<()> {
    super::exposed::open_up(fixture)?;
    put(fixture, "198.51.100.0/24")?;
    eventually(SOON, || is_well(fixture))?;
    put_greedy(fixture, 17_000)?;
    let problems = || agent::get(&fixture.node, 10_249, "/status").map(|(_, body)| body);
    eventually(SOON, || {
        let problems = problems()?;
        ensure!(problems.contains("tenant/greedy") && problems.contains("--max-source-ranges"), "{problems}");
        Ok(())
    })?;
    // Longer than two sync periods.
    thread::sleep(Duration::from_secs(3));
    is_well(fixture)?;
    put(fixture, "203.0.113.0/24")?;
    thread::sleep(Duration::from_secs(1));
    is_well(fixture)?;
    ensure!(!problems()?.contains("neighbour"), "{}", problems()?);
    fixture.kill()?;
    fixture.start()?;
    fixture.agent_mut()?.says(&["first sync done"])?;
    eventually(SOON, || is_well(fixture)).context("after a restart, as in a rollout")?;
    put_greedy(fixture, 9_000)?;
    eventually(SOON, || {
        ensure!(problems()?.contains(r#""problems":[]"#), "{}", problems()?);
        Ok(())
    })?;
    fixture.folder.remove("greedy")?;
    is_well(fixture)
}
