//! Maps grow while packets pass: no packet is lost, and no connection moves to another endpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::flood::sink;
use super::{Case, udp};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip, pod_ip};

/// A port on which no server of the fixture listens.
const PORT: u16 = 7777;
const SET: Service = Service { name: "growth", number: 62, ports: &[udp(53, PORT, &[0, 1])] };

/// A ceiling that is no power of two, and that the test reaches.
const CEILING: &[&str] = &["--max-flows", "100000"];

pub const CASES: &[Case] = &[
    Case {
        name: "growth::growth_of_flow_tables_loses_no_connection",
        wish: Wish { pods: 2, services: &[SET], flags: CEILING },
        run: grows,
    },
    Case {
        name: "growth::flow_tables_grow_beside_busy_processes",
        wish: Wish { pods: 2, services: &[SET], flags: &[] },
        run: beside_busy_processes,
    },
];

/// Flows that stay, and get a datagram after each few new flows.
const KEPT: u64 = 64;
/// New flows, each with one datagram: more than twice the entries with which a node starts. Their ports follow those of the
/// flows that stay.
const NEW: u64 = 40_000;
/// New flows in a second. The agent has a second to let the first table grow; a node on which it does not run for longer evicts
/// flows without a reply.
const RATE: u32 = 12_000;
/// The first port of the client.
const FIRST: u16 = 2_000;
/// Maximum number of datagrams in transit, so that a lost datagram was lost by a program and not by a full queue.
const WINDOW: u64 = 128;

/// What the endpoints have received.
#[derive(Default)]
struct Seen {
    count: AtomicU64,
    /// Endpoints by the client's port.
    endpoints: Mutex<BTreeMap<u16, BTreeSet<u8>>>,
}

fn receive(socket: &UdpSocket, pod: u8, seen: &Seen, is_over: &AtomicBool) {
    let mut datagram = [0; 64];
    while !is_over.load(Ordering::Relaxed) {
        let Ok((_, from)) = socket.recv_from(&mut datagram) else { continue };
        let mut endpoints = seen.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.entry(from.port()).or_default().insert(pod);
        drop(endpoints);
        seen.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Processes that need all CPUs, until they are dropped.
struct Busy(Vec<std::process::Child>);

impl Busy {
    fn begin() -> Result<Self> {
        let count = std::thread::available_parallelism()?.get() * 2;
        let one = || std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
        Ok(Self((0..count).map(|_| one()).collect::<std::io::Result<_>>().context("cannot start sh")?))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn beside_busy_processes(fixture: &Fixture) -> Result<()> {
    let _busy = Busy::begin()?;
    grows(fixture)
}

fn grows(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        grows_by(fixture, family).with_context(|| format!("{family:?}"))?;
    }
    Ok(())
}

fn grows_by(fixture: &Fixture, family: Family) -> Result<()> {
    let to: SocketAddr = (cluster_ip(family, SET.number), 53).into();
    let (seen, is_over) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
    let mut threads = Vec::new();
    for pod in 0..2u8 {
        let socket = sink(fixture, pod, (pod_ip(family, pod), PORT).into())?;
        let (seen, is_over) = (Arc::clone(&seen), Arc::clone(&is_over));
        threads.push(std::thread::spawn(move || receive(&socket, pod, &seen, &is_over)));
    }
    let any = if family == Family::V4 { "0.0.0.0" } else { "::" };
    let open = |port: u16| {
        let socket = UdpSocket::bind((any.parse::<std::net::IpAddr>()?, port))?;
        socket.connect(to)?;
        Ok(socket)
    };
    eventually(SOON, || {
        fixture.client_space.inside(|| Ok(open(FIRST - 1)?.send(&[0; 8])?))?;
        ensure!(seen.count.load(Ordering::Relaxed) > 0, "not yet");
        Ok(())
    })?;
    std::thread::sleep(Duration::from_millis(300));
    seen.count.store(0, Ordering::Relaxed);
    let (begun, mut sent, mut lost) = (Instant::now(), 0, 0);
    let mut keep_pace = |sent: u64| {
        let stuck = Instant::now();
        while sent.saturating_sub(seen.count.load(Ordering::Relaxed) + lost) >= WINDOW {
            if stuck.elapsed() > Duration::from_secs(10) {
                lost = sent.saturating_sub(seen.count.load(Ordering::Relaxed));
            }
            std::thread::yield_now();
        }
    };
    fixture.client_space.inside(|| {
        let kept = (0..KEPT).map(|n| open(FIRST + n as u16)).collect::<Result<Vec<_>>>()?;
        for number in 0..NEW {
            open(FIRST + (KEPT + number) as u16)?.send(&[1; 8])?;
            sent += 1;
            if number % 8 == 0 {
                kept[(number / 8 % KEPT) as usize].send(&[2; 8])?;
                sent += 1;
            }
            keep_pace(sent);
            let due = Duration::from_secs(1) / RATE * number as u32;
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        // After the growth, every flow that stays is still known.
        for socket in &kept {
            socket.send(&[3; 8])?;
            sent += 1;
        }
        Ok(())
    })?;
    let took = begun.elapsed();
    let end = Instant::now() + Duration::from_secs(5);
    while seen.count.load(Ordering::Relaxed) < sent && Instant::now() < end {
        std::thread::yield_now();
    }
    is_over.store(true, Ordering::Relaxed);
    for thread in threads {
        drop(thread.join());
    }
    let came = seen.count.load(Ordering::Relaxed);
    let endpoints = seen.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = FIRST..FIRST + KEPT as u16;
    let moved: Vec<_> =
        endpoints.iter().filter(|(port, pods)| kept.contains(port) && pods.len() > 1).collect();
    let number = if family == Family::V4 { 4 } else { 6 };
    // The entries are in use before all keys have moved; the log tells the end.
    let grown = eventually(SOON, || {
        let log = fixture.log();
        let is_about = |line: &&str| line.contains(&format!("has grown family={number}"));
        let grown: Vec<_> = log.lines().filter(is_about).map(str::to_owned).collect();
        ensure!(!grown.is_empty(), "nothing has grown");
        Ok(grown)
    })?;
    let counts =
        format!("{family:?}: {NEW} new flows in {took:?}, {sent} datagrams, lost {}; {grown:?}", sent - came);
    let _ = writeln!(std::io::stdout(), "{counts}");
    ensure!(sent == came, "some are lost: {counts}");
    ensure!(moved.is_empty(), "flows moved to another endpoint: {moved:?}; {counts}");
    // A further growth may still move keys.
    eventually(SOON, || {
        let output =
            agent::command(&fixture.node, &["map", "dump", "config", "-o", "json"], &fixture.bpffs())?;
        let config = String::from_utf8(output.stdout)?;
        let config: String = config.split_whitespace().collect();
        ensure!(!config.contains("\"searched\":[0"), "{config}");
        ensure!(config.matches(",0]").count() >= 2, "the index still has keys in old buckets: {config}");
        Ok(())
    })
}
