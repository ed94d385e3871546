//! The packet programs, by `BPF_PROG_TEST_RUN`: nanoseconds of one run, less those of the empty program.
//!
//! The kernel repeats a program on what the last run left of the packet, so a translated packet is another one
//! in the next run. The Services here are made for that:
//! * known flow: the one backend of frontend A is frontend B, whose one backend is A. A client's packet goes to
//!   and fro between the two, in two flows that are both known after the first two runs. Replies likewise.
//! * new flow: the one backend of each frontend is the next frontend, so that each run begins a flow, as many as
//!   there are Services. The next round takes another client port.
//!
//! * sent on to another node (SNAT): the pair again, for two clients outside. Each of the two flows goes on under the
//!   other one's client, so that packets and replies go to and fro too. Each run takes one from the time to live.
//!
//! Every translation changes address and port. The figures are medians of rounds, each with its own floor (means of the
//! middle half where the kernel's whole nanoseconds are too coarse); with
//! 10 and with 10,000 Services in turn.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;

use aya::programs::{Xdp, XdpMode};
use aya::{TestRun as _, TestRunOptions};
use proxy_common::config::{NodeConfig, PortRange, SNAT_PORTS, SNAT_RANGES};
use proxy_common::select::source_port;
use proxy_user::maps::view::FlowState;
use proxy_user::programs::Capacities;

use crate::harness::{Family, Harness, Hook, Service, context_of};
use crate::node::{know, node_addr, send_on_as, uplink};
use crate::packet::{ACK, Packet, SYN, TCP, ends};
use crate::report::{Row, median, middle};

const FEW: u32 = 10;
const MANY: u32 = 10_000;
const ROUNDS: usize = 200;
/// Runs in a round where the packet stays the same or goes to and fro.
const RUNS: u32 = 3_000;
/// Flows begun in a round, each to another Service: so many that their entries are not in the nearest cache.
pub const CHAIN: u32 = 1000;
/// Flows begun in a round whose Services are hot, and enough to outweigh what the first one finds cold.
const HOT_CHAIN: u32 = 64;
/// Runs after which a packet's time to live is not over yet.
const HOPS: u32 = 50;
/// Index of the loopback device in each network namespace.
const LOOPBACK: u32 = 1;
/// The Service of the chain that all rounds begin with; the two before it are the pair.
pub const CHAIN_START: u32 = 3;

/// Sequence numbers of a SYN and of its answer.
pub const SEQ: [u32; 2] = [1_000_000, 2_000_000];

/// One set of Services, and the next client port that is new to it.
pub struct Bench {
    pub harness: Harness,
    family: Family,
    services: u32,
    clients: u32,
}

pub fn frontend(family: Family, id: u32) -> SocketAddr {
    family.frontend(id as u16, if id.is_multiple_of(2) { 80 } else { 8080 })
}

impl Bench {
    pub fn new(bpffs: &Path, family: Family, services: u32) -> Self {
        Self::with_capacities(bpffs, family, services, &Capacities::default())
    }

    pub fn with_capacities(bpffs: &Path, family: Family, services: u32, capacities: &Capacities) -> Self {
        let mut harness = Harness::with_capacities(bpffs, capacities);
        let services_of = |id| {
            let next = match id {
                1 => 2,
                2 => 1,
                last if last == services => CHAIN_START,
                other => other + 1,
            };
            Service::new(id, TCP, frontend(family, id), &[frontend(family, next)])
        };
        harness.serve(&(1..=services).map(services_of).collect::<Vec<_>>());
        Self { harness, family, services, clients: 0 }
    }

    pub fn time(&self, program: &str, packet: &Packet, repeat: u32) -> f64 {
        self.time_by(program, &packet.bytes(), repeat, None).0
    }

    /// The time of a packet that comes by a device, and what became of it in the end.
    fn time_by(&self, program: &str, packet: &[u8], repeat: u32, device: Option<u32>) -> (f64, Vec<u8>) {
        let mut out = vec![0; 256];
        let hook = if program == Hook::Egress.program() { Hook::Egress } else { Hook::Ingress };
        let context = context_of(hook, device.unwrap_or_default());
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            repeat,
            ..TestRunOptions::default()
        };
        let result = self.harness.program(program).test_run(options).unwrap();
        out.truncate(result.data_size_out as usize);
        (result.duration.as_nanos() as f64, out)
    }

    /// The time of an XDP program over a packet that comes by the uplink, without the floor.
    fn early(&self, packet: &Packet, repeat: u32) -> f64 {
        let bytes = packet.bytes();
        let mut context = [0; 24];
        context[4..8].copy_from_slice(&(bytes.len() as u32).to_ne_bytes());
        context[12..16].copy_from_slice(&uplink().to_ne_bytes());
        let time = |program: &str| {
            let mut out = vec![0; 256];
            let options = TestRunOptions {
                data_in: Some(&bytes),
                data_out: Some(&mut out),
                ctx_in: Some(&context),
                repeat,
                ..TestRunOptions::default()
            };
            self.harness.early_program(program).test_run(options).unwrap().duration.as_nanos() as f64
        };
        let before = time("xdp_nop");
        let measured = time("xdp_ingress");
        measured - f64::min(before, time("xdp_nop"))
    }

    /// A round of packets that are sent on to another node, and what the last one became.
    fn sent_on(&self, packet: &Packet, repeat: u32) -> (f64, Vec<u8>) {
        let (bytes, device) = (packet.bytes(), Some(uplink()));
        let floor = || self.time_by("nop", &bytes, repeat, device).0;
        let before = floor();
        let (measured, out) = self.time_by("tc_ingress", &bytes, repeat, device);
        (measured - f64::min(before, floor()), out)
    }

    /// A round of one program on one packet, without the floor.
    pub fn round(&self, program: &str, packet: &Packet, repeat: u32) -> f64 {
        let before = self.time("nop", packet, repeat);
        let measured = self.time(program, packet, repeat);
        measured - f64::min(before, self.time("nop", packet, repeat))
    }

    /// A segment of the client's in the pair's first flow.
    fn known(&self) -> Packet {
        let client = self.family.client(1, 40_000);
        Packet { seq: SEQ[0] + 1, ack: SEQ[1] + 1, ..Packet::tcp(ACK, client, frontend(self.family, 1)) }
    }

    /// A segment of the backend's in the same flow.
    fn reply(&self) -> Packet {
        let [seq, ack] = [SEQ[1] + 1, SEQ[0] + 1];
        Packet { seq, ack, ..self.known().to(frontend(self.family, 2)).back() }
    }

    /// Establishes the two flows of the pair; every packet of theirs is translated then.
    fn establish(&mut self) {
        let client = self.known().src;
        let ids = [1, 2].map(|id| frontend(self.family, id));
        for [frontend, backend] in [ids, [ids[1], ids[0]]] {
            let syn = Packet { seq: SEQ[0], flags: SYN, ..self.known().to(frontend) };
            let answer = Packet { seq: SEQ[1], flags: SYN | ACK, ..self.reply().from(backend) };
            for (hook, packet, seen) in [
                (Hook::Ingress, &syn, (client, backend)),
                (Hook::Egress, &answer, (frontend, client)),
                (Hook::Ingress, &self.known().to(frontend), (client, backend)),
            ] {
                assert_eq!(ends(&self.harness.run(hook, &packet.bytes()).packet), seen);
            }
        }
        assert!(self.harness.view().flows().unwrap().iter().all(|row| row.state == FlowState::Established));
    }

    /// A round of so many new flows.
    fn begin(&mut self, flows: u32) -> f64 {
        self.clients += 1;
        let client =
            self.family.client((2 + self.clients / 50_000) as u16, (self.clients % 50_000) as u16 + 1024);
        let packet = Packet::tcp(SYN, client, frontend(self.family, CHAIN_START));
        self.round(Hook::Ingress.program(), &packet, flows.min(self.services + 1 - CHAIN_START))
    }
}

/// What is measured in both sets of Services: name, targets of IPv4 and IPv6, measurement.
type Case = (&'static str, [f64; 2], fn(&mut Bench) -> f64);

const CASES: [Case; 5] = [
    ("packet of a known flow", [45.0, 50.0], |bench| bench.round("tc_ingress", &bench.known(), RUNS)),
    ("reply of a known flow", [45.0, 50.0], |bench| bench.round("tc_egress", &bench.reply(), RUNS)),
    ("foreign packet in", [10.0, 10.0], |bench| {
        bench.round("tc_ingress", &bench.known().to(bench.family.pod(9, 22)), RUNS)
    }),
    ("foreign packet out", [10.0, 10.0], |bench| {
        bench.round("tc_egress", &bench.known().to(bench.family.pod(9, 22)), RUNS)
    }),
    ("new flow, eight at a time", [320.0, 350.0], |bench| bench.begin(FEW - 2)),
];

/// Measures all of it.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    Family::BOTH.into_iter().flat_map(|family| measure_family(bpffs, family)).collect()
}

fn measure_family(bpffs: &Path, family: Family) -> Vec<Row> {
    let (number, group) = if family == Family::V4 { (0, "IPv4 packets") } else { (1, "IPv6 packets") };
    let mut benches = [FEW, MANY].map(|services| Bench::new(bpffs, family, services));
    benches.iter_mut().for_each(Bench::establish);
    let floor = |_| benches[0].time("nop", &benches[0].known(), RUNS);
    let floor = middle((0..ROUNDS).map(floor).collect());
    let mut rows = vec![Row::new(group, "empty program, subtracted below", floor, "ns", None)];
    for (what, targets, measure) in CASES {
        let target = targets[number];
        let [few, many] = in_turn(&mut benches, measure);
        rows.push(Row::new(group, format!("{what}, {FEW} Services"), few, "ns", Some(target)));
        rows.push(Row::new(group, format!("{what}, {MANY} Services"), many, "ns", Some(target)));
        rows.push(Row::new(group, format!("{what}, {MANY} to {FEW} Services"), many / few, "x", Some(1.1)));
    }
    let [_, mut bench] = benches;
    rows.extend(measure_latency(bpffs, family, group));
    rows.extend(measure_beyond(group, [[85.0, 900.0], [95.0, 900.0]][number], &mut bench));
    let flows = Capacities::default().flows;
    let mut rounds =
        |count: u32, chain: u32| median((0..count / chain).map(|_| bench.begin(chain)).collect());
    for (what, targets) in [("free table", [320.0, 350.0]), ("table full of half-open ones", [600.0, 600.0])]
    {
        let (hot, cold) = (rounds(flows / 4, HOT_CHAIN), rounds(flows / 8, CHAIN));
        rows.push(Row::new(
            group,
            format!("new flow, {HOT_CHAIN} at a time, {what}"),
            hot,
            "ns",
            Some(targets[number]),
        ));
        rows.push(Row::new(group, format!("new flow, {CHAIN} Services at a time, {what}"), cold, "ns", None));
        rounds(flows, CHAIN);
    }
    rows
}

/// Both figures, measured in the order ABBA: the one that goes first finds colder caches.
fn in_turn(benches: &mut [Bench; 2], measure: fn(&mut Bench) -> f64) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for at in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            times[at].push(measure(&mut benches[at]));
        }
    }
    times.map(middle)
}

/// What `--connect-latency` adds.
fn measure_latency(bpffs: &Path, family: Family, group: &'static str) -> Vec<Row> {
    let mut benches = [false, true].map(|connect_latency| {
        Bench::with_capacities(bpffs, family, FEW, &Capacities { connect_latency, ..Capacities::default() })
    });
    benches.iter_mut().for_each(Bench::establish);
    let mut row = |(what, _, measure): Case| {
        let [without, with] = in_turn(&mut benches, measure);
        Row::new(group, format!("--connect-latency adds: {what}"), with - without, "ns", None)
    };
    CASES.map(&mut row).into()
}

/// Source ports for SNAT among which [`fixed_port`] exists; among the default ones it does not.
const SOURCE_PORTS: [PortRange; SNAT_RANGES] = [SNAT_PORTS[1], PortRange { first: 0, count: 0 }];

/// A port that is its own source port: flows choose theirs by the client's.
fn fixed_port() -> u16 {
    let config = NodeConfig { snat: SOURCE_PORTS, ..NodeConfig::default() };
    let is_fixed = |port: &u16| config.snat_port(source_port(*port, config.snat_count())) == *port;
    (1024..=u16::MAX).find(is_fixed).unwrap()
}

/// Attaches an XDP program to the loopback device of a new network namespace, in generic mode. The namespace, and with it the
/// attachment, lasts as long as the file.
fn attach_apart(harness: &mut Harness, name: &str) -> File {
    let program: &mut Xdp = harness.ebpf.program_mut(name).unwrap().try_into().unwrap();
    let attach = || {
        // SAFETY: only this thread changes its network namespace.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
        program.attach_to_if_index(LOOPBACK, XdpMode::Skb).unwrap();
        File::open("/proc/thread-self/ns/net").unwrap()
    };
    thread::scope(|scope| scope.spawn(attach).join()).unwrap()
}

/// Packets to an endpoint on another node, and their replies.
fn measure_beyond(group: &'static str, [target, target_new]: [f64; 2], bench: &mut Bench) -> Vec<Row> {
    let family = bench.family;
    know(family, &bench.harness);
    bench.harness.configure(|config| config.snat = SOURCE_PORTS);
    let clients = [3, 5].map(|host| family.client(host, fixed_port()));
    let syn = Packet::tcp(SYN, clients[0], frontend(family, 1));
    for (number, other) in [(0, clients[1]), (1, clients[0])] {
        send_on_as(other.ip(), &bench.harness);
        let packet = syn.from(clients[number]).to(frontend(family, number as u32 + 1));
        let sent = bench.sent_on(&packet, 1).1;
        assert_eq!(ends(&sent), (other, frontend(family, 2 - number as u32)), "it goes to and fro");
    }
    let packet = Packet { flags: ACK, ..syn };
    let known = median((0..ROUNDS).map(|_| bench.sent_on(&packet, HOPS).0).collect());
    let answer = packet.back();
    let replies = median((0..ROUNDS).map(|_| bench.sent_on(&answer, HOPS).0).collect());
    // The kernel calls attached XDP programs by a direct jump (the BPF dispatcher). For others the test run patches that jump into
    // the kernel's code each time, and the first packet behind it pays microseconds.
    let attached = ["xdp_ingress", "xdp_nop"].map(|name| attach_apart(&mut bench.harness, name));
    let early = |packet: &Packet, runs| median((0..ROUNDS).map(|_| bench.early(packet, runs)).collect());
    let foreign = packet.to(family.pod(9, 22));
    let early = [early(&packet, HOPS), early(&answer, HOPS), early(&foreign, RUNS)];
    send_on_as(node_addr(family), &bench.harness);
    let early_begun = median(
        (0..(bench.services - CHAIN_START) / HOPS)
            .map(|round| {
                let first = CHAIN_START + round * HOPS;
                [7, 8].map(|host| {
                    let client = family.client(host, 1024 + round as u16);
                    bench.early(&Packet::tcp(SYN, client, frontend(family, first)), HOPS)
                })[1]
            })
            .collect(),
    );
    let begun = median(
        (0..(bench.services - CHAIN_START) / HOPS)
            .map(|round| {
                let first = CHAIN_START + round * HOPS;
                // The first chain is for the caches: Services are hot, flows are not.
                [4, 6].map(|host| {
                    let client = family.client(host, 1024 + round as u16);
                    bench.sent_on(&Packet::tcp(SYN, client, frontend(family, first)), HOPS).0
                })[1]
            })
            .collect(),
    );
    drop(attached);
    assert_eq!(bench.harness.reasons(), [], "nothing was refused");
    vec![
        Row::new(group, "to another node (SNAT), known flow", known, "ns", Some(target)),
        Row::new(group, "to another node (SNAT), reply", replies, "ns", Some(target)),
        Row::new(group, "to another node (SNAT), new flow", begun, "ns", Some(target_new)),
        Row::new(group, "to another node by XDP, known flow", early[0], "ns", Some(100.0)),
        Row::new(group, "to another node by XDP, reply", early[1], "ns", Some(100.0)),
        Row::new(group, "to another node by XDP, new flow", early_begun, "ns", Some(500.0)),
        Row::new(group, "foreign packet at XDP", early[2], "ns", Some(15.0)),
    ]
}
