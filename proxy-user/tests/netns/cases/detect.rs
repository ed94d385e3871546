//! Detection of clients inside and outside as the operator configures it, and `masqueradeAll`.
//!
//! The Service has the external policy Local, one endpoint on this node and one on another node: only clients inside reach both.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use serde_json::json;

use super::exposed::{NUMBER, node_ip, node_port, open_up, put};
use super::{Case, is_snat_port, spread};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};
use proxy_testbed::space::Space;

/// A wish with [`crate::fixture::SMALL`] and additional flags.
macro_rules! with {
    ($($flag:literal),+) => {
        Wish {
            pods: 3,
            services: &[],
            #[rustfmt::skip]
            flags: &[
                $($flag,)+
                "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
                "--max-flows", "16384", "--max-sockets", "4096",
            ],
        }
    };
}

pub const CASES: &[Case] = &[
    Case {
        name: "detect::pods_are_known_by_the_cluster_cidr",
        wish: with!("--detect-local-mode", "ClusterCIDR", "--cluster-cidr", "10.97.0.0/24,fd97::/64"),
        run: inside,
    },
    Case {
        name: "detect::pods_are_known_by_the_interface_name_prefix",
        wish: with!("--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "c1"),
        run: inside,
    },
    Case {
        name: "detect::second_nic_is_an_uplink_unless_a_flag_says_otherwise",
        wish: with!("--local-devices", "n1,never*"),
        run: networks,
    },
    Case {
        name: "detect::masquerade_all_hides_every_client",
        wish: with!("--masquerade-all"),
        run: masquerade,
    },
];

/// Checks that the second client is inside, and the first one is not.
fn inside(fixture: &Fixture) -> Result<()> {
    let (_space, late) = fixture.add_client()?;
    fixture.agent_mut()?.is_attached(&["c1".to_owned()])?;
    // SNAT needs an address of the node on an uplink.
    open_up(fixture)?;
    put(fixture, &[(0, true), (1, false)], &json!({"externalTrafficPolicy": "Local"}), &[])?;
    let reaches = |client: &Peer, family, servers: usize| {
        let attempt = Attempt::new(SocketKind::Tcp, node_port(family, SocketKind::Tcp));
        let seen = spread(client, attempt, 24)?;
        let here = seen.contains("0/8080");
        ensure!(here && seen.len() == servers, "{family:?}: {seen:?}, not {servers}");
        Ok(())
    };
    for family in Family::BOTH {
        eventually(SOON, || reaches(&late, family, 2))?;
        for _ in 0..3 {
            reaches(&fixture.client, family, 1)?;
            reaches(&late, family, 2)?;
        }
        // A process of the node is inside whatever is configured.
        reaches(&fixture.local, family, 2)?;
    }
    Ok(())
}

/// Checks clients in two more networks of the node, and an endpoint on another node: it sees the node's address if its
/// reply would otherwise take another path.
fn networks(fixture: &Fixture) -> Result<()> {
    open_up(fixture)?;
    put(fixture, &[(1, false)], &json!({}), &[])?;
    for (number, is_local) in [(0u8, false), (1, true)] {
        let (space, device) = (Space::new("network")?, format!("n{number}"));
        let (v4, v6) = (format!("10.95.{number}"), format!("fd9{number}:"));
        fixture.node.join(&space, &device, &v4, &v6)?;
        // With an address in a subnet, the device counts as a NIC.
        fixture
            .node
            .ip(&format!("addr add {v4}.9/24 dev {device}\naddr add {v6}:9/64 dev {device} nodad\n"))?;
        let client = Peer::start(&space, None)?;
        fixture.agent_mut()?.is_attached(&[device])?;
        for family in Family::BOTH {
            let own: IpAddr = match family {
                Family::V4 => format!("{v4}.2").parse()?,
                Family::V6 => format!("{v6}:2").parse()?,
            };
            for kind in SocketKind::ALL {
                eventually(SOON, || {
                    let seen = client.reach(Attempt::new(kind, node_port(family, kind)))?.client;
                    let is_right = if is_local {
                        seen.ip() == own
                    } else {
                        is_snat_port(seen.port()) && seen.ip() != own
                    };
                    ensure!(is_right, "{kind:?}, local {is_local}: the pod saw {seen}");
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

/// Checks that packets to cluster addresses get the node's address as source. A translated socket sends no packets to a
/// cluster address, and keeps its own address.
fn masquerade(fixture: &Fixture) -> Result<()> {
    let (_space, late) = fixture.add_client()?;
    fixture.agent_mut()?.is_attached(&["c1".to_owned()])?;
    open_up(fixture)?;
    // The policies of clients of an endpoint on this node are in the FORWARD chain, which needs the client's address:
    // `identity::masquerade_all_obeys_the_forward_chain`.
    put(fixture, &[(0, false)], &json!({}), &[])?;
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            let to = (cluster_ip(family, NUMBER), if kind.is_tcp() { 80 } else { 53 }).into();
            let expected = node_ip(family);
            eventually(SOON, || {
                let seen = late.reach(Attempt::new(kind, to))?;
                ensure!(seen.client.ip() == expected, "{kind:?}: the pod saw {}", seen.client);
                Ok(())
            })?;
            let seen = fixture.pod(2)?.reach(Attempt::new(kind, to))?;
            ensure!(seen.client.ip() == pod_ip(family, 2), "{kind:?}: the pod saw {}", seen.client);
            // Node ports are not cluster addresses.
            let seen = late.reach(Attempt::new(kind, node_port(family, kind)))?;
            ensure!(seen.client.ip() != expected, "{kind:?}: the pod saw {}", seen.client);
        }
    }
    Ok(())
}
