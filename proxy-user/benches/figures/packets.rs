//! The packet programs, by `BPF_PROG_TEST_RUN`: nanoseconds of one run, minus those of the empty program.
//!
//! The kernel repeats a program on the packet that the last run left, so the next run gets the translated packet. The
//! Services here are made for this:
//! * known flow: the only backend of frontend A is frontend B, whose only backend is A. A client's packet alternates
//!   between the two, in two flows that are both known after the first two runs. Replies do the same.
//! * new flow: the only backend of each frontend is the next frontend, so that each run starts a flow, as many as there are
//!   Services. The next round uses another client port.
//!
//! Every translation changes address and port. The figures are means of the middle half of rounds, each with its own floor, with
//! 10, 1,000, 10,000 and 50,000 Services in turn: all sets have maps of the same sizes.

use std::net::SocketAddr;
use std::path::Path;

use aya::{TestRun, TestRunOptions, TestRunResult};
use proxy_core::model::FlowState;
use proxy_user::programs::Capacities;

use crate::snat_forward;
use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Hook, Service, context_of};
use proxy_testbed::packet::{ACK, Packet, SYN, TCP, ends};
use proxy_testbed::report::{Row, Sample};

/// Numbers of Services.
const SIZES: [u32; 4] = [FEW, 1000, 10_000, MANY];
pub const FEW: u32 = 10;
pub const MANY: u32 = 50_000;
pub const ROUNDS: usize = 200;
/// Runs in a round if the packet stays the same or alternates.
pub const RUNS: u32 = 3_000;
/// New flows in a round, each to another Service: so many that their entries are not in the nearest cache.
pub const CHAIN: u32 = 1000;
/// New flows in a round whose Services are in the cache; enough to outweigh the cache misses of the first one.
const HOT_CHAIN: u32 = 64;
/// The first Service of the chain, with which all rounds start; the two Services before it are the pair.
pub const CHAIN_START: u32 = 3;

/// Sequence numbers of a SYN and of its SYN-ACK.
pub const SEQ: [u32; 2] = [1_000_000, 2_000_000];

/// One set of Services, and how many client ports it has seen.
pub struct Bench {
    pub harness: Harness,
    pub family: Family,
    pub services: Vec<Service>,
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
        let services: Vec<_> = (1..=services).map(services_of).collect();
        harness.serve(&services);
        Self { harness, family, services, clients: 0 }
    }

    pub fn time(&self, program: &str, packet: &Packet, repeat: u32) -> f64 {
        self.time_by(program, &packet.bytes(), repeat, None).0
    }

    /// Returns the time of a packet that arrives on a device, and the packet after the last run.
    pub fn time_by(&self, program: &str, packet: &[u8], repeat: u32, device: Option<u32>) -> (f64, Vec<u8>) {
        let hook = if program == Hook::Egress.program() { Hook::Egress } else { Hook::Ingress };
        let context = context_of(hook, device.unwrap_or_default());
        timed(self.harness.program(program), packet, &context, repeat)
    }

    /// Returns the time of one program on one packet, without the floor.
    pub fn round(&self, program: &str, packet: &Packet, repeat: u32) -> f64 {
        let bytes = packet.bytes();
        over_floor(|program| self.time_by(program, &bytes, repeat, None), "nop", program).0
    }

    /// Returns a client's segment of the pair's first flow.
    fn known(&self) -> Packet {
        let client = self.family.client(1, 40_000);
        Packet { seq: SEQ[0] + 1, ack: SEQ[1] + 1, ..Packet::tcp(ACK, client, frontend(self.family, 1)) }
    }

    /// Returns a backend's segment of the same flow.
    fn reply(&self) -> Packet {
        let [seq, ack] = [SEQ[1] + 1, SEQ[0] + 1];
        Packet { seq, ack, ..self.known().to(frontend(self.family, 2)).back() }
    }

    /// Establishes the two flows of the pair, so that all their packets are translated.
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

    /// Measures a round of this number of new flows.
    fn begin(&mut self, flows: u32) -> f64 {
        self.clients += 1;
        let client =
            self.family.client((2 + self.clients / 50_000) as u16, (self.clients % 50_000) as u16 + 1024);
        let packet = Packet::tcp(SYN, client, frontend(self.family, CHAIN_START));
        self.round(Hook::Ingress.program(), &packet, flows.min(self.services.len() as u32 + 1 - CHAIN_START))
    }
}

/// Returns the time of a program on a packet, and the packet after the last run.
pub fn timed<P>(program: &P, packet: &[u8], context: &[u8], repeat: u32) -> (f64, Vec<u8>)
where
    P: for<'a> TestRun<Opts<'a> = TestRunOptions<'a>, Result = TestRunResult>,
{
    let mut out = vec![0; 256];
    let options = TestRunOptions {
        data_in: Some(packet),
        data_out: Some(&mut out),
        ctx_in: Some(context),
        repeat,
        ..TestRunOptions::default()
    };
    let result = program.test_run(options).unwrap();
    out.truncate(result.data_size_out as usize);
    (result.duration.as_nanos() as f64, out)
}

/// Returns the time of one program, minus that of the empty program, which runs before and after it; its shorter time counts.
pub fn over_floor(run: impl Fn(&str) -> (f64, Vec<u8>), empty: &str, program: &str) -> (f64, Vec<u8>) {
    let (before, _) = run(empty);
    let (measured, out) = run(program);
    (measured - f64::min(before, run(empty).0), out)
}

/// A measurement of each set of Services: name, targets of IPv4 and IPv6, function.
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
    // Large enough for the largest set of Services.
    let capacities = Capacities {
        services: 1 << 16,
        frontends: 1 << 16,
        slots: 1 << 20,
        backends: 1 << 20,
        maglev_words: 1 << 23,
        ..Capacities::default()
    };
    let mut benches = SIZES.map(|services| Bench::with_capacities(bpffs, family, services, &capacities));
    benches.iter_mut().for_each(Bench::establish);
    let [first, ..] = &benches;
    let run = |program: &str| (0..ROUNDS).map(|_| first.time(program, &first.known(), RUNS)).collect();
    let mut rows = vec![
        Row::new(group, "empty program, subtracted below", Sample::middle(run("nop")), "ns", None),
        Row::new(group, "a program that reads the clock", Sample::middle(run("clock")), "ns", None),
    ];
    for (what, targets, measure) in CASES {
        let times = in_turn(&mut benches, measure);
        rows.extend(by_size(group, what, SIZES, times, targets[number]));
    }
    rows.extend(measure_latency(bpffs, family, group));
    let [few, _, _, mut bench] = benches;
    let mut ends = [few, bench];
    rows.extend(snat_forward::measure(group, [[85.0, 900.0], [95.0, 900.0]][number], &mut ends));
    [_, bench] = ends;
    let flows = Capacities::default().flows;
    let mut rounds =
        |count: u32, chain: u32| Sample::median((0..count / chain).map(|_| bench.begin(chain)).collect());
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

/// Returns a figure with each number of Services, and the ratio of the last to the first.
pub fn by_size<const N: usize>(
    group: &'static str,
    what: &str,
    sizes: [u32; N],
    times: [Sample; N],
    target: f64,
) -> Vec<Row> {
    let row = |(size, time)| Row::new(group, format!("{what}, {size} Services"), time, "ns", Some(target));
    let mut rows: Vec<_> = sizes.into_iter().zip(times).map(row).collect();
    if let ([few, .., many], [first, .., last]) = (&sizes[..], &times[..]) {
        rows.push(Row::new(
            group,
            format!("{what}, {many} to {few} Services"),
            last.value / first.value,
            "x",
            Some(1.1),
        ));
    }
    rows
}

/// Measures the benches forwards and backwards in turn, because the first one finds colder caches.
pub fn in_turn<const N: usize>(benches: &mut [Bench; N], measure: fn(&mut Bench) -> f64) -> [Sample; N] {
    let mut times = [const { Vec::new() }; N];
    for round in 0..ROUNDS {
        for at in 0..N {
            let at = if round % 2 == 0 { at } else { N - 1 - at };
            times[at].push(measure(&mut benches[at]));
        }
    }
    times.map(Sample::middle)
}

/// Measures what `--connect-latency` adds.
fn measure_latency(bpffs: &Path, family: Family, group: &'static str) -> Vec<Row> {
    let mut benches = [false, true].map(|connect_latency| {
        Bench::with_capacities(bpffs, family, FEW, &Capacities { connect_latency, ..Capacities::default() })
    });
    benches.iter_mut().for_each(Bench::establish);
    let mut row = |(what, _, measure): Case| {
        let [without, with] = in_turn(&mut benches, measure);
        Row::new(group, format!("--connect-latency adds: {what}"), with.value - without.value, "ns", None)
    };
    CASES.map(&mut row).into()
}
