//! Which client connects to what, under which policy, with which endpoints: every combination, by TCP and UDP, in both
//! families.
//!
//! The reference is kube-proxy's own table (`pkg/proxy/nftables/proxier_test.go`: `TestNoEndpointsReject`,
//! `TestExternalTrafficPolicyLocal`, `TestInternalTrafficPolicy`, `TestInternalExternalMasquerade`), except for the
//! source address, which stays the client's own wherever the reply returns through this node.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeFrom;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use proxy_user::maps::view::View;
use serde_json::json;

use super::exposed::{NODE_PORTS, NUMBER, node_ip, open_up, put};
use super::{Case, client_ip};
use crate::fixture::{FAILS, Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Failure, Peer, Seen, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};

pub const CASES: &[Case] = &[Case {
    name: "matrix::clients_reach_exactly_the_endpoints_that_the_policy_allows",
    wish: Wish { pods: 3, services: &[], flags: FAILS },
    run,
}];

/// The endpoints: by the slice, pod 0 is on this node, and pod 1 is on another node.
const HERE: (u8, bool) = (0, true);
const THERE: (u8, bool) = (1, false);
/// A pod that is not an endpoint.
const POD: u8 = 2;

/// First source port of the clients; these ports are below those that the kernel assigns.
const FIRST_PORT: u16 = 20_000;

/// A change is complete if its last entry is this old: the agent writes all entries within a few milliseconds.
const QUIET: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    /// A process of the node, by its sockets.
    Node,
    /// A process in a pod, by its sockets.
    PodSocket,
    /// A client inside whose sockets have no hook, by packets.
    PodPackets,
    /// A client outside, by packets.
    Outside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalIp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    All,
    Here,
    There,
    Dropped,
    Refused,
}

use End::{All, Dropped, Here, Refused, There};
use What::ClusterIp;
use Who::Outside;

const ALL_CLIENTS: [Who; 4] = [Who::Node, Who::PodSocket, Who::PodPackets, Outside];
const EVERYTHING: [What; 4] = [ClusterIp, What::NodePort, What::LoadBalancer, What::ExternalIp];

/// Policies and endpoints, and the result that each client has to get.
struct Setup {
    internal: &'static str,
    external: &'static str,
    endpoints: &'static [(u8, bool)],
    expected: fn(Who, What) -> End,
}

const SETUPS: &[Setup] = &[
    Setup { internal: "Cluster", external: "Cluster", endpoints: &[HERE, THERE], expected: |_, _| All },
    Setup {
        internal: "Cluster",
        external: "Local",
        endpoints: &[HERE, THERE],
        expected: |who, what| if who == Outside && what != ClusterIp { Here } else { All },
    },
    Setup {
        internal: "Local",
        external: "Cluster",
        endpoints: &[HERE, THERE],
        expected: |_, what| if what == ClusterIp { Here } else { All },
    },
    Setup {
        internal: "Local",
        external: "Local",
        endpoints: &[HERE, THERE],
        expected: |who, what| if who == Outside || what == ClusterIp { Here } else { All },
    },
    Setup {
        internal: "Cluster",
        external: "Local",
        endpoints: &[THERE],
        expected: |who, what| if who == Outside && what != ClusterIp { Dropped } else { There },
    },
    Setup {
        internal: "Local",
        external: "Cluster",
        endpoints: &[THERE],
        expected: |_, what| if what == ClusterIp { Dropped } else { There },
    },
    Setup {
        internal: "Local",
        external: "Local",
        endpoints: &[THERE],
        expected: |who, what| if who == Outside || what == ClusterIp { Dropped } else { There },
    },
    Setup { internal: "Cluster", external: "Cluster", endpoints: &[], expected: |_, _| Refused },
    Setup { internal: "Local", external: "Local", endpoints: &[], expected: |_, _| Refused },
];

fn addresses(family: Family) -> [IpAddr; 2] {
    match family {
        Family::V4 => [[203, 0, 113, 7].into(), [203, 0, 113, 8].into()],
        Family::V6 => [[0xfd77, 0, 0, 0, 0, 0, 0, 7].into(), [0xfd77, 0, 0, 0, 0, 0, 0, 8].into()],
    }
}

fn address(family: Family, what: What, kind: SocketKind) -> SocketAddr {
    let port = if kind.is_tcp() { 80 } else { 53 };
    let [ingress, external] = addresses(family);
    match what {
        ClusterIp => (cluster_ip(family, NUMBER), port).into(),
        What::NodePort => (node_ip(family), NODE_PORTS[usize::from(!kind.is_tcp())]).into(),
        What::LoadBalancer => (ingress, port).into(),
        What::ExternalIp => (external, port).into(),
    }
}

/// Whether the endpoint saw the right source address.
fn is_right_source(family: Family, who: Who, seen: &Seen) -> bool {
    let is_there = seen.server.starts_with('1');
    let expected = match who {
        // The kernel selects the source address once it knows the route.
        Who::Node => return true,
        Who::PodSocket => pod_ip(family, POD),
        Who::PodPackets => late_ip(family),
        Outside if is_there => node_ip(family),
        Outside => client_ip(family),
    };
    seen.client.ip() == expected
}

/// Returns the address of the client of [`Fixture::add_client`].
fn late_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 97, 0, 2].into(),
        Family::V6 => [0xfd97, 0, 0, 0, 0, 0, 0, 2].into(),
    }
}

fn run(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    let (_space, late) = fixture.add_client()?;
    fixture.agent_mut()?.is_attached(&["c1".to_owned()])?;
    let pod = fixture.pod(POD)?;
    let [v4, v6] = Family::BOTH.map(addresses);
    // UDP from a port that was used before would continue the earlier flow.
    let mut ports = FIRST_PORT..;
    for setup in SETUPS {
        let spec = json!({
            "internalTrafficPolicy": setup.internal,
            "externalTrafficPolicy": setup.external,
            "externalIPs": [v4[1], v6[1]],
        });
        // The entries of each setup differ from those of the previous one.
        let rows = || Ok::<_, anyhow::Error>(format!("{:?}", View::open(&fixture.bpffs())?.services()?));
        let before = rows()?;
        put(fixture, setup.endpoints, &spec, &[v4[0], v6[0]])?;
        let (mut last, mut changed) = (before.clone(), Instant::now());
        eventually(SOON, || {
            let now = rows()?;
            if now != last {
                (last, changed) = (now, Instant::now());
            }
            ensure!(last != before && changed.elapsed() >= QUIET, "not programmed");
            Ok(())
        })?;
        for (family, who) in Family::BOTH.into_iter().flat_map(|family| ALL_CLIENTS.map(|who| (family, who)))
        {
            let client = match who {
                Who::Node => &fixture.local,
                Who::PodSocket => &*pod,
                Who::PodPackets => &late,
                Outside => &fixture.client,
            };
            for what in EVERYTHING {
                try_out(client, family, who, what, setup, &mut ports).with_context(|| {
                    let Setup { internal, external, endpoints, .. } = setup;
                    format!("{who:?} to {what:?}, internal {internal}, external {external}, {endpoints:?}")
                })?;
            }
        }
    }
    Ok(())
}

/// Makes each attempt once, without a retry: a retry would hide a result that is right only by chance.
fn try_out(
    client: &Peer,
    family: Family,
    who: Who,
    what: What,
    setup: &Setup,
    ports: &mut RangeFrom<u16>,
) -> Result<()> {
    let end = (setup.expected)(who, what);
    let by_packets = matches!(who, Who::PodPackets | Outside);
    for kind in [SocketKind::Tcp, SocketKind::Udp] {
        // A dropped SYN gets no answer for longer than a client waits.
        if end == Dropped && by_packets && kind.is_tcp() {
            continue;
        }
        let attempt = Attempt::new(kind, address(family, what, kind));
        let mut next =
            || if kind.is_tcp() { attempt } else { attempt.at_port(ports.next().unwrap_or_default()) };
        meets(client, &mut next, end, by_packets, |seen| is_right_source(family, who, seen))
            .with_context(|| format!("{attempt:?}"))?;
    }
    Ok(())
}

/// Checks that each attempt ends as it should.
fn meets(
    client: &Peer,
    mut next: impl FnMut() -> Attempt,
    end: End,
    by_packets: bool,
    is_right: impl Fn(&Seen) -> bool,
) -> Result<()> {
    let servers: &[char] = match end {
        All => &['0', '1'],
        Here => &['0'],
        There => &['1'],
        Dropped => {
            return fails(client, next().in_vain(), if by_packets { libc::EAGAIN } else { libc::ETIMEDOUT });
        }
        Refused => return fails(client, next(), libc::ECONNREFUSED),
    };
    let mut met = BTreeSet::new();
    // By chance, one of two endpoints is missed once in a million times.
    for _ in 0..if servers.len() == 1 { 8 } else { 20 } {
        let seen = client.reach(next())?;
        ensure!(is_right(&seen), "the endpoint saw {}", seen.client);
        met.extend(seen.server.chars().next());
    }
    ensure!(met.iter().eq(servers), "reaches {met:?} and not {servers:?}");
    Ok(())
}

fn fails(client: &Peer, attempt: Attempt, errno: i32) -> Result<()> {
    let failure = client.once(attempt)?.err();
    let found = failure.as_ref().and_then(|Failure { errno, .. }| *errno);
    ensure!(found == Some(errno), "ends with {failure:?}");
    Ok(())
}
