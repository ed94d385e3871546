//! A socket buffer at a tc hook.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::TcContext;

use crate::net::VLAN_ID;

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

    /// Whether the kernel has removed a VLAN tag of VLAN 0, which holds a priority only.
    #[inline(always)]
    pub fn has_priority_tag(self) -> bool {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { (*self.raw).vlan_present != 0 && (*self.raw).vlan_tci & VLAN_ID == 0 }
    }

    /// Returns the first argument for a subprogram.
    #[inline(always)]
    pub fn raw(self) -> *mut __sk_buff {
        self.raw
    }

    /// Returns the place of a note in front of the packet.
    #[inline(always)]
    pub fn note_at(self) -> Option<*mut [u32; 2]> {
        // SAFETY: as in `has_priority_tag`; the kernel converts both fields to addresses.
        let (at, data) = unsafe { ((*self.raw).data_meta as usize, (*self.raw).data as usize) };
        (at + size_of::<[u32; 2]>() <= data).then_some(at as *mut [u32; 2])
    }
}
