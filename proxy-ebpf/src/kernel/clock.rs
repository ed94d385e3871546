//! The program with which the agent reads the clocks that the programs use.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_ns};
use aya_ebpf::programs::TcContext;

use super::skb::Skb;
use crate::frame::Frame as _;
use crate::step::DROP;

/// Writes jiffies and nanoseconds of the monotonic clock over the first 16 bytes of the packet. Returns [`DROP`] if the
/// packet cannot be written.
#[inline(always)]
pub fn clock(context: &TcContext) -> i32 {
    // SAFETY: the helpers take nothing and cannot fail.
    let clocks = unsafe { [bpf_jiffies64(), bpf_ktime_get_ns()] };
    if Skb::new(context).store_all(0, &clocks).is_ok() { 0 } else { DROP }
}
