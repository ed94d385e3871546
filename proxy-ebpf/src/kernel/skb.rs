//! A socket buffer at a tc hook.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;

/// A packet at a tc hook.
#[derive(Clone, Copy)]
pub struct Skb {
    raw: *mut __sk_buff,
}

impl Skb {
    /// Returns the packet of a program's context.
    #[inline(always)]
    pub fn new(context: &TcContext) -> Self {
        Self { raw: context.skb.skb }
    }

    /// Returns the packet of a subprogram's first argument.
    #[inline(always)]
    pub fn from_raw(raw: *mut __sk_buff) -> Self {
        Self { raw }
    }

    /// Returns the first argument for a subprogram.
    #[inline(always)]
    pub fn raw(self) -> *mut __sk_buff {
        self.raw
    }
}
