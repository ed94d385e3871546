//! What a client at one place finds at one address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;

use super::World;

use crate::nodes::{link_ip, node_ip, pod_ip};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;

/// Number of connections to a Service with several endpoints: one of four is missed by chance once in 100,000 times.
const TRIES: usize = 40;

/// The place of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum VantagePoint {
    Outside,
    Host1,
    Host2,
    Pod12,
    Pod13,
    Pod22,
    /// A container on node 2 that is no pod.
    Container,
}

impl VantagePoint {
    pub const ALL: [Self; 7] =
        [Self::Outside, Self::Host1, Self::Host2, Self::Pod12, Self::Pod13, Self::Pod22, Self::Container];

    /// Returns how an endpoint sees the client without SNAT.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Outside => "the client outside",
            Self::Host1 => "node 1",
            Self::Host2 => "node 2",
            Self::Pod12 => "pod 1/2",
            Self::Pod13 => "pod 1/3",
            Self::Pod22 => "pod 2/2",
            Self::Container => "the container",
        }
    }

    /// Returns the node of the client, in the words of [`whom`].
    const fn node(self) -> &'static str {
        match self {
            Self::Outside => "",
            Self::Host1 | Self::Pod12 | Self::Pod13 => "node 1",
            Self::Host2 | Self::Pod22 | Self::Container => "node 2",
        }
    }

    const fn is_host(self) -> bool {
        matches!(self, Self::Host1 | Self::Host2)
    }

    const fn is_pod(self) -> bool {
        matches!(self, Self::Pod12 | Self::Pod13 | Self::Pod22)
    }

    /// Returns the client of each place.
    pub fn peers(world: &mut World) -> Vec<(Self, &mut Peer)> {
        let World { nodes, container, .. } = world;
        let mut peers = vec![(Self::Outside, &mut nodes.outside), (Self::Container, container)];
        let places = [(Self::Host1, [Self::Pod12, Self::Pod13]), (Self::Host2, [Self::Pod22, Self::Pod22])];
        for (node, (host, pods)) in nodes.all.iter_mut().zip(places) {
            let (peer, of_pods) = node.peers();
            peers.push((host, peer));
            let count = if host == Self::Host1 { 2 } else { 1 };
            peers.extend(pods.into_iter().take(count).zip(of_pods));
        }
        peers
    }
}

/// Properties of the Service behind an address.
#[expect(clippy::struct_excessive_bools, reason = "any of them may come together")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Behind {
    /// Another proxy serves the Service.
    pub is_foreign: bool,
    /// An endpoint does not name its node.
    pub has_nameless: bool,
    /// Nothing listens at the endpoints.
    pub is_silent: bool,
    /// With session affinity, one client finds only one endpoint, which is selected at random.
    pub is_sticky: bool,
}

/// An address that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Service and kind of address.
    pub what: String,
    pub to: SocketAddr,
    pub kind: SocketKind,
    pub is_node_port: bool,
    pub service: Behind,
}

impl Target {
    /// Returns the node whose address this is, in the words of [`whom`]; empty for other addresses.
    fn node(&self) -> String {
        let is_it = |node: &u8| Family::BOTH.iter().any(|family| node_ip(*family, *node) == self.to.ip());
        (1..=3).find(is_it).map_or_else(String::new, |node| format!("node {node}"))
    }
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    Refused,
    /// No answer; a process of the node gets EPERM if netfilter drops its packet.
    Dropped,
    Other(String),
}

/// Result of connecting to a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Names of the endpoints, and which clients they saw.
    pub servers: BTreeMap<String, BTreeSet<String>>,
    pub ends: BTreeSet<End>,
}

/// Returns why a difference is intended, in the words of `docs/compatibility.md`; `None` if it is not intended.
pub fn meant(
    vantage_point: VantagePoint,
    target: &Target,
    ours: &Found,
    theirs: &Found,
) -> Option<&'static str> {
    let no_server = ours.servers.is_empty() && theirs.servers.is_empty();
    let refused = [End::Refused].into();
    if vantage_point.is_host() && no_server && ours.ends == refused {
        let is_refusal = |end: &End| matches!(end, End::Refused | End::Dropped);
        return theirs.ends.iter().all(is_refusal).then_some("a process of the node is refused at once");
    }
    if vantage_point == VantagePoint::Container && no_server && ours.ends == refused {
        let is_silence = theirs.ends == [End::Dropped].into();
        return is_silence.then_some("an IPv6 refusal by kube-proxy does not reach a container");
    }
    let serves_more =
        ours.ends.is_empty() && theirs.servers.keys().all(|server| ours.servers.contains_key(server));
    let refuses_more = target.service.is_silent && no_server && ours.ends == refused;
    if (serves_more || refuses_more)
        && vantage_point.is_pod()
        && target.is_node_port
        && !theirs.ends.is_empty()
    {
        return Some("endpoints elsewhere answer through the node of the original destination");
    }
    if serves_more
        && vantage_point.is_pod()
        && target.service.has_nameless
        && theirs.ends == [End::Dropped].into()
    {
        return Some("a pod reaches itself although the slice does not name its node");
    }
    if no_server && target.service.is_foreign {
        return Some("addresses of another proxy's Services pass");
    }
    if ours.ends != theirs.ends || !ours.servers.keys().eq(theirs.servers.keys()) {
        return None;
    }
    let (own, orig_dst) = (vantage_point.name().to_owned(), target.node());
    let all = |wanted: fn(&Both<'_>) -> bool| {
        let pairs = ours.servers.values().zip(theirs.servers.values());
        pairs
            .map(|(one, other)| Both {
                one,
                other,
                own: &own,
                own_node: vantage_point.node(),
                orig_dst: &orig_dst,
            })
            .all(|both| wanted(&both))
    };
    if all(|both| both.same() || both.one.iter().eq([both.own])) {
        return Some("endpoints see the client where the reply returns through this node");
    }
    let is_of_node = |both: &Both<'_>| both.same() || both.one.iter().eq([both.own_node]);
    let is_of_others = vantage_point == VantagePoint::Container || vantage_point.is_pod();
    if is_of_others && target.is_node_port && all(is_of_node) {
        return Some("endpoints see what the network plugin makes of a client of another node's port");
    }
    let is_elsewhere = vantage_point.is_pod() && target.is_node_port && target.service.has_nameless;
    let is_orig_dst = |both: &Both<'_>| {
        both.same() || both.one.iter().eq([both.own]) || both.one.iter().eq([both.orig_dst])
    };
    (is_elsewhere && all(is_orig_dst))
        .then_some("an endpoint that does not name its node counts as one elsewhere")
}

/// Which clients one endpoint saw under both proxies, which client connected, its node, and the node of the original
/// destination.
struct Both<'a> {
    one: &'a BTreeSet<String>,
    other: &'a BTreeSet<String>,
    own: &'a String,
    own_node: &'a str,
    orig_dst: &'a String,
}

impl Both<'_> {
    fn same(&self) -> bool {
        self.one == self.other
    }
}

/// Connects to a target from one place.
pub fn probe(peer: &Peer, vantage_point: VantagePoint, target: &Target) -> Result<Found> {
    let attempt = Attempt::new(target.kind, target.to).in_vain();
    // A refusal may come one retransmission of the SYN later.
    let attempt = if target.service.is_silent { Attempt { patience: 3, ..attempt } } else { attempt };
    let mut found = Found::default();
    for _ in 0..TRIES {
        match peer.once(attempt)? {
            // Only one endpoint is found, which is selected at random.
            Ok(_) if target.service.is_sticky => {
                found.servers.entry("an endpoint".to_owned()).or_default();
            }
            Ok(seen) => {
                let client = whom(seen.client.ip().to_canonical(), seen.local.ip(), vantage_point);
                found.servers.entry(seen.server).or_default().insert(client);
            }
            Err(failure) => {
                found.ends.insert(match failure.errno {
                    Some(libc::ECONNREFUSED) => End::Refused,
                    Some(libc::EAGAIN | libc::EPERM | libc::ETIMEDOUT) => End::Dropped,
                    // The error of the standard library for a connect that takes too long.
                    None if failure.text.contains("timed out") => End::Dropped,
                    _ => End::Other(format!("{}: {}", failure.call, failure.text)),
                });
                // Which endpoints answered before is chance.
                found.servers.clear();
                break;
            }
        }
    }
    Ok(found)
}

/// Returns which client the endpoint saw, in words.
fn whom(client: IpAddr, local: IpAddr, vantage_point: VantagePoint) -> String {
    let is_own = |node: u8| {
        let of = |family| {
            let links = [31, 34].map(|network| link_ip(family, network, node.into()));
            [node_ip(family, node), pod_ip(family, node, 1), links[0], links[1]]
        };
        Family::BOTH.into_iter().flat_map(of).any(|ip| ip == client)
    };
    match (1..=3).find(|node| is_own(*node)) {
        Some(node) => format!("node {node}"),
        None if client == local => vantage_point.name().to_owned(),
        None => client.to_string(),
    }
}
