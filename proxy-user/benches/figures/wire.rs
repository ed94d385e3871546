//! Frames on a veth pair that runs XDP natively: generator, node and sink on one CPU.
//!
//! ```text
//! generator (a test run with live frames) -> up1 ~~ up0: the program that is measured -> back -> up1: XDP_DROP
//! ```
//!
//! The generator writes all headers of every frame, because frames return to it changed. The time is that of a frame's
//! whole path; all sides have the same generator and sink, and are measured in turn.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use aya::programs::{SchedClassifier, TcAttachType, Xdp, XdpMode};

use crate::packets::{Bench, frontend};
use proxy_testbed::Family;
use proxy_testbed::node::{know, uplink};
use proxy_testbed::one_cpu::OneCpu;
use proxy_testbed::packet::{ACK, Packet, SYN};
use proxy_testbed::report::{Row, Sample};

/// Frames of one measurement, and how many of them the generator sends at once.
const FRAMES: u32 = 100_000;
const BATCH: u32 = 64;
const ROUNDS: usize = 15;
/// Number of Services; those with odd numbers have the same port, and new flows go to these.
const SERVICES: u32 = 64;

/// Commands and numbers of `uapi/linux/bpf.h` and `if_link.h`.
const PROG_LOAD: libc::c_long = 5;
const PROG_TEST_RUN: libc::c_long = 10;
const LINK_CREATE: libc::c_long = 28;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const XDP_FLAGS_DRV_MODE: u32 = 4;
const LIVE_FRAMES: u32 = 2;

/// Verdicts of XDP.
const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;

/// Calls bpf(2) with a command and the start of `union bpf_attr` as words.
fn bpf(command: libc::c_long, attr: &mut [u32]) -> io::Result<RawFd> {
    // SAFETY: the callers write valid members of `union bpf_attr`.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_mut_ptr(), size_of_val(attr)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

/// Returns an address as two words, the lower half first.
fn halves<T>(pointer: *const T) -> [u32; 2] {
    let address = pointer as u64;
    [address as u32, (address >> 32) as u32]
}

/// An XDP program in BPF machine code.
#[derive(Default)]
struct Assembly(Vec<u64>);

impl Assembly {
    fn op(mut self, code: u8, dst: u8, src: u8, offset: i16, immediate: u32) -> Self {
        let registers = u64::from(src << 4 | dst);
        let offset = u64::from(offset.cast_unsigned());
        self.0.push(u64::from(code) | registers << 8 | offset << 16 | u64::from(immediate) << 32);
        self
    }

    /// Loads the start of the frame into r7, of which the program may then read and write `length` bytes; it passes shorter
    /// frames.
    fn frame(self, length: u32) -> Self {
        let loads = self.op(0x61, 7, 1, 0, 0).op(0x61, 3, 1, 4, 0);
        let checks = loads.op(0xbf, 4, 7, 0, 0).op(0x07, 4, 0, 0, length).op(0xbd, 4, 3, 2, 0);
        checks.verdict(XDP_PASS)
    }

    fn verdict(self, verdict: u32) -> Self {
        self.op(0xb7, 0, 0, 0, verdict).op(0x95, 0, 0, 0, 0)
    }

    fn load(&self) -> OwnedFd {
        let license = c"GPL";
        let mut log = vec![0_u8; 1 << 16];
        let mut attr = vec![PROG_TYPE_XDP, self.0.len() as u32];
        attr.extend(halves(self.0.as_ptr()));
        attr.extend(halves(license.as_ptr()));
        attr.extend([1, log.len() as u32]);
        attr.extend(halves(log.as_mut_ptr()));
        let program = bpf(PROG_LOAD, &mut attr);
        assert!(program.is_ok(), "{program:?}: {}", String::from_utf8_lossy(&log));
        // SAFETY: the kernel has just created this file descriptor.
        unsafe { OwnedFd::from_raw_fd(program.unwrap()) }
    }
}

/// Returns a program that writes `bytes` to each frame and sends it; with `vary`, each time from another address and port,
/// to another Service.
fn generator(bytes: &[u8], vary: bool) -> OwnedFd {
    let words = bytes.as_chunks::<4>().0;
    let mut assembly = Assembly::default().frame(bytes.len() as u32 / 4 * 4);
    for (offset, word) in (0..).step_by(4).zip(words) {
        assembly = assembly.op(0x62, 7, 0, offset, u32::from_ne_bytes(*word));
    }
    if vary {
        // Two random bytes become the source port, two the lower half of the source address.
        assembly = assembly.op(0x85, 0, 0, 0, 7).op(0x6b, 7, 0, 34, 0);
        assembly = assembly.op(0x77, 0, 0, 0, 16).op(0x6b, 7, 0, 28, 0);
        // The destination is one of the Services with odd numbers.
        assembly = assembly.op(0x57, 0, 0, 0, SERVICES - 2).op(0x47, 0, 0, 0, 1).op(0x73, 7, 0, 33, 0);
    }
    assembly.verdict(XDP_TX).load()
}

/// Returns a program that swaps the MAC addresses and sends the frame back.
fn reflector() -> OwnedFd {
    let loads = Assembly::default().frame(12).op(0x61, 2, 7, 0, 0).op(0x69, 3, 7, 4, 0);
    let loads = loads.op(0x61, 4, 7, 6, 0).op(0x69, 5, 7, 10, 0);
    let stores = loads.op(0x63, 7, 4, 0, 0).op(0x6b, 7, 5, 4, 0).op(0x63, 7, 2, 6, 0).op(0x6b, 7, 3, 10, 0);
    stores.verdict(XDP_TX).load()
}

/// Attaches a program in driver mode, until the link is dropped.
fn attach(program: &OwnedFd, ifindex: u32) -> OwnedFd {
    let mut attr = [program.as_raw_fd().cast_unsigned(), ifindex, ATTACH_XDP, XDP_FLAGS_DRV_MODE];
    // SAFETY: the kernel has just created this file descriptor.
    unsafe { OwnedFd::from_raw_fd(bpf(LINK_CREATE, &mut attr).unwrap()) }
}

/// Sends frames on a device, and returns the nanoseconds per frame.
fn send(generator: &OwnedFd, bytes: &[u8], ifindex: u32) -> f64 {
    // A `struct xdp_md` with the length and the device.
    let context = [0, bytes.len() as u32, 0, ifindex, 0, 0];
    let mut attr = vec![generator.as_fd().as_raw_fd().cast_unsigned(), 0, bytes.len() as u32, 0];
    attr.extend(halves(bytes.as_ptr()));
    attr.extend([0, 0, FRAMES, 0, size_of_val(&context) as u32, 0]);
    attr.extend(halves(context.as_ptr()));
    attr.extend([0, 0, LIVE_FRAMES, 0, BATCH, 0]);
    let begun = Instant::now();
    bpf(PROG_TEST_RUN, &mut attr).unwrap();
    begun.elapsed().as_nanos() as f64 / f64::from(FRAMES)
}

/// The program on `up0` besides `tc_ingress`: an XDP program of this file, Ballast's, or none.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Own(usize),
    Native,
    Tc,
}

struct Case<'a> {
    side: Side,
    frames: &'a (OwnedFd, Vec<u8>),
    /// Whether the frames have to be translated.
    is_ours: bool,
}

impl Bench {
    fn xdp(&mut self) -> &mut Xdp {
        self.harness.ebpf.program_mut("xdp_ingress").unwrap().try_into().unwrap()
    }
}

/// Returns the nanoseconds per frame.
fn measure_case(bench: &mut Bench, own: &[OwnedFd], case: &Case<'_>, sink: u32) -> f64 {
    let packets = |bench: &Bench| (1..=SERVICES).map(|id| bench.harness.stats(id).packets).sum::<u64>();
    let before = packets(bench);
    let (program, bytes) = case.frames;
    let time = match case.side {
        Side::Own(which) => {
            let _link = attach(&own[which], uplink());
            send(program, bytes, sink)
        }
        Side::Native => {
            let xdp = bench.xdp().attach_to_if_index(uplink(), XdpMode::Driver).unwrap();
            let time = send(program, bytes, sink);
            bench.xdp().detach(xdp).unwrap();
            time
        }
        Side::Tc => send(program, bytes, sink),
    };
    let translated = packets(bench) - before;
    let wanted = if case.is_ours { u64::from(FRAMES) } else { 0 };
    // Frames that wait in the device's ring are processed too late for this count.
    assert!(translated.abs_diff(wanted) <= 1_000, "{translated} of {wanted} frames were translated");
    time
}

/// Measures all figures of this file.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    let mut bench = Bench::new(bpffs, Family::V4, SERVICES);
    know(Family::V4, &bench.harness);
    let index = |name: &str| {
        let shown = Command::new("ip").args(["-o", "link", "show", name]).output().unwrap();
        String::from_utf8(shown.stdout).unwrap().split(':').next().unwrap().trim().parse::<u32>().unwrap()
    };
    let _pinned = OneCpu::pin();
    let (node, outside) = (uplink(), index("up1"));
    assert_eq!(node, index("up0"));
    let tc: &mut SchedClassifier = bench.harness.ebpf.program_mut("tc_ingress").unwrap().try_into().unwrap();
    tc.attach("up0", TcAttachType::Ingress).unwrap();
    // Without an XDP program, a device accepts frames from its peer's XDP only if it has GRO.
    let gro = Command::new("ethtool").args(["-K", "up0", "gro", "on"]).status().unwrap();
    assert!(gro.success());
    let _sink = attach(&Assembly::default().verdict(XDP_DROP).load(), outside);
    let own = [reflector(), Assembly::default().verdict(XDP_PASS).load()];
    let frames = |flags, to, vary| {
        let client = Family::V4.client(1, 40_000);
        let mut bytes = Packet { payload: vec![0; 6], ..Packet::tcp(flags, client, to) }.bytes();
        bytes.truncate(60);
        (generator(&bytes, vary), bytes)
    };
    let service = frontend(Family::V4, 1);
    let [known, new, foreign] =
        [(ACK, service, false), (SYN, service, true), (ACK, Family::V4.pod(9, 22), false)]
            .map(|(flags, to, vary)| frames(flags, to, vary));
    let cases = [
        Case { side: Side::Own(0), frames: &known, is_ours: false },
        Case { side: Side::Native, frames: &known, is_ours: true },
        Case { side: Side::Tc, frames: &known, is_ours: true },
        Case { side: Side::Native, frames: &new, is_ours: true },
        Case { side: Side::Own(1), frames: &foreign, is_ours: false },
        Case { side: Side::Native, frames: &foreign, is_ours: false },
    ];
    let mut times = [const { Vec::new() }; 6];
    for _ in 0..ROUNDS {
        for (times, case) in times.iter_mut().zip(&cases) {
            times.push(measure_case(&mut bench, &own, case, outside));
        }
    }
    let [reflect, known, tc, new, pass, foreign] = times.map(Sample::median);
    let group = "XDP on a veth pair, one CPU";
    let row = |what: &str, one: Sample, other: Sample, target| {
        Row::new(group, what, one.value / other.value, "x", target)
    };
    vec![
        Row::new(group, "a frame that is sent back with its MACs swapped", reflect, "ns", None),
        Row::new(group, "a frame of a known flow", known, "ns", None),
        row("the same, to the one sent back", known, reflect, Some(1.0 / 0.60)),
        row("a frame that begins a flow, to the one sent back", new, reflect, Some(1.0 / 0.30)),
        row("a foreign frame, to XDP_PASS", foreign, pass, Some(1.0 / 0.93)),
        row("a frame of a known flow, to the same by tc", known, tc, Some(1.0 / 1.8)),
    ]
}
