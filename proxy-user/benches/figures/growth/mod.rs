//! Maps that grow under traffic: lost packets, refused packets, and the time that a packet takes, beside the time before.
//!
//! ```text
//! client eth0 10.98.0.2 --- c0 node p0 --- eth0 10.99.0.2, 10.99.1.2 server
//! ```
//!
//! The real agent runs on the node. The client sends [`RATE`] packets per second to a Service, or four fifths of
//! what it can send,; after a while something
//! lets a table grow: new flows, new clients of a Service with session affinity, sockets that send to many Services, or thousands
//! of new Services. The 99.9th percentile of each tenth of a second is compared with its median before the growth.

mod traffic;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proxy_common::map_names as names;
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;
use serde_json::json;

use self::traffic::{Arrival, BATCH, Flows, Times, endpoint, frame, now, send, serve};
use proxy_testbed::Family;
use proxy_testbed::kube::process::Process;
use proxy_testbed::kube::tail;
use proxy_testbed::manifest::{Folder, Port, Service, cluster_ip, pod_ip, text_with};
use proxy_testbed::packet::MACS;
use proxy_testbed::report::{Row, Sample, percentile};
use proxy_testbed::space::Space;

/// The first argument with which this program sends datagrams of many sockets.
pub const SENDER: &str = "__datagrams";

const PORT: u16 = 7001;
const SET: Service = Service {
    name: "set",
    number: 1,
    ports: &[Port { name: "udp", is_tcp: false, number: 53, target: PORT, pods: &[0, 1] }],
};
const STICKY: Service = Service { name: "sticky", number: 2, ..SET };
/// Services to which each socket of [`send_datagrams`] sends.
const PEERS: u8 = 40;
/// The first of them.
const FIRST_PEER: u8 = 100;
/// Sockets of [`send_datagrams`], and nanoseconds between two datagrams.
const SOCKETS: u64 = 400;
const PAUSE: u64 = 200_000;

/// Services that are added while packets pass, and endpoints of each.
const SERVICES: u32 = 4_000;
const ENDPOINTS: u32 = 10;

/// Flows that get packets all the time, and flows that begin with the growth.
const KEPT: u32 = 1_000;
const NEW: u32 = 40_000;

/// Packets per second.
const RATE: u64 = 200_000;
/// Packets by which the fastest rate is measured.
const TRIAL: u64 = 100_000;

const SECOND: u64 = 1_000_000_000;
/// Part of the traffic before any packet counts: neighbours are learned, and the kept flows are answered.
const WARM: u64 = SECOND;
const BEFORE: u64 = 3 * SECOND;
const WINDOW: u64 = SECOND / 10;

/// Patience with the agent.
const SOON: Duration = Duration::from_mins(1);

/// A table that grows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grows {
    Flows,
    Affinity,
    Sockets,
    Services,
}

impl Grows {
    const ALL: [Self; 4] = [Self::Flows, Self::Affinity, Self::Sockets, Self::Services];

    fn what(self) -> &'static str {
        match self {
            Self::Flows => "flows",
            Self::Affinity => "affinity",
            Self::Sockets => "sockets",
            Self::Services => "Services",
        }
    }

    /// Returns how long packets pass from the growth on: the agent reads thousands of Services first.
    fn after(self) -> u64 {
        if self == Self::Services { 15 * SECOND } else { 6 * SECOND }
    }

    /// Returns the entries of the flow table, or the entries in use of another one.
    fn entries(self, view: &View, family: Family) -> f64 {
        let [v4, v6] = match self {
            Self::Flows => return f64::from(view.node_config().unwrap().flows[at(family)].entries),
            Self::Affinity => {
                let name = [names::AFFINITY, names::AFFINITY6][at(family)];
                return view.dump(name).unwrap().len() as f64;
            }
            Self::Sockets => [names::SOCKETS, names::SOCKETS6],
            Self::Services => [names::BACKENDS, names::BACKENDS6],
        };
        let name = if family == Family::V4 { v4 } else { v6 };
        let row = view.usage().unwrap().into_iter().find(|row| row.name == name).unwrap();
        f64::from(row.used.unwrap_or_default())
    }
}

fn at(family: Family) -> usize {
    usize::from(family == Family::V6)
}

/// The node with its agent, the client and the server.
struct Site {
    _agent: Process,
    folder: Folder,
    dir: tempfile::TempDir,
    cgroup: PathBuf,
    view: View,
    client: Space,
    server: Space,
    node: Space,
}

impl Site {
    fn new(bpffs: &Path) -> Self {
        let [node, client, server] = ["node", "client", "server"].map(|name| Space::new(name).unwrap());
        node.join(&client, "c0", "10.98.0", "fd98:").unwrap();
        node.join(&server, "p0", "10.99.0", "fd99:").unwrap();
        let mac = |octets: [u8; 6]| octets.map(|octet| format!("{octet:02x}")).join(":");
        node.ip(&format!(
            "link set c0 address {}\n\
             route add 10.97.0.0/16 via 10.98.0.2\nroute add fd97::/16 via fd98::2\n\
             route add 10.99.1.0/24 dev p0\nroute add fd99:1::/64 dev p0\n",
            mac(MACS[0])
        ))
        .unwrap();
        client.ip("route add blackhole 10.97.0.0/16\nroute add blackhole fd97::/16\n").unwrap();
        server.ip("addr add 10.99.1.2/32 dev eth0\naddr add fd99:1::2/128 dev eth0 nodad\n").unwrap();
        let dir = tempfile::Builder::new().prefix("ballast-growth-").tempdir().unwrap();
        let folder = Folder::new(dir.path().join("manifests")).unwrap();
        folder.put(SET).unwrap();
        let spec = json!({"spec": {"sessionAffinity": "ClientIP"}});
        folder.put_text(STICKY.name, &text_with(STICKY, &spec).unwrap()).unwrap();
        let peer = |number| {
            let spec = json!({"metadata": {"name": format!("peer-{number}")}});
            let text = text_with(Service { name: "peer", number, ..SET }, &spec).unwrap();
            text.replace("\"peer-udp", &format!("\"peer-{number}-udp")).replace(
                "\"kubernetes.io/service-name\":\"peer\"",
                &format!("\"kubernetes.io/service-name\":\"peer-{number}\""),
            )
        };
        let peers: String = (FIRST_PEER..FIRST_PEER + PEERS).map(peer).collect();
        folder.put_text("peers", &peers).unwrap();
        let root = proxy_user::host::cgroup::find(None).unwrap().path;
        let cgroup = root.join(format!("ballast-growth-{}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let bpffs = bpffs.join("growth");
        fs::create_dir(&bpffs).unwrap();
        let log = dir.path().join("log");
        let mut command = node.command(env!("CARGO_BIN_EXE_ballast"));
        command.args(["run", "--hostname-override", "node", "--manifests"]).arg(folder.dir());
        command.arg("--bpffs").arg(&bpffs).arg("--cgroup-root").arg(&cgroup);
        let mut agent = Process::start(&mut command, &log).unwrap();
        let begun = Instant::now();
        let is_attached = |device: &str| {
            let log = fs::read_to_string(&log).unwrap();
            log.lines().any(|line| line.contains("packet programs attached") && line.contains(device))
        };
        while !is_attached("\"c0\"") || !is_attached("\"p0\"") {
            let is_alive = agent.is_alive();
            assert!(is_alive.is_ok(), "{is_alive:?}\n{}", tail(&log));
            assert!(begun.elapsed() < SOON, "not attached\n{}", tail(&log));
            thread::sleep(Duration::from_millis(20));
        }
        let view = View::open(&bpffs).unwrap();
        Self { _agent: agent, folder, dir, cgroup, view, client, server, node }
    }

    /// Returns the datagrams that the server's sockets had no room for.
    fn overflows(&self, family: Family) -> u64 {
        let text = self.server.inside(|| {
            let file = if family == Family::V4 { "snmp" } else { "snmp6" };
            Ok(fs::read_to_string(format!("/proc/thread-self/net/{file}"))?)
        });
        let text = text.unwrap();
        if family == Family::V6 {
            let line = text.lines().find_map(|line| line.strip_prefix("Udp6RcvbufErrors"));
            return line.unwrap().trim().parse().unwrap();
        }
        let mut udp = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
        let (header, values) = (udp.next().unwrap(), udp.next().unwrap());
        let place = header.split(' ').position(|name| name == "RcvbufErrors").unwrap();
        values.split(' ').nth(place).unwrap().parse().unwrap()
    }

    /// Starts this program in the agent's cgroup and on the node, as the sender of datagrams.
    fn start_sender(&self, family: Family) -> Process {
        let procs = fs::File::options().write(true).open(self.cgroup.join("cgroup.procs")).unwrap();
        let mut command = self.node.command("/proc/self/exe");
        command.args([SENDER, if family == Family::V4 { "4" } else { "6" }]);
        let join = move || std::io::Write::write_all(&mut &procs, b"0");
        // SAFETY: the closure makes one system call.
        unsafe { command.pre_exec(join) };
        Process::start(&mut command, &self.dir.path().join("sender")).unwrap()
    }

    /// Waits until the number of datagrams that the sender has sent is in its output.
    fn sent(&self, mut sender: Process) -> u64 {
        let begun = Instant::now();
        while sender.is_alive().is_ok() {
            assert!(begun.elapsed() < SOON, "the sender does not end");
            thread::sleep(Duration::from_millis(20));
        }
        let output = fs::read_to_string(self.dir.path().join("sender")).unwrap();
        let last = output.lines().last().unwrap_or_default();
        let sent = last.parse();
        assert!(sent.is_ok(), "the sender failed: {output}");
        sent.unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // The kernel removes everything else with this process.
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Sends datagrams of many sockets to many Services each, and prints how many.
pub fn send_datagrams(family: &str) {
    let family = if family == "4" { Family::V4 } else { Family::V6 };
    let any = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
    let sockets: Vec<_> = (0..SOCKETS).map(|_| UdpSocket::bind(any).unwrap()).collect();
    let (begun, mut sent) = (Instant::now(), 0);
    for peer in FIRST_PEER..FIRST_PEER + PEERS {
        for socket in &sockets {
            socket.send_to(&[0; 20], (cluster_ip(family, peer), 53)).unwrap();
            sent += 1;
            let due = Duration::from_nanos(PAUSE * sent);
            thread::sleep(due.saturating_sub(begun.elapsed()));
        }
    }
    println!("{sent}");
}

/// Returns Services of one family with endpoints elsewhere.
fn many(family: Family) -> String {
    let mut text = String::new();
    let address = |net: u8, number: u32| -> IpAddr {
        let [_, a, b, c] = number.to_be_bytes();
        match family {
            Family::V4 => [10, net + a, b, c].into(),
            Family::V6 => {
                [0xfd00, u16::from(net), 0, 0, 0, 0, u16::from(a), u16::from_be_bytes([b, c])].into()
            }
        }
    };
    let label = if family == Family::V4 { "IPv4" } else { "IPv6" };
    for number in 1..=SERVICES {
        let (name, ip) = (format!("many-{}-{number}", label.to_lowercase()), address(100, number));
        let endpoints: Vec<_> = (0..ENDPOINTS)
            .map(|endpoint| json!({"addresses": [address(200, number * ENDPOINTS + endpoint)]}))
            .collect();
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
            "spec": {"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": [label], "ports": [{"port": 80}]},
        });
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": label,
            "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": name}},
            "endpoints": endpoints, "ports": [{"name": "", "port": 8080}],
        });
        let _ = write!(text, "---\n{service}\n---\n{slice}\n");
    }
    text
}

/// Returns the sources of so many flows, each of another client; those of another `part` have another port.
fn clients(family: Family, part: u16, count: u32) -> impl Iterator<Item = SocketAddr> {
    let address = move |number: u16| match family {
        Family::V4 => IpAddr::from([10, 97, (number >> 8) as u8, number as u8]),
        Family::V6 => [0xfd97, 0, 0, 0, 0, 0, 0, number].into(),
    };
    (256..).zip(0..count).map(move |(number, _)| (address(number), 1_024 + part).into())
}

/// What one growth did to the traffic.
struct Growth {
    entries: [f64; 2],
    sent: u64,
    lost: u64,
    moved: usize,
    overflows: u64,
    reasons: BTreeMap<Reason, u64>,
    /// The 99th and 99.9th percentiles in microseconds of each window, before the growth and from then on.
    windows: [Vec<[f64; 2]>; 2],
}

fn windows(packets: &[Arrival], from: u64, to: u64) -> Vec<[f64; 2]> {
    let mut all: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for packet in packets.iter().filter(|packet| (from..to).contains(&packet.due)) {
        all.entry((packet.due - from) / WINDOW).or_default().push(f64::from(packet.late) / 1e3);
    }
    let one = |mut late: Vec<f64>| {
        late.sort_by(f64::total_cmp);
        [99, 999].map(|part: usize| {
            late[(late.len() * part / if part == 99 { 100 } else { 1_000 }).min(late.len() - 1)]
        })
    };
    all.into_values().map(one).collect()
}

/// Returns how many packets per second a machine can send that has nothing else to do.
fn fastest(site: &Site) -> u64 {
    let to = (cluster_ip(Family::V4, SET.number), 53).into();
    let kept = clients(Family::V4, 999, KEPT).map(|from| frame(from, to, 0)).collect();
    let open = |pod| endpoint((pod_ip(Family::V4, pod), PORT).into());
    let _sockets = site.server.inside(|| Ok([open(0)?, open(1)?])).unwrap();
    let start = now() - 3_600 * SECOND;
    let end = start + TRIAL / BATCH as u64;
    let times = Times { start, counted: start, growth: end, end, period: 1 };
    let begun = Instant::now();
    let sent = site.client.inside(|| Ok(send(Flows { kept, new: Vec::new() }, times)?)).unwrap();
    (sent as u128 * 1_000 / begun.elapsed().as_millis().max(1)) as u64
}

/// Lets a table grow while packets pass, so many per second.
fn grow(site: &Site, family: Family, grows: Grows, part: u16, rate: u64) -> Growth {
    let service = if grows == Grows::Affinity { STICKY } else { SET };
    let to = (cluster_ip(family, service.number), 53).into();
    let frames = |part, count, first: u32| -> Vec<_> {
        clients(family, part, count).zip(first..).map(|(from, flow)| frame(from, to, flow)).collect()
    };
    let new = if [Grows::Flows, Grows::Affinity].contains(&grows) { NEW } else { 0 };
    let flows = Flows { kept: frames(2 * part, KEPT, 0), new: frames(2 * part + 1, new, KEPT) };
    let services = (grows == Grows::Services).then(|| many(family));
    let open = |pod| endpoint((pod_ip(family, pod), PORT).into());
    let sockets = site.server.inside(|| Ok([open(0)?, open(1)?])).unwrap();
    let entries = grows.entries(&site.view, family);
    let (reasons, overflows) = (site.view.reasons().unwrap(), site.overflows(family));
    let start = now() + SECOND / 10;
    let counted = start + WARM;
    let growth = counted + BEFORE;
    let times =
        Times { start, counted, growth, end: growth + grows.after(), period: SECOND * BATCH as u64 / rate };
    let is_over = Arc::new(AtomicBool::new(false));
    let server = {
        let is_over = Arc::clone(&is_over);
        thread::spawn(move || serve(&sockets, KEPT as usize, times, &is_over))
    };
    let (sent, of_sockets) = thread::scope(|scope| {
        let sender = scope.spawn(|| site.client.inside(|| Ok(send(flows, times)?)));
        thread::sleep(Duration::from_nanos(growth.saturating_sub(now())));
        if let Some(text) = services {
            site.folder.put_text("many", &text).unwrap();
        }
        let of_sockets = (grows == Grows::Sockets).then(|| site.start_sender(family));
        (sender.join().unwrap().unwrap(), of_sockets.map_or(0, |sender| site.sent(sender)))
    });
    thread::sleep(Duration::from_millis(500));
    is_over.store(true, Ordering::Relaxed);
    let received = server.join().unwrap();
    let after = site.view.reasons().unwrap();
    let new_reasons =
        after.into_iter().map(|(reason, count)| (reason, count - reasons.get(&reason).unwrap_or(&0)));
    Growth {
        entries: [entries, grows.entries(&site.view, family)],
        sent: sent + of_sockets,
        lost: (sent + of_sockets).saturating_sub(received.packets.len() as u64 + received.others),
        moved: received.moved,
        overflows: site.overflows(family) - overflows,
        reasons: new_reasons.filter(|(_, count)| *count > 0).collect(),
        windows: [windows(&received.packets, counted, growth), windows(&received.packets, growth, times.end)],
    }
}

fn rows(family: Family, grows: Grows, growth: Growth) -> Vec<Row> {
    let group =
        if family == Family::V4 { "Growth under traffic, IPv4" } else { "Growth under traffic, IPv6" };
    let row = |what: &str, value: Sample, unit, target| {
        Row::new(group, format!("{}: {what}", grows.what()), value, unit, target)
    };
    let [before, after] = &growth.windows;
    let all =
        |windows: &[[f64; 2]], which: usize| windows.iter().map(|window| window[which]).collect::<Vec<_>>();
    let usual = Sample::median(all(before, 1));
    let twice = |windows: &[[f64; 2]]| {
        windows.iter().filter(|[_, most]| *most > 2.0 * usual.value).count() as f64 * WINDOW as f64
            / SECOND as f64
    };
    let worst = |which| percentile(&mut all(after, which), 100);
    println!(
        "{group}, {}: p99 and p99.9 of each {} ms in microseconds, before {before:.0?}, then {after:.0?}",
        grows.what(),
        WINDOW / 1_000_000
    );
    let [from, to] = growth.entries;
    let seconds = (BEFORE + grows.after()) as f64 / SECOND as f64;
    let mut rows = vec![
        row("entries before", from.into(), "", None),
        row("entries after", to.into(), "", None),
        row("packets per second", (growth.sent as f64 / seconds).into(), "", None),
        row("lost packets", (growth.lost as f64).into(), "", Some(0.0)),
        row("flows that moved to another endpoint", (growth.moved as f64).into(), "", Some(0.0)),
        row("p99 before, of 100 ms", Sample::median(all(before, 0)), "us", None),
        row("p99 then, of the worst 100 ms", worst(0).into(), "us", None),
        row("p99.9 before, of 100 ms", usual, "us", None),
        row("p99.9 then, of the worst 100 ms", worst(1).into(), "us", None),
        row(
            &format!("time with twice that p99.9 before, of {} s", BEFORE / SECOND),
            twice(before).into(),
            "s",
            None,
        ),
        row(
            &format!("time with twice that p99.9 then, of {} s", grows.after() / SECOND),
            twice(after).into(),
            "s",
            Some(1.0),
        ),
    ];
    if growth.overflows > 0 {
        rows.push(row(
            "of the lost packets, full queue of the server",
            (growth.overflows as f64).into(),
            "",
            None,
        ));
    }
    let reasons = growth.reasons.into_iter();
    rows.extend(reasons.map(|(reason, count)| row(reason.label(), (count as f64).into(), "", None)));
    rows
}

/// Measures all figures of this file.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    let site = Site::new(bpffs);
    let rate = RATE.min(fastest(&site) / 5 * 4);
    let all = Family::BOTH.into_iter().flat_map(|family| Grows::ALL.map(|grows| (family, grows)));
    all.zip(0..)
        .flat_map(|((family, grows), part)| rows(family, grows, grow(&site, family, grows, part, rate)))
        .collect()
}
