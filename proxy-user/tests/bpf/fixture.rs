//! Tests of one packet at one hook: the content of the maps, the packet, and the expected packet, verdict and counters.

use std::path::Path;

use libtest_mimic::Trial;
use proxy_common::reason::Reason;

use proxy_testbed::harness::{DROP, Harness, Hook, NEXT, REDIRECT, Service};
use proxy_testbed::packet::{ETHERNET, Packet};

/// The expected counters; all others must be zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub reasons: Vec<(Reason, u64)>,
    /// Service, reason, count.
    pub refusals: Vec<(u32, Reason, u64)>,
    /// Traffic of the first Service: connections, packets, bytes, reply packets, reply bytes.
    pub traffic: [u64; 5],
}

impl Counts {
    pub fn reason(reason: Reason) -> Self {
        Self { reasons: vec![(reason, 1)], ..Self::default() }
    }

    pub fn refusal(service: &Service, reason: Reason) -> Self {
        Self { refusals: vec![(service.id, reason, 1)], ..Self::reason(reason) }
    }
}

/// One test: a packet at a hook, and the expected result.
#[derive(Clone)]
pub struct Fixture {
    what: String,
    services: Vec<Service>,
    before: Vec<(Hook, Vec<u8>)>,
    hook: Hook,
    packet: Vec<u8>,
    verdict: i32,
    out: Vec<u8>,
    /// Packets that run before this one in the same maps: a description, the packet, and the expected packet.
    row: Vec<(String, Vec<u8>, Vec<u8>)>,
    counts: Counts,
}

impl Fixture {
    /// Creates a test which expects that the packet passes unchanged and that nothing is counted.
    pub fn new(what: impl Into<String>, services: &[&Service], hook: Hook, packet: Vec<u8>) -> Self {
        Self {
            what: what.into(),
            services: services.iter().map(|service| (*service).clone()).collect(),
            before: Vec::new(),
            hook,
            out: packet.clone(),
            packet,
            verdict: NEXT,
            row: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Runs these packets first.
    pub fn after(self, before: &[(Hook, &Packet)]) -> Self {
        Self { before: before.iter().map(|(hook, packet)| (*hook, packet.bytes())).collect(), ..self }
    }

    /// Expects that the program rewrites the packet to `out`.
    pub fn becomes(self, out: &Packet) -> Self {
        Self { out: out.bytes(), ..self }
    }

    /// Expects that the program sends `out` as an answer.
    pub fn answered(self, out: Vec<u8>) -> Self {
        Self { out, verdict: REDIRECT, ..self }
    }

    pub fn dropped(self) -> Self {
        Self { verdict: DROP, ..self }
    }

    pub fn counted(self, counts: Counts) -> Self {
        Self { counts, ..self }
    }

    /// Expects that the program rewrites the packet to these bytes.
    pub fn becomes_bytes(self, out: Vec<u8>) -> Self {
        Self { out, ..self }
    }

    /// Runs other packets before this one: each must pass and become the packet in its row, and none may change a counter.
    pub fn with_row(self, row: Vec<(String, Vec<u8>, Vec<u8>)>) -> Self {
        Self { row, ..self }
    }

    /// Expects that the earlier packets and this one are counted as traffic of a known flow of the first Service.
    pub fn with_traffic(mut self, connections: u64) -> Self {
        self = self.with_traffic_before(connections);
        self.count(self.hook, self.packet.len());
        self
    }

    /// Like `with_traffic`, but this packet is not counted.
    pub fn with_traffic_before(mut self, connections: u64) -> Self {
        self.counts.traffic[0] = connections;
        let packets: Vec<_> = self.before.iter().map(|(hook, bytes)| (*hook, bytes.len())).collect();
        for (hook, length) in packets {
            self.count(hook, length);
        }
        self
    }

    fn count(&mut self, hook: Hook, length: usize) {
        let at = if hook == Hook::Ingress { 1 } else { 3 };
        self.counts.traffic[at] += 1;
        self.counts.traffic[at + 1] += (length - ETHERNET) as u64;
    }

    /// Returns the test as a trial; `early`: XDP runs before tc.
    pub fn trial(self, bpffs: &Path, early: bool) -> Trial {
        let bpffs = bpffs.to_owned();
        let what = if early { format!("XDP: {}", self.what) } else { self.what.clone() };
        Trial::test(what, move || {
            Harness::with(&bpffs, 64, early, |harness| self.check(harness));
            Ok(())
        })
    }

    fn check(&self, harness: &mut Harness) {
        harness.serve(&self.services);
        for (hook, packet) in &self.before {
            harness.run(*hook, packet);
        }
        for (what, packet, out) in &self.row {
            let seen = harness.run(self.hook, packet);
            assert_eq!(seen.verdict, NEXT, "the verdict: {what}");
            assert_eq!(Hex(&seen.packet), Hex(out), "the packet: {what}");
        }
        let seen = harness.run(self.hook, &self.packet);
        assert_eq!(seen.verdict, self.verdict, "the verdict");
        assert_eq!(Hex(&seen.packet), Hex(&self.out), "the packet");
        let stats = self.services.first().map(|service| harness.stats(service.id)).unwrap_or_default();
        let counts = Counts {
            reasons: harness.reasons(),
            refusals: harness.refusals(),
            traffic: [stats.connections, stats.packets, stats.bytes, stats.reply_packets, stats.reply_bytes],
        };
        assert_eq!(counts, self.counts, "the counters");
    }
}

/// Bytes that a failed assertion shows in hexadecimal, 16 on each line.
#[derive(PartialEq, Eq)]
struct Hex<'a>(&'a [u8]);

impl std::fmt::Debug for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            match position % 16 {
                0 => write!(f, "\n    {byte:02x}")?,
                even if even % 2 == 0 => write!(f, " {byte:02x}")?,
                _ => write!(f, "{byte:02x}")?,
            }
        }
        Ok(())
    }
}
