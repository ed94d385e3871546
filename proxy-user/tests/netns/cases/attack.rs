//! Hostile packets from outside: floods, forged sources, fragments and scans, while marked connections continue.
//!
//! To add an attack, add a function on [`Scene`] here; attacks on single TCP connections are in `forged.rs`. Each
//! attack sends a bounded number of packets, and ends with three checks: a new client gets through, the marked
//! connections have lost nothing, and every drop is counted under its reason.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_common::reason::Reason;
use proxy_user::maps::view::View;

use super::exposed::{NODE_PORTS, is_sent_on, node_ip, open_up};
use super::held::{self, Sink};
use super::{Case, client_ip};
use crate::fixture::{Fixture, Wish, eventually, nft};
use crate::peer::{Attempt, SocketKind};
use crate::raw::{self, ACK, SYN, Segment, Wire};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};
use proxy_testbed::space::Space;

/// A wish with a small flow table, which an attacker fills with few packets.
macro_rules! few_flows {
    ($($flag:literal),*) => {
        Wish {
            pods: 2,
            services: &[],
            #[rustfmt::skip]
            flags: &[
                $($flag,)*
                "--service-cidrs", "10.96.0.0/16,fd96::/112",
                "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
                "--max-flows", "4096", "--max-sockets", "4096",
            ],
        }
    };
}
pub(super) use few_flows;

const WISH: Wish = few_flows!();

pub const CASES: &[Case] = &[
    Case { name: "attack::clients_are_served_a_minute_after_a_syn_flood", wish: WISH, run: a_minute_after },
    Case { name: "attack::answered_syn_flood_disturbs_no_client", wish: WISH, run: syn_answered },
    Case { name: "attack::unanswered_syn_flood_disturbs_no_client", wish: WISH, run: syn_unanswered },
    Case { name: "attack::syn_flood_with_blind_acks_disturbs_no_client", wish: WISH, run: syn_and_ack },
    Case { name: "attack::udp_flood_disturbs_no_client", wish: WISH, run: udp_flood },
    Case { name: "attack::martian_sources_are_dropped", wish: WISH, run: martians },
    Case {
        name: "attack::pod_source_at_the_uplink_is_dropped",
        wish: few_flows!("--detect-local-mode", "ClusterCIDR", "--cluster-cidr", "10.99.0.0/16,fd99::/16"),
        run: pods_source,
    },
    Case { name: "attack::overlapping_fragments_disturb_no_client", wish: WISH, run: fragments },
    Case { name: "attack::port_scan_disturbs_no_client", wish: WISH, run: scan },
];

/// Number of forged packets of a flood: more than the flow table holds.
const FLOOD: u32 = 7_000;
/// Number of connections in each family that must not be affected.
const MARKED: usize = 500;
/// Number of forged packets between two new clients.
const NEW_EVERY: u32 = 350;
/// After so many failed new clients, no more are tried: each of them takes its whole timeout.
const ENOUGH: u32 = 3;

/// The fixture of an attack, and the attacker's device.
pub(super) struct Scene<'a> {
    pub fixture: &'a Fixture,
    /// Sends from the client's namespace to the node.
    pub wire: Wire,
}

/// Returns the source of the forged packet with this number; no host has these addresses.
fn forged(family: Family, number: u32) -> SocketAddr {
    let [.., a, b] = number.to_be_bytes();
    let ip: IpAddr = match family {
        Family::V4 => Ipv4Addr::new(198, 18, a, b).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 5, 0, 0, 0, a.into(), b.into()).into(),
    };
    (ip, 1024 + (number % 60_000) as u16).into()
}

/// Installs counters of the forged SYNs that arrive in a pod.
fn count_syns(pod: &Space) -> Result<()> {
    let rules = "table inet flood {\ncounter V4 { }\ncounter V6 { }\nchain come {\n\
         type filter hook prerouting priority -400\n\
         ip saddr 198.18.0.0/15 tcp flags & (syn | ack | rst | fin) == syn counter name V4\n\
         ip6 saddr 2001:db8::/32 tcp flags & (syn | ack | rst | fin) == syn counter name V6\n}\n}\n";
    nft(pod, rules)
}

impl<'a> Scene<'a> {
    /// Creates the Service `held` with these endpoints, and opens the marked connections.
    pub fn new(fixture: &'a Fixture, pods: &[(u8, bool)], marked: usize) -> Result<Self> {
        open_up(fixture)?;
        // Packets to addresses that no host has end here, instead of circulating.
        fixture.client_space.ip("route add blackhole 198.18.0.0/15\nroute add blackhole 2001:db8::/32\n")?;
        pods.iter().try_for_each(|(pod, _)| held::serve(fixture, *pod))?;
        fixture.in_pod_space(0, count_syns)?;
        held::put(fixture, pods)?;
        held::hold(fixture, marked)?;
        let wire = Wire::new(&fixture.client_space, "eth0", (&fixture.node, "c0"))?;
        Ok(Self { fixture, wire })
    }

    /// Sends these packets, a bounded number at once.
    fn flood(&self, packets: impl IntoIterator<Item = Vec<u8>>) -> Result<()> {
        for (number, packet) in packets.into_iter().enumerate() {
            self.wire.send(&packet)?;
            if number % 32 == 31 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Sends a flood of SYNs, with new clients in between; returns how many of these failed to get through at once, and
    /// how many tried.
    fn syns(&self, family: Family, and_ack: bool) -> Result<(u32, u32)> {
        let to = held::node_port(family, true);
        let (mut asked, mut failed) = (0, 0);
        let before = self.arrived(family)?;
        for number in 0..FLOOD {
            let seq = number.wrapping_mul(2_654_435_761);
            let syn = Segment { from: forged(family, number), to, flags: SYN, seq, ack: 0 };
            let ack = Segment { flags: ACK, seq: seq.wrapping_add(1), ack: seq ^ 0x5555_5555, ..syn };
            self.flood([Some(syn), and_ack.then_some(ack)].into_iter().flatten().map(Segment::packet))?;
            if number % 32 == 31 {
                std::thread::sleep(Duration::from_millis(1));
            }
            if number % NEW_EVERY == NEW_EVERY - 1 {
                // A device's queue holds 1,000 packets: wait until it is empty before the next packets.
                eventually(Duration::from_secs(10), || {
                    let arrived = self.arrived(family)? - before;
                    ensure!(arrived > u64::from(number), "{arrived} of {} SYNs arrived", number + 1);
                    Ok(())
                })?;
                if failed < ENOUGH {
                    asked += 1;
                    failed += u32::from(!self.gets_through(family)?);
                }
            }
        }
        Ok((failed, asked))
    }

    /// Whether the first SYN of a new client is answered, however long the machine takes.
    fn gets_through(&self, family: Family) -> Result<bool> {
        let attempt = Attempt { patience: 5, ..Attempt::new(SocketKind::Tcp, held::node_port(family, true)) };
        Ok(self.fixture.client.once(attempt)?.is_ok_and(|seen| seen.syn_retransmits == 0))
    }

    /// Returns how many forged SYNs have arrived at the endpoint so far.
    fn syns_that_came(&self, family: Family) -> Result<u64> {
        self.fixture.in_pod_space(0, |pod| {
            let name = format!("{family:?}");
            let output =
                pod.command("nft").args(["-j", "list", "counter", "inet", "flood", &name]).output()?;
            let listed: serde_json::Value = serde_json::from_slice(&output.stdout)?;
            listed["nftables"][1]["counter"]["packets"].as_u64().with_context(|| format!("{listed}"))
        })
    }

    fn reason(&self, reason: Reason) -> Result<u64> {
        let reasons = View::open(&self.fixture.bpffs())?.reasons()?;
        reasons.get(&reason).copied().context("no such reason")
    }

    /// Returns how many packets have arrived at the endpoint, or were dropped because the flow table was full, so far.
    fn arrived(&self, family: Family) -> Result<u64> {
        Ok(self.syns_that_came(family)? + self.reason(Reason::FlowTableFull)?)
    }

    fn flood_in_both_families(&self, and_ack: bool) -> Result<()> {
        for family in Family::BOTH {
            let before = self.reason(Reason::FlowTableFull)?;
            let (failed, asked) = self.syns(family, and_ack)?;
            let came = self.syns_that_came(family)?;
            let dropped = self.reason(Reason::FlowTableFull)? - before;
            let counts =
                format!("{family:?}: of {FLOOD} SYNs {came} came, and {dropped} packets are counted");
            ensure!(failed == 0, "{counts}; {failed} of {asked} new clients were not served at once");
            // Some of the dropped packets may be ACKs.
            let is_reported =
                came + dropped == u64::from(FLOOD) || (and_ack && came + dropped > u64::from(FLOOD));
            ensure!(is_reported, "{counts}");
        }
        held::nothing_is_lost(self.fixture, "after the flood").map(drop)
    }
}

fn syn_answered(fixture: &Fixture) -> Result<()> {
    Scene::new(fixture, &[(0, true)], MARKED)?.flood_in_both_families(false)
}

fn a_minute_after(fixture: &Fixture) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true)], MARKED)?;
    for family in Family::BOTH {
        scene.syns(family, false)?;
    }
    // Half-open connections may stay for 60 s.
    std::thread::sleep(Duration::from_secs(61));
    for family in Family::BOTH {
        for client in 0..20 {
            ensure!(scene.gets_through(family)?, "{family:?}: new client {client} was not served at once");
        }
    }
    held::nothing_is_lost(fixture, "a minute after the flood").map(drop)
}

fn syn_unanswered(fixture: &Fixture) -> Result<()> {
    fixture.in_pod_space(0, |pod| {
        pod.ip("route add blackhole 198.18.0.0/15\nroute add blackhole 2001:db8::/32\n")
    })?;
    Scene::new(fixture, &[(0, true)], MARKED)?.flood_in_both_families(false)
}

fn syn_and_ack(fixture: &Fixture) -> Result<()> {
    Scene::new(fixture, &[(0, true)], MARKED)?.flood_in_both_families(true)
}

/// Checks that each datagram arrives at the endpoint, or its drop is counted; half of them are answered.
fn udp_flood(fixture: &Fixture) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true)], MARKED)?;
    for family in Family::BOTH {
        let (sink, to) = (Sink::new(fixture, family, 0)?, held::node_port(family, false));
        let before = scene.reason(Reason::FlowTableFull)?;
        let (mut came, mut failed) = (0, 0);
        for number in 0..FLOOD {
            scene.flood([raw::udp(forged(family, number), to, b"flood")])?;
            if number % 128 == 127 || number + 1 == FLOOD {
                let datagrams = sink.take(Duration::from_millis(5))?;
                came += datagrams.len() as u64;
                for (_, from) in datagrams.iter().step_by(2) {
                    // The answer goes to the forged client's own port and address: no host is there to refuse it.
                    sink.answer(*from)?;
                }
            }
            if number % NEW_EVERY == NEW_EVERY - 1 && failed < ENOUGH {
                failed += u32::from(!scene.gets_through(family)?);
            }
        }
        came += sink.take(Duration::from_millis(200))?.len() as u64;
        let dropped = scene.reason(Reason::FlowTableFull)? - before;
        let counts =
            format!("{family:?}: of {FLOOD} datagrams {came} came, {dropped} are counted as dropped");
        ensure!(failed == 0, "{counts}; {failed} new clients were not served at once");
        ensure!(came + dropped == u64::from(FLOOD), "{counts}");
    }
    held::nothing_is_lost(fixture, "after the flood").map(drop)
}

/// Returns sources that no packet from outside can have.
fn impossible(family: Family) -> Vec<IpAddr> {
    let texts: &[&str] = match family {
        Family::V4 => &[
            "127.0.0.1",
            "127.1.2.3",
            "10.98.0.1",
            "10.99.0.1",
            "224.0.0.1",
            "239.1.2.3",
            "255.255.255.255",
            "0.0.0.0",
        ],
        Family::V6 => &["::1", "::", "fd98::1", "fd99::1", "ff02::1", "ff0e::5"],
    };
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// Sends packets of each source by UDP and TCP; checks that none arrives at an endpoint, and all are counted.
fn refused_as_martian(scene: &Scene<'_>, sources: &[IpAddr], what: &str) -> Result<()> {
    const EACH: usize = 8;
    let mut wrong = Vec::new();
    for ip in sources {
        let family = Family::of(*ip);
        let sink = Sink::new(scene.fixture, family, 0)?;
        let before = scene.reason(Reason::MartianSource)?;
        let from: SocketAddr = (*ip, 4242).into();
        for _ in 0..EACH {
            scene.wire.send(&raw::udp(from, held::node_port(family, false), b"martian"))?;
            let to = held::node_port(family, true);
            scene.wire.send(&Segment { from, to, flags: SYN, seq: 1, ack: 0 }.packet())?;
        }
        let came = sink.take(Duration::from_millis(50))?;
        let counted = scene.reason(Reason::MartianSource)? - before;
        if !came.is_empty() || counted != 2 * EACH as u64 {
            let seen = came.first().map(|(_, from)| *from);
            wrong.push(format!(
                "{ip}: {} came, from {seen:?}; {counted} of {} counted",
                came.len(),
                2 * EACH
            ));
        }
    }
    ensure!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
    Ok(())
}

fn martians(fixture: &Fixture) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true)], MARKED)?;
    let sources: Vec<_> = Family::BOTH.into_iter().flat_map(impossible).collect();
    let near = refused_as_martian(&scene, &sources, "endpoint on this node");
    held::put(fixture, &[(0, false)])?;
    for family in Family::BOTH {
        is_sent_on(fixture, held::node_port(family, true), SocketKind::Tcp)?;
    }
    let far = refused_as_martian(&scene, &sources, "endpoint on another node");
    let counts = [near, far].into_iter().filter_map(Result::err).map(|error| error.to_string());
    let counts: Vec<_> = counts.collect();
    ensure!(counts.is_empty(), "{}", counts.join("\n"));
    held::nothing_is_lost(fixture, "after forged sources").map(drop)
}

fn pods_source(fixture: &Fixture) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true)], MARKED)?;
    // Replies to these sources leave by a pod's device, and not by the device on which the packets arrive.
    let sources: Vec<_> = Family::BOTH.into_iter().flat_map(|f| [pod_ip(f, 0), pod_ip(f, 1)]).collect();
    refused_as_martian(&scene, &sources, "a pod's address at the uplink")?;
    held::nothing_is_lost(fixture, "after forged sources").map(drop)
}

fn fragments(fixture: &Fixture) -> Result<()> {
    const COUNT: u16 = 50;
    let scene = Scene::new(fixture, &[(0, true)], MARKED)?;
    for family in Family::BOTH {
        let (sink, to) = (Sink::new(fixture, family, 0)?, held::node_port(family, false));
        let from = |number: u16| SocketAddr::from((client_ip(family), 20_000 + number));
        let data = [b'f'; 120];
        // Check that fragments work: each datagram arrives whole behind the Service.
        for number in 0..COUNT {
            for piece in raw::udp_fragments(from(number), to, &data, number, 64) {
                scene.wire.send(&piece)?;
            }
        }
        let came = sink.take(Duration::from_millis(200))?;
        let whole = came.iter().filter(|(text, _)| *text == data).count();
        ensure!(whole == usize::from(COUNT), "{family:?}: {whole} of {COUNT} came whole");
        // Overlapping fragments: RFC 5722 and the kernel drop the packet. No part of it may arrive, by any path.
        for number in 0..COUNT {
            for piece in raw::udp_fragments(from(1000 + number), to, &data, 1000 + number, 8) {
                scene.wire.send(&piece)?;
            }
        }
        let came = sink.take(Duration::from_millis(200))?;
        ensure!(came.is_empty(), "{family:?}: {} packets of overlapping fragments came", came.len());
        // Without a first fragment, the flow of a fragment is unknown.
        let before = scene.reason(Reason::FragmentWithoutFirst)?;
        for number in 0..COUNT {
            let [_, second] = raw::udp_fragments(from(2000 + number), to, &data, 2000 + number, 64);
            let cluster = (cluster_ip(family, held::NUMBER), 53).into();
            let [_, lone] = raw::udp_fragments(from(3000 + number), cluster, &data, 3000 + number, 64);
            scene.wire.send(&second)?;
            scene.wire.send(&lone)?;
        }
        let came = sink.take(Duration::from_millis(100))?;
        ensure!(came.is_empty(), "{family:?}: {} packets of lone fragments came", came.len());
        // Fragments to an address of the node itself pass, and the kernel discards them.
        let counted = scene.reason(Reason::FragmentWithoutFirst)? - before;
        ensure!(counted == u64::from(COUNT), "{family:?}: {counted} of {COUNT} lone fragments counted");
    }
    held::nothing_is_lost(fixture, "after fragments").map(drop)
}

/// Scans ports of a ClusterIP, addresses of the Service range, and ports of the node.
fn scan(fixture: &Fixture) -> Result<()> {
    const PORTS: u16 = 2000;
    let scene = Scene::new(fixture, &[(0, true)], MARKED)?;
    let flows = || Ok::<_, anyhow::Error>(View::open(&fixture.bpffs())?.flow_counts()?.live());
    for family in Family::BOTH {
        let from: SocketAddr = (client_ip(family), 4343).into();
        let syn = |to| Segment { from, to, flags: SYN, seq: 7, ack: 0 }.packet();
        let before = flows()?;
        let counted = |reasons: &[Reason]| reasons.iter().map(|one| scene.reason(*one)).sum::<Result<u64>>();
        // Packets that get no answer because there are too many are also counted under another reason.
        let refusals = [Reason::UndefinedPort];
        let (refused, unknown) = (counted(&refusals)?, counted(&[Reason::UnallocatedAddress])?);
        let cluster = cluster_ip(family, held::NUMBER);
        scene.flood((1000..1000 + PORTS).map(|port| syn((cluster, port).into())))?;
        scene.flood((100..200).map(|number| syn((cluster_ip(family, number), 80).into())))?;
        let first = NODE_PORTS[0] + 100;
        scene.flood((first..first + PORTS).map(|port| syn((node_ip(family), port).into())))?;
        let (refused, unknown) =
            (counted(&refusals)? - refused, counted(&[Reason::UnallocatedAddress])? - unknown);
        ensure!(refused == u64::from(PORTS), "{family:?}: {refused} of {PORTS} scanned ports are counted");
        ensure!(unknown == 100, "{family:?}: {unknown} of 100 scanned addresses are counted");
        ensure!(flows()? <= before, "{family:?}: a scan made flows: {} after {before}", flows()?);
        ensure!(scene.gets_through(family)?, "{family:?}: a new client is not served at once");
    }
    held::nothing_is_lost(fixture, "after the scan").map(drop)
}
