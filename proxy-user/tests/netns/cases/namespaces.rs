//! Which network namespaces the socket programs serve: that of the node, and those of pods, by their cgroup.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use ipnet::{Ipv4Net, Ipv6Net};
use proxy_core::store::{Store as _, Write, range_words};
use proxy_user::maps::KernelStore;
use proxy_user::maps::view::View;
use serde_json::json;

use super::{Case, WEB, vip};
use crate::fixture::{Cgroup, Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::text_with;
use proxy_testbed::space::Space;

const WISH: Wish = Wish { pods: 1, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "namespaces::a_container_that_is_no_pod_is_served_by_packets", wish: WISH, run: container },
    Case { name: "namespaces::without_cgroups_a_pod_is_known_by_its_address", wish: WISH, run: learned },
    Case { name: "namespaces::a_service_leaves_sockets_of_pods_alone", wish: WISH, run: annotated },
];

fn cgroup(parent: &std::path::Path, name: &str) -> Result<Cgroup> {
    let cgroup = Cgroup(parent.join(name));
    fs::create_dir(&cgroup.0).with_context(|| format!("cannot make {}", cgroup.0.display()))?;
    Ok(cgroup)
}

/// Adds a namespace whose routes lead to Services, and to no pod.
fn with_service_routes(fixture: &Fixture) -> Result<Space> {
    let space = Space::new("guest")?;
    fixture.node.join(&space, "g0", "10.97.0", "fd97:")?;
    space.ip("route del default via 10.97.0.1\nroute del default via fd97::1\n\
         route add 10.96.0.0/16 via 10.97.0.1\nroute add fd96::/64 via fd97::1\n")?;
    fixture.agent_mut()?.is_attached(&["g0".to_owned()])?;
    Ok(space)
}

fn attempts() -> impl Iterator<Item = Attempt> {
    Family::BOTH.into_iter().flat_map(|family| {
        SocketKind::ALL.into_iter().map(move |kind| Attempt::new(kind, vip(family, WEB, kind)))
    })
}

/// Checks that the client's calls are not translated, but its packets are.
fn is_served_by_packets(client: &Peer) -> Result<()> {
    attempts().try_for_each(|attempt| {
        let seen = client.reach(attempt)?;
        ensure!(seen.server.starts_with("0/"), "{attempt:?}: served by {}", seen.server);
        Ok(())
    })
}

/// Checks that the client's calls are translated: it has no route to the endpoint.
fn is_translated(client: &Peer) -> Result<()> {
    attempts().try_for_each(|attempt| client.fails(attempt, libc::ENETUNREACH).map(drop))
}

fn container(fixture: &Fixture) -> Result<()> {
    let space = with_service_routes(fixture)?;
    let guest = Peer::start(&space, Some(fixture.cgroup()))?;
    is_translated(&guest).context("where no pods are known, every namespace counts")?;
    let kubepods = cgroup(fixture.cgroup(), "kubepods.slice")?;
    let first = cgroup(&kubepods.0, "kubepods-pod1.slice")?;
    eventually(SOON, || {
        let config = View::open(&fixture.bpffs())?.node_config()?;
        ensure!(config.pod_cgroups[0] != 0, "the agent has not found the cgroup of pods");
        Ok(())
    })?;
    is_served_by_packets(&guest)?;
    let pod = Peer::start(&space, Some(&first.0))?;
    is_translated(&pod)?;
    // A pod that begins later is known at its first connect.
    let qos = cgroup(&kubepods.0, "kubepods-burstable.slice")?;
    let second = cgroup(&qos.0, "kubepods-burstable-pod2.slice")?;
    let late = Peer::start(&space, Some(&second.0))?;
    is_translated(&late)?;
    // A cluster in a pod (kind) has Services of its own, and may have the same addresses.
    let (mut nested, mut deeper) = (vec![], second.0.clone());
    for name in ["cri-containerd-1.scope", "container", "docker"] {
        nested.push(cgroup(&deeper, name)?);
        deeper = deeper.join(name);
        let inner = Peer::start(&space, Some(&deeper))?;
        if name == "docker" { is_served_by_packets(&inner)? } else { is_translated(&inner)? }
    }
    // A cgroup is removed before the one that it is in.
    while nested.pop().is_some() {}
    // The node's own sockets are translated, in any cgroup.
    attempts().try_for_each(|attempt| fixture.local.reach(attempt).map(drop))
}

/// A pod whose routes lead to no pods reaches a Service with the annotation.
fn annotated(fixture: &Fixture) -> Result<()> {
    let space = with_service_routes(fixture)?;
    let pod = Peer::start(&space, Some(fixture.cgroup()))?;
    is_translated(&pod)?;
    let more = json!({"metadata": {"annotations": {"ballast.io/socket-lb": "host-only"}}});
    fixture.folder.put_text(WEB.name, &text_with(WEB, &more)?)?;
    eventually(SOON, || is_served_by_packets(&pod))?;
    attempts().try_for_each(|attempt| fixture.local.reach(attempt).map(drop))?;
    fixture.folder.put(WEB)?;
    eventually(SOON, || is_translated(&pod))
}

/// Without a cgroup of pods, the source of a connection in the node's range shows that a namespace is a pod's.
fn learned(fixture: &Fixture) -> Result<()> {
    let space = with_service_routes(fixture)?;
    let guest = Peer::start(&space, Some(fixture.cgroup()))?;
    // A folder of manifests does not say which addresses this node's pods have, so the test says it to the programs.
    let put = |v4: &str, v6: &str| -> Result<()> {
        let mut store = KernelStore::open(&fixture.bpffs().join("ballast"))?;
        let mut row = store.read(u32::MAX)?.node.config;
        row.0.pods4 = range_words(v4.parse::<Ipv4Net>().ok());
        row.0.pods6 = range_words(v6.parse::<Ipv6Net>().ok());
        store.write(&[Write::Config(Box::new(row))]).map_err(|error| anyhow::anyhow!("{error:?}"))
    };
    put("10.99.0.0/16", "fd99::/16")?;
    eventually(SOON, || is_served_by_packets(&guest))?;
    is_served_by_packets(&guest).context("its address is not a pod's, whatever it does")?;
    put("10.99.0.0/16", "")?;
    is_served_by_packets(&guest).context("nor with pods of one family only")?;
    put("10.97.0.0/16", "fd97::/16")?;
    eventually(SOON, || is_translated(&guest)).context("its address is a pod's")?;
    // The node's own sockets are translated all the time.
    attempts().try_for_each(|attempt| fixture.local.reach(attempt).map(drop))
}
