//! XDP on the uplink, before tc.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::HashMap;
use aya::programs::Xdp;
use proxy_common::map_names as names;

use super::Kernel;
use crate::raw;
use crate::target::{Device, Outcome, Seen};
use crate::tunnel::taken_out;

/// Lengths of the frames that XDP runs on, in bytes: at least an Ethernet header, and no more than a test run puts into one
/// buffer.
const LENGTHS: std::ops::RangeInclusive<usize> = 14..=3000;

const PROGRAM: &str = "xdp_ingress";

/// Verdicts of XDP.
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;
const XDP_REDIRECT: i32 = 4;

/// Number of packets that XDP has processed without passing them to tc.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Returns how many packets XDP has processed without passing them to tc.
pub fn taken() -> u64 {
    TAKEN.load(Ordering::Relaxed)
}

impl Kernel {
    /// Like [`Kernel::new`], with XDP on the uplink.
    pub fn early(bpffs: &Path, number: u64) -> Self {
        let mut kernel = Self { early: true, ..Self::new(bpffs, number) };
        let program: &mut Xdp = kernel.ebpf.program_mut(PROGRAM).unwrap().try_into().unwrap();
        program.load().unwrap();
        let uplink = kernel.device(Device::Uplink);
        let map = kernel.ebpf.map_mut(names::XDP_DEVICES).unwrap();
        let mut devices: HashMap<_, u32, u32> = map.try_into().unwrap();
        devices.insert(uplink, 1, 0).unwrap();
        kernel
    }

    /// Runs XDP on a packet. Returns the result as a tc verdict, or `None` if XDP passes the packet to tc: unchanged, or without its
    /// outer header and with a note in front of it. A test run of tc takes no note, so it gets the packet as it came.
    pub(super) fn run_early(&mut self, packet: &[u8], device: u32) -> Result<Option<Seen>, String> {
        if !LENGTHS.contains(&packet.len()) {
            return Ok(None);
        }
        // A `struct xdp_md` with the length and the device.
        let mut context = [0; 24];
        context[4..8].copy_from_slice(&(packet.len() as u32).to_ne_bytes());
        context[12..16].copy_from_slice(&device.to_ne_bytes());
        let program: &Xdp = self.ebpf.program(PROGRAM).unwrap().try_into().unwrap();
        let fd = program.fd().unwrap().as_fd();
        let result = raw::test_run(fd, packet, &context, false, &mut self.buffer);
        let (verdict, length) = result.map_err(|error| format!("the kernel does not run XDP: {error}"))?;
        let after = &self.buffer[..length];
        let outcome = match verdict {
            XDP_PASS if after == packet || is_taken_out(packet, after) => return Ok(None),
            XDP_PASS => return Err("XDP has changed what it leaves to tc".into()),
            XDP_DROP => Outcome::Drop,
            XDP_TX | XDP_REDIRECT => Outcome::Redirect,
            other => return Err(format!("XDP's verdict {other}")),
        };
        TAKEN.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Seen { outcome, packet: after.to_vec(), is_sum_wrong: false }))
    }
}

/// Bytes of a note.
const NOTE: usize = 8;

/// Whether `after` is the frame inside an encapsulated frame, with a note in front of it.
fn is_taken_out(frame: &[u8], after: &[u8]) -> bool {
    let is = |(note, inner): (&[u8], &[u8])| {
        taken_out(frame).is_some_and(|(_, bytes)| bytes == inner) && note.iter().any(|byte| *byte != 0)
            // The driver had no room, and the frame is unchanged.
            || inner == frame && note == [0; NOTE]
    };
    after.split_at_checked(NOTE).is_some_and(is)
}
