//! A socket buffer at a tc hook: thin, safe forms of the kernel's helpers.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::generated as helper;
use aya_ebpf::programs::TcContext;

use crate::packet::Bounds;

/// The bits of a VLAN tag that name the VLAN; the others are a priority.
const VLAN_ID: u32 = 0xfff;

/// A packet at a tc hook.
#[derive(Clone, Copy)]
pub struct Skb {
    raw: *mut __sk_buff,
}

/// A helper said no; the packet may be half changed, so the only safe verdict is to drop it.
#[derive(Clone, Copy, Debug)]
pub struct HelperFailed;

#[inline(always)]
fn done(result: i64) -> Result<(), HelperFailed> {
    if result == 0 { Ok(()) } else { Err(HelperFailed) }
}

impl Skb {
    /// The packet of a program's context.
    #[inline(always)]
    pub fn new(context: &TcContext) -> Self {
        Self { raw: context.skb.skb }
    }

    /// The packet of a function's first argument.
    #[inline(always)]
    pub fn from_raw(raw: *mut __sk_buff) -> Self {
        Self { raw }
    }

    /// The argument for such a function.
    #[inline(always)]
    pub fn raw(self) -> *mut __sk_buff {
        self.raw
    }

    /// The Ethernet type, in network order (`ETHERTYPE_*`).
    #[inline(always)]
    pub fn ethertype(self) -> u32 {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { (*self.raw).protocol }
    }

    /// Whether the packet is one of a VLAN, whose tag stands beside it: it comes again by the VLAN's own device, which
    /// knows where it belongs. A tag that only tells a priority (its VLAN is 0) is none.
    #[inline(always)]
    pub fn is_of_vlan(self) -> bool {
        // SAFETY: as in `ethertype`. What stands in `vlan_tci` without a tag is old.
        unsafe { (*self.raw).vlan_present != 0 && (*self.raw).vlan_tci & VLAN_ID != 0 }
    }

    /// The whole length, with the part that cannot be read directly.
    #[inline(always)]
    pub fn length(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw).len }
    }

    /// Payload of each packet that the kernel will cut this one into; 0: it is one packet.
    #[inline(always)]
    pub fn gso_size(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw).gso_size }
    }

    /// Whether it is a list of SCTP packets behind one header (`GSO_BY_FRAGS`): what is pulled out of the first of them is
    /// missing where the kernel takes them apart.
    #[inline(always)]
    pub fn is_list(self) -> bool {
        self.gso_size() == u32::from(u16::MAX)
    }

    /// Index of the device that the hook is on.
    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw).ifindex }
    }

    /// Whether this node itself has made the packet: it never came in by a device. Where packets come in, none is so.
    #[inline(always)]
    pub fn is_own(self) -> bool {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw).ingress_ifindex == 0 }
    }

    /// The part that can be read directly.
    #[inline(always)]
    pub fn bounds(self) -> Bounds {
        // SAFETY: as in `ethertype`; the kernel turns both fields into addresses.
        unsafe {
            Bounds {
                data: (*self.raw).data as usize,
                end: (*self.raw).data_end as usize,
                frame: (*self.raw).len as usize,
            }
        }
    }

    /// Makes the first `length` bytes readable. Bounds taken before are void.
    #[inline(always)]
    pub fn pull(self, length: u32) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the length.
        done(unsafe { helper::bpf_skb_pull_data(self.raw, length) })
    }

    /// Writes `value` at `offset`. Bounds taken before are void.
    #[inline(always)]
    pub fn store<T>(self, offset: u32, value: &T) -> Result<(), HelperFailed> {
        let from = core::ptr::from_ref(value).cast();
        // SAFETY: `from` is readable for the size of `T`; the helper checks the rest.
        done(unsafe { helper::bpf_skb_store_bytes(self.raw, offset, from, size_of::<T>() as u32, 0) })
    }

    /// Reads `length` bytes at `offset` into `buffer`; `length` must be 1 to the size of `T`.
    #[inline(always)]
    pub fn load<T>(self, offset: u32, buffer: &mut T, length: u32) -> Result<(), HelperFailed> {
        let to = core::ptr::from_mut(buffer).cast();
        // SAFETY: `to` is writable for the size of `T`, and the verifier checks `length` against it.
        done(unsafe { helper::bpf_skb_load_bytes(self.raw.cast(), offset, to, length) })
    }

    /// Writes the first `length` bytes of `value`; `length` must be 1 to the size of `T`.
    #[inline(always)]
    pub fn store_first<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        let from = core::ptr::from_ref(value).cast();
        // SAFETY: `from` is readable for the size of `T`, and the verifier checks `length` against it.
        done(unsafe { helper::bpf_skb_store_bytes(self.raw, offset, from, length, 0) })
    }

    /// Corrects a TCP or UDP checksum at `offset` by a difference of the pseudo header (addresses).
    #[inline(always)]
    pub fn correct_pseudo(self, offset: u32, difference: u32, flags: u64) -> Result<(), HelperFailed> {
        let flags = flags | u64::from(aya_ebpf::bindings::BPF_F_PSEUDO_HDR);
        // SAFETY: a valid context; the helper checks the offset.
        done(unsafe { helper::bpf_l4_csum_replace(self.raw, offset, 0, u64::from(difference), flags) })
    }

    /// Corrects it by a change of four bytes that the checksum covers itself (ports).
    #[inline(always)]
    pub fn correct_word(self, offset: u32, old: u32, new: u32, flags: u64) -> Result<(), HelperFailed> {
        let flags = flags | size_of::<u32>() as u64;
        // SAFETY: a valid context; the helper checks the offset.
        done(unsafe { helper::bpf_l4_csum_replace(self.raw, offset, u64::from(old), u64::from(new), flags) })
    }

    /// Adds to the sum over the whole packet that some drivers supply; nothing where there is none.
    #[inline(always)]
    pub fn add_to_complete(self, difference: u32) {
        // SAFETY: a valid context. The helper refuses packets without such a sum, which is what we want.
        unsafe { helper::bpf_csum_update(self.raw, difference) };
    }

    /// Puts room for a link-layer header of `bytes` in front of a packet that has none. Bounds taken before are void.
    #[inline(always)]
    pub fn push_link_header(self, bytes: u32) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_change_head(self.raw, bytes, 0) })
    }

    /// Makes room of `bytes` behind the link-layer header.
    #[inline(always)]
    pub fn make_room(self, bytes: u16) -> Result<(), HelperFailed> {
        let mode = aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_adjust_room(self.raw, i32::from(bytes), mode, 0) })
    }

    /// Cuts or extends the packet to `length` bytes.
    #[inline(always)]
    pub fn set_length(self, length: u32) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_change_tail(self.raw, length, 0) })
    }
}
