//! Packets to an endpoint on another node (SNAT), by tc and by XDP, and their replies.
//!
//! The two Services of `packets.rs` whose endpoints are each other, with two clients outside. SNAT gives the packets of
//! each client the address of the other client, so that a packet, and a reply, alternates between the two flows. Each run
//! decrements the TTL.

use std::fs::File;
use std::process::Command;
use std::thread;

use aya::programs::{Xdp, XdpMode};
use proxy_common::config::{NodeConfig, PortRange, SNAT_PORTS, SNAT_RANGES};
use proxy_common::select::{Algorithm, source_port};
use proxy_core::plan::maglev::length;

use crate::packets::{
    Bench, CHAIN_START, FEW, MANY, ROUNDS, RUNS, by_size, frontend, in_turn, over_floor, timed,
};
use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Service};
use proxy_testbed::node::{know, send_on_as, uplink};
use proxy_testbed::packet::{ACK, MACS, Packet, SYN, ends};
use proxy_testbed::report::{Row, Sample};

/// Number of runs after which the TTL of a packet has not expired yet.
pub const HOPS: u32 = 50;
/// Offset of TTL and hop limit in a frame, by family.
const TTL_OFFSET: [usize; 2] = [14 + 8, 14 + 7];
/// Index of the loopback device in each network namespace.
const LOOPBACK: u32 = 1;

impl Bench {
    /// Returns the time of XDP for a packet of a flow that alternates between the two, without the floor.
    fn early(&self, packet: &Packet) -> f64 {
        // XDP passes packets to tc if tc has recently sent none to the next hop, so that the kernel probes the neighbour.
        self.tc_round(packet, HOPS);
        let (time, sent) = self.xdp_round(packet, HOPS - 1);
        assert_ne!(ends(&sent), (packet.src, packet.dst), "an odd number of hops translates");
        assert_eq!(
            sent[TTL_OFFSET[usize::from(packet.src.is_ipv6())]],
            64 - (HOPS - 1) as u8,
            "each hop translates"
        );
        time
    }

    /// Returns the time of XDP for a packet that arrives on the uplink, without the floor, and the packet after the last run.
    pub fn xdp_round(&self, packet: &Packet, repeat: u32) -> (f64, Vec<u8>) {
        let bytes = packet.bytes();
        let mut context = [0; 24];
        context[4..8].copy_from_slice(&(bytes.len() as u32).to_ne_bytes());
        context[12..16].copy_from_slice(&uplink().to_ne_bytes());
        let run = |name: &str| timed(self.harness.early_program(name), &bytes, &context, repeat);
        over_floor(run, "xdp_nop", "xdp_ingress")
    }

    /// Returns the time of tc for a packet that is sent to another node, without the floor, and the packet after the last run.
    pub fn tc_round(&self, packet: &Packet, repeat: u32) -> (f64, Vec<u8>) {
        let bytes = packet.bytes();
        over_floor(|name| self.time_by(name, &bytes, repeat, Some(uplink())), "nop", "tc_ingress")
    }

    /// Returns the segment that alternates between the two flows.
    fn to_and_fro(&self) -> Packet {
        Packet::tcp(ACK, self.family.client(3, fixed_port()), frontend(self.family, 1))
    }

    /// Gives the gateway the address at which the node receives frames: XDP takes a frame that it has sent to the gateway for
    /// one to the node, so that each run translates.
    fn gateway_is_the_node(&self) {
        let gateway = if self.family == Family::V4 { "192.168.77.2" } else { "fd77::2" };
        let mac = MACS[0].map(|byte| format!("{byte:02x}")).join(":");
        let ip =
            Command::new("ip").args(["neigh", "replace", gateway, "lladdr", &mac, "dev", "up0"]).status();
        assert!(ip.unwrap().success());
    }

    /// Starts the two flows of the pair, from outside.
    fn meet(&mut self) {
        know(self.family, &self.harness);
        self.gateway_is_the_node();
        self.harness.configure(|config| config.snat = SOURCE_PORTS);
        let clients = [3, 5].map(|host| self.family.client(host, fixed_port()));
        for (number, other) in [(0, clients[1]), (1, clients[0])] {
            send_on_as(other.ip(), &self.harness);
            let to = frontend(self.family, number as u32 + 1);
            let sent = self.tc_round(&Packet::tcp(SYN, clients[number], to), 1).1;
            assert_eq!(ends(&sent), (other, frontend(self.family, 2 - number as u32)), "it goes to and fro");
        }
    }

    /// Returns the times of new flows, measured by `walk`: a client walks each chain of Services. Another client has walked
    /// the chain by tc before, so that Services are in the cache, flows are not, and XDP does not have to pass a packet to tc. A
    /// chain of which XDP passes a packet to tc nevertheless is not counted.
    fn begun(&self, hosts: [u16; 2], walk: impl Fn(&Packet) -> (f64, Vec<u8>)) -> Sample {
        let chains = (self.services.len() as u32 - CHAIN_START) / HOPS;
        let time = |chain: u32| {
            let first = CHAIN_START + chain * HOPS;
            let syn = |host| {
                let client = self.family.client(host, 1024 + chain as u16);
                Packet::tcp(SYN, client, frontend(self.family, first))
            };
            let last = frontend(self.family, first + HOPS);
            let before = self.tc_round(&syn(hosts[0]), HOPS);
            assert_eq!(ends(&before.1).1, last, "each hop translates: {:?}", self.harness.reasons());
            let (time, sent) = walk(&syn(hosts[1]));
            (ends(&sent).1 == last).then_some(time)
        };
        let chains = chains.min(CHAINS);
        let times: Vec<_> = (0..chains).filter_map(time).collect();
        assert!(times.len() as u32 >= chains * 9 / 10, "{} of {chains} chains", times.len());
        Sample::median(times)
    }

    /// Changes all Services to Maglev tables, each with one endpoint.
    fn spread_by_maglev(&mut self) {
        let words = length(1);
        let table =
            |service: &Service| service.writes_with_table(Algorithm::Maglev as u8, service.id * words);
        let writes: Vec<_> = self.services.iter().flat_map(table).collect();
        self.harness.write(&writes);
    }
}

/// Number of chains of new flows in one measurement.
const CHAINS: u32 = 200;

/// SNAT ports that include a [`fixed_port`]; the default ones do not.
const SOURCE_PORTS: [PortRange; SNAT_RANGES] = [SNAT_PORTS[1], PortRange { first: 0, count: 0 }];

/// Returns a client's port that is also its SNAT port: flows choose the SNAT port by the client's port.
fn fixed_port() -> u16 {
    let config = NodeConfig { snat: SOURCE_PORTS, ..NodeConfig::default() };
    let is_fixed = |port: &u16| config.snat_port(source_port(*port, config.snat_count())) == *port;
    (1024..=u16::MAX).find(is_fixed).unwrap()
}

/// Attaches an XDP program to the loopback device of a new netns, in generic mode. The netns, and with it the attachment,
/// exists as long as the file.
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

/// Attaches the XDP programs of a bench, as long as the files exist. The kernel calls attached XDP programs with a direct
/// jump (the BPF dispatcher). For other programs, each test run patches that jump into the kernel's code, and the first
/// packet after the patch takes microseconds longer.
pub fn attach_early(harness: &mut Harness) -> [File; 2] {
    ["xdp_ingress", "xdp_nop"].map(|name| attach_apart(harness, name))
}

/// A measurement of XDP with few and with many Services: name, target, function.
type Case = (&'static str, f64, fn(&mut Bench) -> f64);

const CASES: [Case; 3] = [
    ("to another node by XDP, known flow", 100.0, |bench| bench.early(&bench.to_and_fro())),
    ("to another node by XDP, reply", 100.0, |bench| bench.early(&bench.to_and_fro().back())),
    ("foreign packet at XDP", 15.0, |bench| {
        bench.xdp_round(&bench.to_and_fro().to(bench.family.pod(9, 22)), RUNS).0
    }),
];

/// Measures all figures of this file, with few Services and with many.
pub fn measure(group: &'static str, [target, target_new]: [f64; 2], benches: &mut [Bench; 2]) -> Vec<Row> {
    benches.iter_mut().for_each(Bench::meet);
    let attached: Vec<_> = benches.iter_mut().map(|bench| attach_early(&mut bench.harness)).collect();
    let many = &benches[1];
    let packet = many.to_and_fro();
    // After an odd number of hops, the packet has the other addresses.
    assert_eq!(ends(&many.tc_round(&packet, HOPS - 1).1).1, frontend(many.family, 2));
    let known = Sample::median((0..ROUNDS).map(|_| many.tc_round(&packet, HOPS).0).collect());
    let replies = Sample::median((0..ROUNDS).map(|_| many.tc_round(&packet.back(), HOPS).0).collect());
    let mut rows = vec![
        Row::new(group, "to another node (SNAT), known flow", known, "ns", Some(target)),
        Row::new(group, "to another node (SNAT), reply", replies, "ns", Some(target)),
    ];
    for (what, target, measure) in CASES {
        let times = in_turn(benches, measure);
        rows.extend(by_size(group, what, [FEW, MANY], times, target));
    }
    let many = &mut benches[1];
    // Packets from the node's own address would be martians when the next run receives them.
    send_on_as(many.family.client(2, 1024).ip(), &many.harness);
    let begun = many.begun([4, 6], |packet| many.tc_round(packet, HOPS));
    let early = many.begun([7, 8], |packet| many.xdp_round(packet, HOPS));
    many.spread_by_maglev();
    let by_maglev = many.begun([9, 10], |packet| many.xdp_round(packet, HOPS));
    drop(attached);
    assert_eq!(many.harness.reasons(), [], "nothing was refused");
    rows.extend([
        Row::new(group, "to another node (SNAT), new flow", begun, "ns", Some(target_new)),
        Row::new(group, "to another node by XDP, new flow", early, "ns", Some(500.0)),
        Row::new(group, "to another node by XDP, new flow by Maglev", by_maglev, "ns", Some(500.0)),
    ]);
    rows
}
