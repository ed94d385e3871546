//! A frame at the XDP hook, which is read and written directly. Operations that only tc needs return an error.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::helpers::generated as helper;
use aya_ebpf::programs::XdpContext;
use proxy_common::Address;
use proxy_common::flow::FlowKey;

use super::fib;
use super::maps::XDP_DEVICES;
use crate::frame::{self, Bounds, Checksum, Fib, Frame, HelperFailed, Route};
use crate::header::BROKEN;
use crate::net::ETHERNET;
use crate::stage::sctp;
use crate::step::{XDP_DROP, XDP_TX};

/// Offset of the Ethernet type.
const ETHERTYPE: usize = 12;

/// A frame at the XDP hook.
#[derive(Clone, Copy)]
pub struct Xdp {
    raw: *mut xdp_md,
}

impl Xdp {
    /// Returns the frame of a program's context.
    #[inline(always)]
    pub fn new(context: &XdpContext) -> Self {
        Self { raw: context.ctx }
    }

    /// Returns the frame of a subprogram's first argument.
    #[inline(always)]
    pub fn from_raw(raw: *mut xdp_md) -> Self {
        Self { raw }
    }

    /// Returns the first argument for a subprogram.
    #[inline(always)]
    pub fn raw(self) -> *mut xdp_md {
        self.raw
    }

    /// Returns the place of a note in front of the frame.
    #[inline(always)]
    fn note_at(self) -> Option<*mut [u32; 2]> {
        // SAFETY: the kernel hands every program a valid context, and turns both fields into addresses.
        let (at, data) = unsafe { ((*self.raw).data_meta as usize, (*self.raw).data as usize) };
        (at + size_of::<[u32; 2]>() <= data).then_some(at as *mut [u32; 2])
    }

    /// Moves the start of the frame by this number of bytes.
    #[inline(always)]
    fn adjust_head(self, bytes: i32) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the number.
        let result = unsafe { helper::bpf_xdp_adjust_head(self.raw, bytes) };
        if result == 0 { Ok(()) } else { Err(HelperFailed) }
    }
}

impl Frame for Xdp {
    const EARLY: bool = true;

    #[inline(always)]
    fn walk_extensions(self, _proto: u8, _offset: u32) -> u64 {
        // The next hook processes packets with extension headers.
        BROKEN
    }

    #[inline(always)]
    fn change_sctp_ports(self, at: u32, end: u32, old: u32, new: u32) -> Result<(), HelperFailed> {
        sctp::change_ports(self, at, end, old, new)
    }

    #[inline(always)]
    fn ethertype(self) -> u32 {
        match self.bounds().at::<u16>(ETHERTYPE) {
            // SAFETY: `at` found both bytes inside the frame.
            Some(found) => u32::from(unsafe { *found }),
            None => 0,
        }
    }

    #[inline(always)]
    fn link_header(self) -> usize {
        ETHERNET
    }

    #[inline(always)]
    fn has_vlan_tag(self) -> bool {
        // A tag in the frame has another Ethernet type. The agent does not attach the program to devices whose driver
        // removes the tag.
        false
    }

    #[inline(always)]
    fn length(self) -> u32 {
        let bounds = self.bounds();
        (bounds.end - bounds.data) as u32
    }

    #[inline(always)]
    fn gso_size(self) -> u32 {
        // In generic mode (XDP on socket buffers) GSO packets occur, but none of them has a complete checksum.
        0
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { (*self.raw).ingress_ifindex }
    }

    #[inline(always)]
    fn arrival(self) -> u32 {
        self.ifindex()
    }

    #[inline(always)]
    fn is_local_origin(self) -> bool {
        false
    }

    #[inline(always)]
    fn bounds(self) -> Bounds {
        // SAFETY: as in `ifindex`; the kernel turns both fields into addresses.
        let (data, end) = unsafe { ((*self.raw).data as usize, (*self.raw).data_end as usize) };
        // Of a packet in several buffers only the first buffer is accessible. The packet then looks malformed, and passes.
        Bounds { data, end, frame: end - data }
    }

    #[inline(always)]
    fn pull(self, _length: u32) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn load<T>(self, offset: u32, buffer: &mut T, length: u32) -> Result<(), HelperFailed> {
        let to = core::ptr::from_mut(buffer).cast();
        // SAFETY: `to` is writable for the size of `T`, and the verifier checks `length` against it.
        let result = unsafe { helper::bpf_xdp_load_bytes(self.raw, offset, to, length) };
        if result == 0 { Ok(()) } else { Err(HelperFailed) }
    }

    #[inline(always)]
    fn store<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        // SAFETY: XDP programs may write to frames.
        unsafe { frame::write(self.bounds(), offset, value, length) }
    }

    #[inline(always)]
    fn correct_pseudo(self, _offset: u32, _difference: u32, _kind: Checksum) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn correct_word(self, _offset: u32, _old: u32, _new: u32, _kind: Checksum) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn add_to_complete(self, _difference: u32) {}

    #[inline(always)]
    fn push_link_header(self, _bytes: u32) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn make_room(self, _bytes: u16) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn encapsulate(self, bytes: u16, _v6: bool) -> Result<(), HelperFailed> {
        self.adjust_head(-i32::from(bytes))
    }

    #[inline(always)]
    fn encapsulate_again(self, _bytes: u16) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn decapsulate(self, _bytes: u16, _mixed: bool, _v6: bool) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn add_note(self) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the number.
        let result = unsafe { helper::bpf_xdp_adjust_meta(self.raw, -fib::size::<[u32; 2]>()) };
        // The buffer may still hold the note of an earlier frame.
        if result == 0 { self.set_note([0; 2]) } else { Err(HelperFailed) }
    }

    #[inline(always)]
    fn set_note(self, note: [u32; 2]) -> Result<(), HelperFailed> {
        let at = self.note_at().ok_or(HelperFailed)?;
        // SAFETY: `note_at` has checked the size; XDP programs may write here.
        unsafe { *at = note };
        Ok(())
    }

    #[inline(always)]
    fn cut_head(self, bytes: u32) -> Result<(), HelperFailed> {
        self.adjust_head(bytes.cast_signed())
    }

    #[inline(always)]
    fn replace(self, _length: u32, _l4: u32) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }

    #[inline(always)]
    fn has_connection<A: Address>(self, _: &FlowKey<A>) -> bool {
        false
    }

    #[inline(always)]
    fn fib_lookup<A: Address>(self, src: &A, dst: &A, length: u32, route: &mut Route) -> Fib {
        // SAFETY: a valid context.
        unsafe { fib::lookup(self.raw.cast(), self.ifindex(), src, dst, length, route, true) }
    }

    #[inline(always)]
    fn redirect(self, ifindex: u32) -> i32 {
        if ifindex == self.ifindex() {
            return XDP_TX.cast_signed();
        }
        // SAFETY: the helper takes numbers only.
        unsafe { helper::bpf_redirect(ifindex, 0) as i32 }
    }

    #[inline(always)]
    fn redirect_ingress(self, _ifindex: u32) -> i32 {
        XDP_DROP.cast_signed()
    }

    #[inline(always)]
    fn redirect_neigh(self, route: &Route) -> i32 {
        // `can_send` has checked that the MAC addresses are known.
        self.redirect(route.ifindex)
    }

    #[inline(always)]
    fn can_send(self, route: &Route) -> bool {
        // SAFETY: only the presence of the entry is checked; its value is not read.
        let is_open = || unsafe { XDP_DEVICES.get(route.ifindex).is_some() };
        route.resolved != 0 && (route.ifindex == self.ifindex() || is_open())
    }

    #[inline(always)]
    fn sum_of<const N: usize>(self, words: &[u32; N]) -> u64 {
        let (mut sum, mut word) = (0, 0);
        while word < N {
            sum += u64::from(words[word]);
            word += 1;
        }
        sum
    }
}
