//! An upgrade from the previous version, whose maps have another layout, and the downgrade: traffic is not affected.
//!
//! `BALLAST_PREVIOUS_BIN` names the binary of that version; `cargo xtask test` builds it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::exposed::{node_ip, open_up};
use super::{Case, is_clean, tcp, udp, vip};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::manifest::{Family, Service, text_with};
use crate::peer::{Attempt, Close, Kind, Load, Peer};

const PORTS: Service =
    Service { name: "ports", number: 50, ports: &[tcp(80, 8080, &[0, 1]), udp(53, 5353, &[0, 1])] };
const STICKY: Service =
    Service { name: "sticky", number: 51, ports: &[tcp(80, 8080, &[0, 1]), udp(53, 5353, &[0, 1])] };
const TCP_PORT: u16 = 30080;
const UDP_PORT: u16 = 30053;
/// Milliseconds between two messages. The previous version keeps the entry and the source port of each UDP exchange for
/// two minutes; at this rate it has enough of both for three minutes, with the SNAT ports that it gets here.
const PAUSE: u64 = 20;
#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--snat-ports", "1024-29999",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "65536", "--max-sockets", "4096",
];
/// Every packet to a ClusterIP gets an address of the node as source.
#[rustfmt::skip]
const SNAT: &[&str] = &[
    "--masquerade-all", "--snat-ports", "1024-29999",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "65536", "--max-sockets", "4096",
];
/// As on a kernel without TCX.
#[rustfmt::skip]
const CLSACT: &[&str] = &[
    "--packet-hook", "clsact", "--masquerade-all", "--snat-ports", "1024-29999",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "65536", "--max-sockets", "4096",
];
/// So few source ports that some would be used twice.
#[rustfmt::skip]
const FEW_PORTS: &[&str] = &[
    "--masquerade-all", "--snat-ports", "20000-20999",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
/// Number of connections of each family under one version.
const CONNECTIONS: usize = 150;
/// Duration of the endpoint's `TIME_WAIT`.
const TIME_WAIT: Duration = Duration::from_mins(1);
const SERVERS: &[&str] = &["0/8080", "1/8080", "0/5353", "1/5353"];

pub const CASES: &[Case] = &[
    Case {
        name: "migrate::there_and_back_under_load",
        wish: Wish { pods: 2, services: &[], flags: FLAGS },
        run: migrates,
    },
    Case {
        name: "migrate::there_and_back_with_snat",
        wish: Wish { pods: 2, services: &[], flags: SNAT },
        run: migrates,
    },
    Case {
        name: "migrate::there_and_back_by_clsact",
        wish: Wish { pods: 2, services: &[], flags: CLSACT },
        run: migrates,
    },
    Case {
        name: "migrate::source_ports_stay_in_quarantine",
        wish: Wish { pods: 2, services: &[], flags: FEW_PORTS },
        run: leaves_ports_alone,
    },
    Case {
        name: "migrate::no_closed_connection_is_forgotten",
        wish: Wish { pods: 2, services: &[], flags: SNAT },
        run: forgets_none,
    },
];

fn previous() -> Option<PathBuf> {
    std::env::var_os("BALLAST_PREVIOUS_BIN").map(PathBuf::from)
}

/// Returns all kinds of traffic to `ports`, at its cluster address and at its node port, and to `sticky`: new
/// connections all the time, and connections that stay open.
fn loads() -> Vec<Load> {
    let mut loads = Vec::new();
    for family in Family::BOTH {
        for kind in Kind::ALL {
            let node_port = if kind.is_tcp() { TCP_PORT } else { UDP_PORT };
            for to in
                [vip(family, PORTS, kind), (node_ip(family), node_port).into(), vip(family, STICKY, kind)]
            {
                for is_one_socket in [false, true] {
                    loads.push(Load::new(Attempt::new(kind, to), is_one_socket).paced(PAUSE));
                }
            }
        }
    }
    loads
}

fn put(fixture: &Fixture) -> Result<()> {
    let ports = json!([{"nodePort": TCP_PORT}, {"nodePort": UDP_PORT}]);
    let more = json!({"spec": {"type": "NodePort", "ports": ports}});
    fixture.folder.put_text("ports", &text_with(PORTS, &more)?)?;
    fixture.folder.put_text("sticky", &text_with(STICKY, &json!({"spec": {"sessionAffinity": "ClientIP"}}))?)
}

/// Removes everything of the version under test, with which the fixture has begun, and starts the previous version.
fn begin_with(fixture: &Fixture, previous: &Path) -> Result<()> {
    fixture.kill()?;
    // Without this flag, cleanup would use the cgroup of the whole machine, which another case may be checking.
    let cgroup = fixture.cgroup().display().to_string();
    let output = agent::command(&fixture.node, &["cleanup", "--cgroup-root", &cgroup], &fixture.bpffs())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The node's SNAT address is one of the uplink's addresses.
    open_up(fixture)?;
    put(fixture)?;
    previous.clone_into(&mut fixture.setup().binary);
    fixture.begin()
}

/// Checks that no version uses a source port again that another version has used towards an endpoint. An endpoint that closes
/// first keeps the connection's ports for a minute, and would answer another client's SYN from this port with an ACK.
fn leaves_ports_alone(fixture: &Fixture) -> Result<()> {
    let Some(previous) = previous() else { return Ok(()) };
    begin_with(fixture, &previous)?;
    let ours = agent::binary();
    let (_late, other) = fixture.add_client()?;
    let mut used = BTreeMap::new();
    for change in 0..4 {
        match change {
            0 => reaches(&fixture.client)?,
            1 | 3 => upgrade(fixture, &ours).with_context(|| format!("change {change}"))?,
            _ => downgrade(fixture, &previous).with_context(|| format!("change {change}"))?,
        }
        // Two clients, so that the TCP timestamps in their SYNs are unrelated.
        let client = if change % 2 == 0 { &fixture.client } else { &other };
        for family in Family::BOTH {
            let attempt = Attempt::new(Kind::Tcp, vip(family, PORTS, Kind::Tcp)).close(Close::Server);
            eventually(SOON, || client.reach(attempt)).context("no answer at all")?;
            for _ in 0..CONNECTIONS {
                let seen = client.reach(attempt)?;
                ensure!(seen.syn_retransmits == 0, "change {change}: a SYN was sent again: {seen:?}");
                let before = used.insert((seen.server.clone(), seen.client), (change, Instant::now()));
                let rested = before.is_none_or(|(_, when)| when.elapsed() > TIME_WAIT);
                ensure!(rested, "change {change}: {seen:?} has a source port of {before:?}");
            }
        }
    }
    Ok(())
}

/// Connections begin and end all the time while one version replaces the other. Checks that the running version knows
/// each connection that an endpoint has in `TIME_WAIT`, so that it does not use the source port again. Clients use
/// their own ports again sooner.
fn forgets_none(fixture: &Fixture) -> Result<()> {
    let Some(previous) = previous() else { return Ok(()) };
    begin_with(fixture, &previous)?;
    let ours = agent::binary();
    let (_late, other) = fixture.add_client()?;
    reaches(&fixture.client)?;
    let ends = AtomicBool::new(false);
    let ends = &ends;
    let knocks = move || -> Result<()> {
        let to = |family| Attempt::new(Kind::Tcp, vip(family, PORTS, Kind::Tcp)).close(Close::Server);
        let attempts = Family::BOTH.map(to);
        attempts.into_iter().try_for_each(|attempt| eventually(SOON, || other.reach(attempt)).map(drop))?;
        for attempt in attempts.into_iter().cycle() {
            if ends.load(Ordering::Relaxed) {
                break;
            }
            let seen = other.reach(attempt)?;
            ensure!(seen.syn_retransmits == 0, "a SYN was sent again: {seen:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    };
    let resets = sent_resets(fixture)?;
    std::thread::scope(|scope| {
        let knocking = scope.spawn(knocks);
        let changes = (|| {
            for round in 0..2 {
                upgrade(fixture, &ours).with_context(|| format!("upgrade {round}"))?;
                settle();
                knows_all(fixture, &ours).with_context(|| format!("after upgrade {round}"))?;
                downgrade(fixture, &previous).with_context(|| format!("downgrade {round}"))?;
                settle();
                knows_all(fixture, &previous).with_context(|| format!("after downgrade {round}"))?;
            }
            Ok(())
        })();
        ends.store(true, Ordering::Relaxed);
        let knocked = knocking.join().map_err(|_| anyhow::anyhow!("the client panicked"))?;
        changes.and(knocked)
    })?;
    let more = sent_resets(fixture)? - resets;
    ensure!(more == 0, "the node answered {more} segments of these connections with a reset");
    Ok(())
}

/// Returns how many resets the node's own stack has sent.
fn sent_resets(fixture: &Fixture) -> Result<u64> {
    let output = fixture.node.command("cat").arg("/proc/net/snmp").output().context("cannot run cat")?;
    let text = String::from_utf8(output.stdout)?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().context("no names")?, lines.next().context("no values")?);
    let value = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "OutRsts");
    value.context("no OutRsts")?.1.parse().context("no number")
}

/// Checks that this version has a flow for each connection that an endpoint has in `TIME_WAIT`.
fn knows_all(fixture: &Fixture, binary: &Path) -> Result<()> {
    let mut waiting = Vec::new();
    for pod in [0, 1] {
        let told = fixture.in_pod_space(pod, |space| {
            let filter = ["-Htn", "state", "time-wait", "sport", "=", ":8080"];
            space.command("ss").args(filter).output().context("cannot run ss")
        })?;
        ensure!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        let told = String::from_utf8(told.stdout)?;
        waiting.extend(told.lines().filter_map(|line| {
            let mut ends = line.split_whitespace().skip(2).map(str::to_owned);
            Some((ends.next()?, ends.next()?))
        }));
    }
    ensure!(waiting.len() > 100, "only {} connections are in TIME_WAIT", waiting.len());
    let mut command = fixture.node.command(binary);
    let output =
        command.args(["flow", "list", "--all", "-o", "json", "--bpffs"]).arg(fixture.bpffs()).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let text = |flow: &serde_json::Value, field: &str| flow[field].as_str().unwrap_or_default().to_owned();
    let flows = list["flows"].as_array().context("no list")?;
    let known: BTreeSet<_> = flows.iter().map(|flow| (text(flow, "backend"), text(flow, "source"))).collect();
    let missing: Vec<_> = waiting.iter().filter(|ends| !known.contains(*ends)).collect();
    ensure!(missing.is_empty(), "{} of {} are not known: {missing:?}", missing.len(), waiting.len());
    Ok(())
}

fn migrates(fixture: &Fixture) -> Result<()> {
    // `cargo xtask test` reports the missing binary, and fails unless the clone is shallow.
    let Some(previous) = previous() else { return Ok(()) };
    begin_with(fixture, &previous)?;
    let ours = agent::binary();
    for (_, client) in fixture.clients() {
        reaches(client)?;
    }
    let loads = loads();
    for (_, client) in fixture.clients() {
        client.load(&loads)?;
    }
    for round in 0..2 {
        upgrade(fixture, &ours).with_context(|| format!("upgrade {round}"))?;
        if round == 0 {
            downgrade(fixture, &previous).context("downgrade")?;
        }
    }
    let mut problems = Vec::new();
    for (path, client) in fixture.clients() {
        for (tally, load) in client.stop()?.iter().zip(&loads) {
            let Load { attempt, is_one_socket, .. } = load;
            let what = format!("{path}, {:?} to {}, one socket: {is_one_socket}", attempt.kind, attempt.to);
            if let Err(error) = is_clean(tally, &what, SERVERS) {
                problems.push(format!("{error:#}"));
            }
            let is_sticky = attempt.to == vip(Family::V4, STICKY, attempt.kind)
                || attempt.to == vip(Family::V6, STICKY, attempt.kind);
            if (*is_one_socket || is_sticky) && tally.servers.len() != 1 {
                problems.push(format!("{what}: moved: {:?}", tally.servers));
            }
        }
    }
    ensure!(problems.is_empty(), "{}\n{}", problems.join("\n"), flows_of(fixture, &problems)?);
    Ok(())
}

/// Returns the flows of the clients that the problems name.
fn flows_of(fixture: &Fixture, problems: &[String]) -> Result<String> {
    let output = agent::command(&fixture.node, &["flow", "list", "-o", "wide"], &fixture.bpffs())?;
    let flows = String::from_utf8_lossy(&output.stdout).into_owned();
    let named: Vec<_> = problems.iter().flat_map(|problem| problem.split(" from ").skip(1)).collect();
    let clients: Vec<_> = named.iter().filter_map(|named| named.split(';').next()).collect();
    let is_told = |row: &&str| clients.iter().any(|client| row.contains(client));
    Ok(flows.lines().filter(is_told).collect::<Vec<_>>().join("\n"))
}

fn reaches(client: &Peer) -> Result<()> {
    loads().iter().try_for_each(|load| eventually(SOON, || client.reach(load.attempt)).map(drop))
}

/// Lets traffic flow between two changes.
fn settle() {
    std::thread::sleep(Duration::from_secs(2));
}

fn upgrade(fixture: &Fixture, ours: &Path) -> Result<()> {
    settle();
    fixture.kill()?;
    ours.clone_into(&mut fixture.setup().binary);
    let before = fixture.log().matches("replaced the programs of the previous version").count();
    fixture.begin()?;
    let after = fixture.log().matches("replaced the programs of the previous version").count();
    ensure!(after == before + 1, "nothing was taken over");
    let folder = fixture.bpffs().join("ballast");
    ensure!(!folder.join("v2").exists() && folder.join("v3/flows").exists(), "the maps of v2 are left");
    ensure!(!folder.join("refused").exists(), "a map was refused");
    Ok(())
}

fn downgrade(fixture: &Fixture, previous: &Path) -> Result<()> {
    settle();
    let mut command = fixture.node.command(agent::binary());
    command.args(["downgrade", "--wait", "2m", "--bpffs"]).arg(fixture.bpffs());
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot start ballast")?;
    let mut copying = Ended(child);
    eventually(SOON, || {
        ensure!(fixture.bpffs().join("ballast/v2/config").exists(), "no maps of v2 yet");
        Ok(())
    })?;
    settle();
    fixture.kill()?;
    previous.clone_into(&mut fixture.setup().binary);
    fixture.begin()?;
    let status = copying.0.wait().context("the copy goes on")?;
    let mut said = String::new();
    for pipe in [
        copying.0.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read>),
        copying.0.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read>),
    ]
    .into_iter()
    .flatten()
    {
        let mut pipe = pipe;
        pipe.read_to_string(&mut said)?;
    }
    ensure!(status.success() && said.contains("the programs of the previous version are attached"), "{said}");
    ensure!(!fixture.bpffs().join("ballast/refused").exists(), "a map was refused");
    Ok(())
}

/// A process that is killed when the case ends.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The process may have ended before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
