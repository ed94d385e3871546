//! [`Frame`] for a socket buffer: thin, safe wrappers of the kernel's helpers.

use core::mem::MaybeUninit;

use aya_ebpf::bindings::{
    BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, BPF_F_ADJ_ROOM_FIXED_GSO, BPF_F_INGRESS,
    BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, bpf_adj_room_mode, bpf_redir_neigh,
};
use aya_ebpf::helpers::generated as helper;
use proxy_common::Address;
use proxy_common::flow::FlowKey;
use proxy_common::socket::socket_family;

use super::fib::{self, size};
use super::skb::Skb;
use super::sockets::{peers, storage};
use super::{calls, lookup};
use crate::frame::{self, Bounds, Checksum, Fib, Frame, HelperFailed, Route};
use crate::net::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ipv4, Ipv6, VLAN_ID};

/// The bits of `tc_index` in packets that are translated. The low byte is left alone: Cilium has its flags there, and one of them
/// lets a packet pass the policy of a pod (`TC_INDEX_F_FROM_INGRESS_PROXY` in `bpf/lib/common.h`). The network stack does not write
/// the field, and its queueing disciplines read it only after filters have set it (GRED, and DSMARK before Linux 6.4).
const TRANSLATED: u32 = 0xba00;
/// The bits of [`TRANSLATED`].
const TRANSLATED_MASK: u32 = 0xff00;

/// Value of [`Frame::link_header`]. The agent loads the packet programs a second time with 0 here, for devices without a
/// link-layer header. 64 bits wide, since every verifier still knows a number of this size after it was spilled to the
/// stack.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static LINK_HEADER: aya_ebpf::Global<u64> = aya_ebpf::Global::new(ETHERNET as u64);

/// Index of the loopback device. Tests that run the programs with `BPF_PROG_TEST_RUN`, which takes this device for all others,
/// load them with 0.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static LOOPBACK_DEVICE: aya_ebpf::Global<u64> = aya_ebpf::Global::new(frame::LOOPBACK as u64);

/// `TCP_TIME_WAIT`; since Linux 6.13, packets of such a socket have it.
const TIME_WAIT: u32 = 6;

#[inline(always)]
fn done(result: i64) -> Result<(), HelperFailed> {
    if result == 0 { Ok(()) } else { Err(HelperFailed) }
}

impl Frame for Skb {
    #[inline(always)]
    fn ethertype(self) -> u32 {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { (*self.raw()).protocol }
    }

    #[inline(always)]
    fn link_header(self) -> usize {
        #[cfg(target_arch = "bpf")]
        {
            LINK_HEADER.load() as usize
        }
        #[cfg(not(target_arch = "bpf"))]
        {
            ETHERNET
        }
    }

    #[inline(always)]
    fn has_vlan_tag(self) -> bool {
        // SAFETY: as in `ethertype`. Without a tag, `vlan_tci` may hold an old value.
        unsafe { (*self.raw()).vlan_present != 0 && (*self.raw()).vlan_tci & VLAN_ID != 0 }
    }

    #[inline(always)]
    fn packet_type(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw()).pkt_type }
    }

    #[inline(always)]
    fn length(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw()).len }
    }

    #[inline(always)]
    fn gso_size(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw()).gso_size }
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw()).ifindex }
    }

    #[inline(always)]
    fn arrival(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw()).ingress_ifindex }
    }

    #[inline(always)]
    fn is_loopback(self) -> bool {
        #[cfg(target_arch = "bpf")]
        {
            u64::from(self.ifindex()) == LOOPBACK_DEVICE.load()
        }
        #[cfg(not(target_arch = "bpf"))]
        {
            false
        }
    }

    #[inline(always)]
    fn is_translated(self) -> bool {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.raw()).tc_index & TRANSLATED_MASK == TRANSLATED }
    }

    #[inline(always)]
    fn set_translated(self) {
        // SAFETY: as in `ethertype`; classifiers may write this field.
        // Volatile: the compiler would write one byte of the field, and the verifier allows writes of whole words only.
        unsafe {
            let index = &raw mut (*self.raw()).tc_index;
            index.write_volatile(index.read_volatile() & !TRANSLATED_MASK | TRANSLATED);
        }
    }

    #[inline(always)]
    fn mark(self, bits: u32) {
        // SAFETY: as in `ethertype`; classifiers may write this field.
        unsafe { (*self.raw()).mark |= bits }
    }

    #[inline(always)]
    fn bounds(self) -> Bounds {
        // SAFETY: as in `ethertype`; the kernel converts both fields to addresses.
        unsafe {
            Bounds {
                data: (*self.raw()).data as usize,
                end: (*self.raw()).data_end as usize,
                frame: (*self.raw()).len as usize,
            }
        }
    }

    #[inline(always)]
    fn pull(self, length: u32) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the length.
        done(unsafe { helper::bpf_skb_pull_data(self.raw(), length) })
    }

    #[inline(always)]
    fn load<T>(self, offset: u32, buffer: &mut T, length: u32) -> Result<(), HelperFailed> {
        let to = core::ptr::from_mut(buffer).cast();
        // SAFETY: `to` is writable for the size of `T`, and the verifier checks `length` against it.
        done(unsafe { helper::bpf_skb_load_bytes(self.raw().cast(), offset, to, length) })
    }

    #[inline(always)]
    fn store<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        let from = core::ptr::from_ref(value).cast();
        // SAFETY: `from` is readable for the size of `T`, and the verifier checks `length` against it.
        done(unsafe { helper::bpf_skb_store_bytes(self.raw(), offset, from, length, 0) })
    }

    #[inline(always)]
    fn overwrite<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        // SAFETY: before a program that writes to packets runs, the kernel gives the packet its own copy of shared headers.
        unsafe { frame::write(self.bounds(), offset, value, length) }
    }

    #[inline(always)]
    fn correct_pseudo(self, offset: u32, difference: u32, kind: Checksum) -> Result<(), HelperFailed> {
        let flags = flags_of(kind) | u64::from(BPF_F_PSEUDO_HDR);
        // SAFETY: a valid context; the helper checks the offset.
        done(unsafe { helper::bpf_l4_csum_replace(self.raw(), offset, 0, u64::from(difference), flags) })
    }

    #[inline(always)]
    fn correct_word(self, offset: u32, old: u32, new: u32, kind: Checksum) -> Result<(), HelperFailed> {
        let flags = flags_of(kind) | size_of::<u32>() as u64;
        // SAFETY: a valid context; the helper checks the offset.
        done(unsafe {
            helper::bpf_l4_csum_replace(self.raw(), offset, u64::from(old), u64::from(new), flags)
        })
    }

    #[inline(always)]
    fn add_to_complete(self, difference: u32) {
        // SAFETY: a valid context. The helper returns an error for packets without `CHECKSUM_COMPLETE`, which need no
        // correction.
        unsafe { helper::bpf_csum_update(self.raw(), difference) };
    }

    #[inline(always)]
    fn push_link_header(self, bytes: u32) -> Result<(), HelperFailed> {
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_change_head(self.raw(), bytes, 0) })
    }

    #[inline(always)]
    fn make_room(self, bytes: u16) -> Result<(), HelperFailed> {
        let mode = bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_adjust_room(self.raw(), i32::from(bytes), mode, 0) })
    }

    #[inline(always)]
    fn encapsulate(self, bytes: u16, v6: bool) -> Result<(), HelperFailed> {
        let mode = bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
        let family = if v6 { BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 } else { BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 };
        // The segment size stays: it was checked against the MTU of the next link.
        let flags = u64::from(family | BPF_F_ADJ_ROOM_FIXED_GSO);
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_adjust_room(self.raw(), i32::from(bytes), mode, flags) })
    }

    #[inline(always)]
    fn encapsulate_again(self, bytes: u16) -> Result<(), HelperFailed> {
        let mode = bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
        // As in `encapsulate`. Without this flag the kernel also rejects UDP GSO packets, since their segment size is the
        // size of the datagrams.
        let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO);
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_adjust_room(self.raw(), i32::from(bytes), mode, flags) })
    }

    #[inline(always)]
    fn decapsulate(self, bytes: u16, mixed: bool, v6: bool) -> Result<(), HelperFailed> {
        let mut bytes = i32::from(bytes);
        if mixed {
            // `BPF_F_ADJ_ROOM_DECAP_L3_*` needs Linux 6.3. `bpf_skb_change_proto` instead inserts or removes the difference
            // between the lengths of the two IP headers.
            let protocol = if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 } as u16;
            // SAFETY: a valid context; the helper checks the rest.
            done(unsafe { helper::bpf_skb_change_proto(self.raw(), protocol, 0) })?;
            let longer = size::<Ipv6>() - size::<Ipv4>();
            bytes += if v6 { longer } else { -longer };
        }
        let mode = bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
        let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO);
        // SAFETY: as above.
        done(unsafe { helper::bpf_skb_adjust_room(self.raw(), -bytes, mode, flags) })
    }

    #[inline(always)]
    fn set_note(self, note: [u32; 2]) -> Result<(), HelperFailed> {
        let at = self.note_at().ok_or(HelperFailed)?;
        // SAFETY: `note_at` has checked the size; programs that write to packets may write here, too.
        unsafe { *at = note };
        Ok(())
    }

    #[inline(always)]
    fn note(self) -> Option<[u32; 2]> {
        // SAFETY: `note_at` has checked the size.
        self.note_at().map(|at| unsafe { *at })
    }

    #[inline(always)]
    fn replace(self, length: u32, l4: u32) -> Result<(), HelperFailed> {
        // The kernel completes no checksum that begins before the packet (`skb_postpull_rcsum` in include/linux/skbuff.h).
        let gone = l4 + 1;
        // SAFETY: a valid context; the helper checks the rest.
        done(unsafe { helper::bpf_skb_change_tail(self.raw(), length + gone, 0) })?;
        let mode = bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
        // SAFETY: as above.
        done(unsafe { helper::bpf_skb_adjust_room(self.raw(), -gone.cast_signed(), mode, 0) })
    }

    #[inline(always)]
    fn fib_lookup<A: Address>(self, src: &A, dst: &A, length: u32, route: &mut Route) -> Fib {
        // SAFETY: a valid context.
        unsafe { fib::lookup(self.raw().cast(), self.ifindex(), src, dst, length, route, false) }
    }

    #[inline(always)]
    fn is_for_backend_of_socket<A: Address>(self, addr: &A, port: u16) -> bool {
        // SAFETY: as in `ethertype`.
        let socket = unsafe { (*self.raw()).__bindgen_anon_2.sk };
        let (family, addr) = (socket_family::<A>(), addr.words());
        // SAFETY: a map value, of the socket that has sent the packet.
        storage(socket, false).is_some_and(|storage| unsafe { (*storage).has_backend(family, &addr, port) })
            // SAFETY: as above.
            || peers(socket, false).is_some_and(|peers| unsafe { (*peers).shown(family, &addr, port) }.is_some())
    }

    #[inline(always)]
    fn has_socket(self, port: u16) -> bool {
        // SAFETY: as in `ethertype`.
        let socket = unsafe { (*self.raw()).__bindgen_anon_2.sk };
        // The kernel's own socket has another port (`inet_ctl_sock_create`).
        // SAFETY: a socket that the kernel has passed to the program, and it is not null.
        !socket.is_null() && unsafe { (*socket).src_port == u32::from(port) && (*socket).state != TIME_WAIT }
    }

    #[inline(always)]
    fn has_connection<A: Address>(self, key: &FlowKey<A>) -> bool {
        // SAFETY: a valid context.
        unsafe { lookup::has_connection(self.raw().cast(), key) }
    }

    #[inline(always)]
    fn redirect(self, ifindex: u32) -> i32 {
        self.set_translated();
        // SAFETY: the helper takes numbers only.
        unsafe { helper::bpf_redirect(ifindex, 0) as i32 }
    }

    #[inline(always)]
    fn redirect_ingress(self, ifindex: u32) -> i32 {
        // SAFETY: the helper takes numbers only.
        unsafe { helper::bpf_redirect(ifindex, u64::from(BPF_F_INGRESS)) as i32 }
    }

    #[inline(always)]
    fn redirect_neigh(self, route: &Route) -> i32 {
        self.set_translated();
        if route.resolved == 0 && (self.is_local_origin() || self.is_loopback()) {
            // The neighbour code sends a packet that waits by its `dst` (`neigh_update` in net/core/neighbour.c), which is here the
            // route of the packet that the node has sent. Without a next hop the helper looks up the route, and sets it as `dst`.
            // SAFETY: the helper accepts no next hop.
            return unsafe { helper::bpf_redirect_neigh(route.ifindex, core::ptr::null_mut(), 0, 0) as i32 };
        }
        // SAFETY: plain integers.
        let mut params: bpf_redir_neigh = unsafe { MaybeUninit::zeroed().assume_init() };
        params.nh_family = route.family;
        params.__bindgen_anon_1.ipv6_nh = route.next_hop;
        // SAFETY: `params` is readable for the size that is passed.
        unsafe {
            helper::bpf_redirect_neigh(route.ifindex, &raw mut params, size::<bpf_redir_neigh>(), 0) as i32
        }
    }

    #[inline(always)]
    fn sum_of<const N: usize>(self, words: &[u32; N]) -> u64 {
        let from = words.as_ptr().cast_mut();
        // SAFETY: the words are readable for their size, a multiple of four.
        let sum =
            unsafe { helper::bpf_csum_diff(core::ptr::null_mut(), 0, from, size_of::<[u32; N]>() as u32, 0) };
        // The low half holds the sum of 32 bits. A negative number would be an error, which these arguments cannot cause.
        sum.cast_unsigned() & 0xffff_ffff
    }

    #[inline(always)]
    fn walk_extensions(self, proto: u8, offset: u32) -> u64 {
        calls::walk_extensions(self.raw(), u32::from(proto), offset)
    }

    #[inline(always)]
    fn change_sctp_ports(self, at: u32, end: u32, old: u32, new: u32) -> Result<(), HelperFailed> {
        if calls::sctp_ports(self.raw(), at, end, old, new) == 0 { Ok(()) } else { Err(HelperFailed) }
    }

    #[inline(always)]
    fn crc32c_change(self, difference: u32, length: u32) -> u32 {
        super::crc::crc_change(difference, length)
    }
}

/// Returns the checksum helper's flags. A UDP checksum of zero means "none", and stays zero.
#[inline(always)]
fn flags_of(kind: Checksum) -> u64 {
    match kind {
        Checksum::Always => 0,
        Checksum::Optional => u64::from(BPF_F_MARK_MANGLED_0),
    }
}
