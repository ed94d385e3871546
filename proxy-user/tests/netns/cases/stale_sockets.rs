//! Connected UDP sockets whose endpoint is removed are ended, on the node and in pods, and no others.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use proxy_common::config::{CONFIG_POD_UDP_BY_PACKETS, NodeConfig};
use proxy_user::maps::view::View;

use super::{Case, pod, udp, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Failure, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::Service;

pub const WISH: Wish = Wish { pods: 3, services: &[NAMES, OTHER], flags: SMALL };
pub const NAMES: Service = Service { name: "names", number: 61, ports: &[udp(53, 5353, &[0])] };
const MOVED: Service = Service { ports: &[udp(53, 5353, &[1])], ..NAMES };
const EMPTY: Service = Service { ports: &[udp(53, 5353, &[])], ..NAMES };
/// A Service with the same endpoint, which keeps it.
const OTHER: Service = Service { name: "other", number: 62, ports: &[udp(53, 5353, &[0])] };

pub const CASES: &[Case] = &[
    Case { name: "stale_sockets::sockets_are_ended_and_connect_anew", wish: WISH, run: moves },
    Case { name: "stale_sockets::sockets_are_ended_if_no_endpoint_is_left", wish: WISH, run: zero },
    Case { name: "stale_sockets::sockets_are_ended_after_a_restart_of_the_agent", wish: WISH, run: restart },
];

fn mapped(addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), addr.port()).into(),
        IpAddr::V6(_) => addr,
    }
}

fn forms(service: Service) -> [SocketAddr; 3] {
    let [v4, v6] = Family::BOTH.map(|family| vip(family, service, SocketKind::Udp));
    [v4, v6, mapped(v4)]
}

/// Sockets of one process: those that a Service led to the endpoint, and those that must not be affected.
struct Sockets<'a> {
    client: &'a Peer,
    led: [(u32, SocketAddr); 3],
    others: Vec<u32>,
}

impl<'a> Sockets<'a> {
    fn open(client: &'a Peer) -> Result<Self> {
        let led = [0, 1, 2].map(|at: u32| (at, forms(NAMES)[at as usize]));
        let [v4, v6] = Family::BOTH.map(|family| pod(family, 0, SocketKind::Udp));
        let others = [v4, v6, mapped(v4)].into_iter().chain(forms(OTHER));
        let others: Vec<_> = (10..).zip(others).collect();
        for (id, to) in led.iter().chain(&others) {
            client.open(*id, Attempt::new(SocketKind::Udp, *to))?;
            ensure!(client.hears(*id, None)?.server == "0/5353", "{to} is elsewhere");
        }
        Ok(Self { client, led, others: others.into_iter().map(|(id, _)| id).collect() })
    }

    /// Waits until the sockets of the Service are ended; checks that the others are not.
    fn are_ended(&self) -> Result<()> {
        for (id, to) in &self.led {
            eventually(SOON, || ensure_ended(self.client, *id, *to))?;
        }
        for id in &self.others {
            let server = self.client.hears(*id, None)?.server;
            ensure!(server == "0/5353", "{id} was moved to {server}");
        }
        Ok(())
    }

    fn lead_to(&self, server: &str) -> Result<()> {
        for (id, to) in &self.led {
            self.client.open(*id, Attempt::new(SocketKind::Udp, *to))?;
            let seen = self.client.hears(*id, None)?;
            ensure!(seen.server == server && seen.peer == Some(*to), "{to}: {seen:?}");
        }
        Ok(())
    }
}

/// Checks that the socket was ended: a call that waits for an answer gets ECONNABORTED, and a call that sends EDESTADDRREQ.
fn ensure_ended(client: &Peer, id: u32, to: SocketAddr) -> Result<()> {
    match client.talk(id, None)? {
        Err(Failure { errno: Some(libc::ECONNABORTED | libc::EDESTADDRREQ), .. }) => Ok(()),
        other => anyhow::bail!("{to}: {other:?}"),
    }
}

/// Runs an action that removes the endpoint, and checks sockets of the node and of a pod.
fn after(fixture: &Fixture, action: impl FnOnce() -> Result<()>, then: Option<&str>) -> Result<()> {
    let pod = fixture.pod(2)?;
    let all = [Sockets::open(&fixture.local)?, Sockets::open(&pod)?];
    action()?;
    for sockets in &all {
        sockets.are_ended()?;
        match then {
            Some(server) => sockets.lead_to(server)?,
            None => sockets.led.iter().try_for_each(|(_, to)| {
                sockets.client.fails(Attempt::new(SocketKind::Udp, *to), libc::ECONNREFUSED).map(drop)
            })?,
        }
    }
    Ok(())
}

pub fn moves(fixture: &Fixture) -> Result<()> {
    after(fixture, || fixture.folder.put(MOVED), Some("1/5353"))?;
    // Move the endpoint back: an id is used again, and these sockets have been ended once before.
    let pod = fixture.pod(2)?;
    fixture.folder.put(NAMES)?;
    for client in [&fixture.local, &*pod] {
        for (at, to) in (0..).zip(forms(NAMES)) {
            eventually(SOON, || ensure_ended(client, at, to))?;
        }
    }
    Ok(())
}

/// Checks that connected sockets of a pod send to another endpoint when theirs is removed, under an agent that cannot end them,
/// and that those of the node are ended.
pub fn follow(fixture: &Fixture) -> Result<()> {
    are_left_to_packets(fixture, true)?;
    fixture.change(NAMES, &["0/5353"])?;
    let pod = fixture.pod(2)?;
    let (local, sockets) = (Sockets::open(&fixture.local)?, Sockets::open(&pod)?);
    fixture.change(MOVED, &["1/5353"])?;
    local.are_ended()?;
    for (id, to) in sockets.led {
        eventually(SOON, || {
            let seen = pod.hears(id, None)?;
            ensure!(seen.server == "1/5353" && seen.peer == Some(to), "{to}: {seen:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// Waits until connected UDP sockets of pods are left to the packet programs, or are not.
pub fn are_left_to_packets(fixture: &Fixture, are: bool) -> Result<()> {
    eventually(SOON, || {
        let NodeConfig { flags, attended_until, .. } = View::open(&fixture.bpffs())?.node_config()?;
        ensure!((flags & CONFIG_POD_UDP_BY_PACKETS != 0) == are, "flags {flags:#x}");
        ensure!(!are || attended_until != 0, "the agent does not attend to devices");
        Ok(())
    })
}

/// The device of a pod that starts while no agent runs does not translate packets: its connected UDP sockets are translated,
/// though they would be left to the packets. Kills the agent, whose sockets of pods stay.
pub fn unattended(fixture: &Fixture) -> Result<()> {
    are_left_to_packets(fixture, true)?;
    fixture.change(NAMES, &["0/5353"])?;
    fixture.kill()?;
    let pod = fixture.pod(fixture.add_pod()?)?;
    for to in forms(NAMES) {
        eventually(SOON, || {
            let seen = pod.reach(Attempt::new(SocketKind::Udp, to))?;
            ensure!(seen.server == "0/5353", "{to}: {seen:?}");
            Ok(())
        })?;
    }
    fixture.begin()
}

fn zero(fixture: &Fixture) -> Result<()> {
    after(fixture, || fixture.folder.put(EMPTY), None)?;
    fixture.change(NAMES, &["0/5353"])
}

fn restart(fixture: &Fixture) -> Result<()> {
    let away = || {
        fixture.kill()?;
        fixture.folder.put(MOVED)?;
        fixture.begin()
    };
    after(fixture, away, Some("1/5353"))
}
