//! XDP on the uplink, before tc.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::programs::Xdp;

use super::Kernel;
use crate::raw;
use crate::target::{Outcome, Seen};

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
        kernel
    }

    /// Runs XDP on a packet. Returns the result as a tc verdict, or `None` if XDP passes the packet unchanged to tc.
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
            XDP_PASS if after == packet => return Ok(None),
            XDP_PASS => return Err("XDP has changed what it leaves to tc".into()),
            XDP_DROP => Outcome::Drop,
            XDP_TX | XDP_REDIRECT => Outcome::Redirect,
            other => return Err(format!("XDP's verdict {other}")),
        };
        TAKEN.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Seen { outcome, packet: after.to_vec(), is_sum_wrong: false }))
    }
}
