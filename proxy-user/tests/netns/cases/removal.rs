//! Removal policies: TCP connections to a removed endpoint continue, or are reset after a delay, on both paths.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use super::capabilities::{AGENT_CAPABILITIES, restrict};
use super::{Case, packet::WIDE, tcp, udp, vip};
use crate::agent::Agent;
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, Failure, Peer, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, text_with};

const WISH: Wish = Wish { pods: 3, services: &[WIDE], flags: SMALL };
const FIRST: Service = Service { ports: &[tcp(80, 8080, &[0]), udp(53, 5353, &[0])], ..WIDE };
const SECOND: Service = Service { ports: &[tcp(80, 8080, &[1]), udp(53, 5353, &[1])], ..WIDE };
/// The first delay of a policy, and the longest one, for a slow machine.
const DELAYS: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(24)];

pub const CASES: &[Case] = &[
    Case { name: "removal::connections_are_reset_after_the_delay_on_both_paths", wish: WISH, run: resets },
    Case { name: "removal::without_a_delay_and_with_no_endpoint_left", wish: WISH, run: to_zero },
    Case {
        name: "removal::connections_drain_by_default_and_a_bad_value_is_a_problem",
        wish: WISH,
        run: drains,
    },
    Case { name: "removal::connections_are_reset_after_a_restart_of_the_agent", wish: WISH, run: away },
    Case {
        name: "removal::helper_resets_sockets_in_pods_for_an_agent_without_privileges",
        wish: WISH,
        run: helper,
    },
];

fn put(fixture: &Fixture, service: Service, policy: &str, delay: &str) -> Result<()> {
    let annotations = json!({"ballast.io/removal-policy": policy, "ballast.io/removal-delay": delay});
    let text = text_with(service, &json!({"metadata": {"annotations": annotations}}))?;
    fixture.folder.put_text(service.name, &text)
}

/// A TCP connection to the first pod, from a client of the packet path, a process of the node, or a process of a pod.
struct Open {
    path: &'static str,
    family: Family,
    id: u32,
}

/// Runs the action with the client of a path.
fn with<T>(fixture: &Fixture, path: &str, action: impl FnOnce(&Peer) -> Result<T>) -> Result<T> {
    match path {
        "packet" => action(&fixture.client),
        "socket" => action(&fixture.local),
        _ => action(&*fixture.pod(2)?),
    }
}

fn open(fixture: &Fixture) -> Result<Vec<Open>> {
    fixture.reaches(WIDE, &["0/8080"])?;
    let mut all = Vec::new();
    for path in ["packet", "socket", "pod"] {
        for (id, family) in (0..).zip(Family::BOTH) {
            with(fixture, path, |client| {
                client.open(id, Attempt::new(SocketKind::Tcp, vip(family, WIDE, SocketKind::Tcp)))?;
                let server = client.hears(id, None)?.server;
                ensure!(server == "0/8080", "{path} {family:?}: {server}");
                Ok(())
            })?;
            all.push(Open { path, family, id });
        }
    }
    Ok(all)
}

/// Sends a message on the connection; returns whether the connection continues.
fn goes_on(fixture: &Fixture, one: &Open) -> Result<bool> {
    let Open { path, family, id } = *one;
    // A process of the socket path cannot get a RST from outside: its socket is aborted.
    let expected = if path == "packet" { libc::ECONNRESET } else { libc::ECONNABORTED };
    match with(fixture, path, |client| client.talk(id, None))? {
        Ok(seen) => {
            ensure!(seen.server == "0/8080", "{path} {family:?}: {seen:?}");
            Ok(true)
        }
        Err(Failure { errno: Some(errno), .. }) if errno == expected || errno == libc::EPIPE => Ok(false),
        Err(failure) => anyhow::bail!("{path} {family:?}: {failure:?}"),
    }
}

fn all_go_on(fixture: &Fixture, all: &[Open]) -> Result<()> {
    for one in all {
        ensure!(goes_on(fixture, one)?, "{} {:?}: it was reset", one.path, one.family);
    }
    Ok(())
}

fn all_are_reset(fixture: &Fixture, all: &[Open]) -> Result<()> {
    for one in all {
        eventually(SOON, || {
            ensure!(!goes_on(fixture, one)?, "{} {:?}: it goes on", one.path, one.family);
            Ok(())
        })?;
    }
    Ok(())
}

fn resets(fixture: &Fixture) -> Result<()> {
    let [mut delay, longest] = DELAYS;
    loop {
        let text = format!("{}s", delay.as_secs());
        put(fixture, FIRST, "reset", &text)?;
        let all = open(fixture)?;
        let begun = Instant::now();
        put(fixture, SECOND, "reset", &text)?;
        fixture.reaches(WIDE, &["1/8080"])?;
        let went_on = all_go_on(fixture, &all);
        let is_in_time = begun.elapsed() < delay;
        if is_in_time {
            went_on?;
        }
        all_are_reset(fixture, &all)?;
        ensure!(begun.elapsed() >= delay, "reset after {:?}", begun.elapsed());
        if is_in_time {
            break;
        }
        ensure!(delay < longest, "the machine is too slow to see that the delay counts");
        delay *= 2;
    }
    let reasons = View::open(&fixture.bpffs())?.reasons()?;
    ensure!(reasons.get(&Reason::EndpointLeft).is_some_and(|count| *count >= 2), "{reasons:?}");
    fixture.reaches(WIDE, &["1/8080"])?;
    // Connections that were opened with the policy `drain` are left alone.
    put(fixture, FIRST, "drain", "0s")?;
    let all = open(fixture)?;
    put(fixture, SECOND, "drain", "0s")?;
    fixture.reaches(WIDE, &["1/8080"])?;
    std::thread::sleep(Duration::from_secs(2));
    all_go_on(fixture, &all)?;
    // The maps show which flows of the packet path are left on the removed endpoint.
    let left = View::open(&fixture.bpffs())?.flows_of_left()?;
    ensure!(left.values().copied().eq([1, 1]), "one connection of each family: {left:?}");
    Ok(())
}

fn to_zero(fixture: &Fixture) -> Result<()> {
    const NONE: Service = Service { ports: &[tcp(80, 8080, &[]), udp(53, 5353, &[])], ..WIDE };
    put(fixture, FIRST, "reset", "0s")?;
    let all = open(fixture)?;
    put(fixture, NONE, "reset", "0s")?;
    all_are_reset(fixture, &all)?;
    fixture.change(WIDE, &["0/8080", "1/8080"])
}

fn drains(fixture: &Fixture) -> Result<()> {
    put(fixture, FIRST, "vanish", "soon")?;
    let all = open(fixture)?;
    put(fixture, SECOND, "vanish", "soon")?;
    fixture.reaches(WIDE, &["1/8080"])?;
    std::thread::sleep(Duration::from_secs(2));
    all_go_on(fixture, &all)?;
    for text in ["one of drain, reset", "from 0s to 24h"] {
        ensure!(fixture.log().contains(text), "the log does not say {text:?}:\n{}", fixture.log());
    }
    fixture.change(WIDE, &["0/8080", "1/8080"])
}

fn away(fixture: &Fixture) -> Result<()> {
    put(fixture, FIRST, "reset", "0s")?;
    let all = open(fixture)?;
    fixture.kill()?;
    put(fixture, SECOND, "reset", "0s")?;
    all_go_on(fixture, &all)?;
    fixture.begin()?;
    all_are_reset(fixture, &all)?;
    fixture.reaches(WIDE, &["1/8080"])
}

fn helper(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    restrict(fixture, AGENT_CAPABILITIES.into_iter())?;
    fixture.begin()?;
    put(fixture, FIRST, "reset", "0s")?;
    let (in_pods, others): (Vec<_>, Vec<_>) = open(fixture)?.into_iter().partition(|one| one.path == "pod");
    put(fixture, SECOND, "reset", "0s")?;
    fixture.reaches(WIDE, &["1/8080"])?;
    all_are_reset(fixture, &others)?;
    all_go_on(fixture, &in_pods)?;
    restrict(fixture, ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"].into_iter())?;
    let helper = Agent::start_beside(&fixture.node, &fixture.setup())?;
    all_are_reset(fixture, &in_pods)?;
    helper.kill()
}
