//! `loadBalancerSourceRanges` for sockets of the node and of pods.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use serde_json::json;

use super::{Case, pod, tcp, udp};
use crate::fixture::{FAILS, Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text_with};

const WISH: Wish = Wish { pods: 2, services: &[], flags: FAILS };
const GUARDED: Service =
    Service { name: "guarded", number: 52, ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])] };

pub const CASES: &[Case] =
    &[Case { name: "source_ranges::sockets_of_the_node_and_of_pods", wish: WISH, run: ranges }];

fn address(family: Family) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, 52].into(),
        Family::V6 => [0xfdaa, 0, 0, 0, 0, 0, 0, 52].into(),
    }
}

fn vip(family: Family, kind: SocketKind) -> SocketAddr {
    (address(family), if kind.is_tcp() { 80 } else { 53 }).into()
}

fn put(fixture: &Fixture, ranges: &[&str]) -> Result<()> {
    let ingress = Family::BOTH.map(|family| json!({"ip": address(family)}));
    let more = json!({
        "spec": {"type": "LoadBalancer", "loadBalancerSourceRanges": ranges},
        "status": {"loadBalancer": {"ingress": ingress}},
    });
    fixture.folder.put_text(GUARDED.name, &text_with(GUARDED, &more)?)
}

/// Checks both families and both protocols: each attempt succeeds, or fails with `errno`.
fn expect(client: &Peer, errno: Option<i32>) -> Result<()> {
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let attempt = Attempt::new(kind, vip(family, kind));
            match errno {
                Some(errno) => drop(client.fails(attempt, errno)?),
                None => super::ensure_sees_orig_dst(&client.reach(attempt)?, attempt, attempt.to)?,
            }
        }
    }
    Ok(())
}

/// Checks that the client's packets are dropped.
fn unheard(client: &Peer) -> Result<()> {
    for family in Family::BOTH {
        client.fails(Attempt::new(SocketKind::Udp, vip(family, SocketKind::Udp)).in_vain(), libc::EAGAIN)?;
    }
    Ok(())
}

fn ranges(fixture: &Fixture) -> Result<()> {
    super::exposed::open_up(fixture)?;
    let stranger = fixture.pod(1)?;
    put(fixture, &["198.51.100.0/24", "fdbb::/64"])?;
    // The endpoint itself is always reachable: only the load balancer's address is restricted.
    fixture.local.reach(Attempt::new(SocketKind::Tcp, pod(Family::V4, 0, SocketKind::Tcp)))?;
    eventually(SOON, || expect(&fixture.local, Some(libc::ETIMEDOUT)))?;
    // A pod's address is known from its packets only.
    unheard(&stranger)?;
    for family in Family::BOTH {
        stranger.reach(Attempt::new(SocketKind::Tcp, super::vip(family, GUARDED, SocketKind::Tcp)))?;
    }
    // Ranges with the node's own address, and the address of one pod.
    put(fixture, &["10.98.0.1/32", "fd98::1/128", "10.99.1.2/32", "fd99:1::2/128"])?;
    eventually(SOON, || expect(&fixture.local, None))?;
    expect(&stranger, None)?;
    unheard(&*fixture.pod(0)?)?;
    put(fixture, &["0.0.0.0/0", "::/0"])?;
    eventually(SOON, || expect(&fixture.local, None))?;
    expect(&stranger, None)?;
    Ok(())
}
