//! [`Frame`] for a packet in memory, with the kernel's helpers as in `net/core/filter.c`.

use core::cell::RefMut;

use proxy_common::Address;
use proxy_common::csum::fold;
use proxy_common::flow::FlowKey;

use super::REDIRECT;
use super::skb::{ChecksumState, HostPacket, Redirect, Skb, add, subtract, sum_at};
use crate::frame::{Bounds, Checksum, Fib, Frame, HelperFailed, Route};
use crate::header;
use crate::stage::sctp;

/// Mask of the VLAN id in a VLAN tag.
const VLAN_ID: u16 = 0xfff;

/// A packet at a tc hook; `EARLY`: at an early hook (XDP).
#[derive(Clone, Copy, Debug)]
pub struct HostFrame<'a, const EARLY: bool = false>(&'a HostPacket);

impl<'a, const EARLY: bool> HostFrame<'a, EARLY> {
    /// Returns a handle for the packet.
    pub fn new(packet: &'a HostPacket) -> Self {
        Self(packet)
    }

    fn skb(self) -> RefMut<'a, Skb> {
        self.0.0.borrow_mut()
    }

    /// `bpf_l4_csum_replace`. Replaces `from` by `to` in the sum of the checksum at `offset`; without `from`, `to` is the
    /// difference.
    fn replace(
        self,
        offset: u32,
        kind: Checksum,
        is_pseudo: bool,
        (from, to): (Option<u32>, u32),
    ) -> Result<(), HelperFailed> {
        let at = offset as usize;
        if offset > 0xffff || offset & 1 != 0 {
            return Err(HelperFailed);
        }
        let mut skb = self.skb();
        skb.make_writable(at + size_of::<u16>())?;
        let state = skb.checksum;
        let Some(field) = skb.as_mut_slice().get_mut(at..at + 2) else { return Err(HelperFailed) };
        let old = u16::from_ne_bytes([field[0], field[1]]);
        if kind == Checksum::Optional && old == 0 {
            return Ok(());
        }
        let changed = |sum: u32| add(from.map_or(sum, |from| subtract(sum, from)), to);
        let folded = |sum: u32| fold(u64::from(sum));
        let mut new = match state {
            ChecksumState::Partial { .. } if is_pseudo => folded(changed(u32::from(old))),
            ChecksumState::Partial { .. } => old,
            _ => !folded(changed(!u32::from(old))),
        };
        if kind == Checksum::Optional && new == 0 {
            new = 0xffff;
        }
        field.copy_from_slice(&new.to_ne_bytes());
        if let ChecksumState::Complete(sum) = state
            && is_pseudo
        {
            // `inet_proto_csum_replace_by_diff`: the change of the IPv4 header's own checksum has compensated for the change
            // of the address.
            skb.checksum = ChecksumState::Complete(subtract(sum, to));
        }
        Ok(())
    }
}

impl HostPacket {
    /// Returns the packet's handle for the programs of the tc hooks.
    pub fn frame(&self) -> HostFrame<'_> {
        HostFrame::new(self)
    }

    /// Returns the packet's handle for the program of an early hook.
    pub fn early_frame(&self) -> HostFrame<'_, true> {
        HostFrame::new(self)
    }
}

impl HostFrame<'_, true> {
    /// Does what the driver does after XDP.
    pub(super) fn after_early_hook(self) {
        self.skb().set_ethertype();
    }
}

/// Returns the first `length` bytes of a value; an error if there are not so many, or `length` is 0.
fn bytes_of<T>(value: &T, length: usize) -> Result<&[u8], HelperFailed> {
    if length == 0 || length > size_of::<T>() {
        return Err(HelperFailed);
    }
    // SAFETY: readable for the size of `T`; the stages pass integers and arrays of integers, without padding in `length`.
    Ok(unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), length) })
}

impl<const IS_EARLY: bool> Frame for HostFrame<'_, IS_EARLY> {
    const EARLY: bool = IS_EARLY;

    fn walk_extensions(self, proto: u8, offset: u32) -> u64 {
        if IS_EARLY { header::BROKEN } else { header::walk_extensions(self, proto, offset) }
    }

    fn change_sctp_ports(self, at: u32, end: u32, old: u32, new: u32) -> Result<(), HelperFailed> {
        sctp::change_ports(self, at, end, old, new)
    }

    fn ethertype(self) -> u32 {
        self.skb().ethertype
    }

    fn link_header(self) -> usize {
        self.skb().link_header
    }

    fn has_vlan_tag(self) -> bool {
        self.skb().vlan_tag.is_some_and(|tag| tag & VLAN_ID != 0)
    }

    fn packet_type(self) -> u32 {
        self.skb().packet_type
    }

    fn length(self) -> u32 {
        self.skb().as_slice().len() as u32
    }

    fn gso_size(self) -> u32 {
        self.skb().gso_size
    }

    fn ifindex(self) -> u32 {
        self.skb().ifindex
    }

    fn arrival(self) -> u32 {
        self.skb().ingress_ifindex
    }

    fn is_loopback(self) -> bool {
        self.skb().is_loopback
    }

    fn is_translated(self) -> bool {
        self.skb().is_translated
    }

    fn set_translated(self) {
        self.skb().is_translated = true;
    }

    fn mark(self, bits: u32) {
        self.skb().mark |= bits;
    }

    fn bounds(self) -> Bounds {
        let mut skb = self.skb();
        let linear = skb.linear;
        let bytes = skb.as_mut_slice();
        let data = bytes.as_mut_ptr() as usize;
        Bounds { data, end: data + linear, frame: bytes.len() }
    }

    fn pull(self, length: u32) -> Result<(), HelperFailed> {
        let mut skb = self.skb();
        let linear = skb.linear;
        skb.make_writable(if length == 0 { linear } else { length as usize })
    }

    fn load<T>(self, offset: u32, buffer: &mut T, length: u32) -> Result<(), HelperFailed> {
        let (offset, length) = (offset as usize, length as usize);
        if length == 0 || length > size_of::<T>() {
            return Err(HelperFailed);
        }
        let skb = self.skb();
        let found = offset.checked_add(length).and_then(|end| skb.as_slice().get(offset..end));
        let to = core::ptr::from_mut(buffer).cast::<u8>();
        // SAFETY: writable for the size of `T`; the stages read integers and arrays of integers. Bytes that cannot be read
        // become zero, as with the helper.
        unsafe {
            match found {
                Some(from) => to.copy_from_nonoverlapping(from.as_ptr(), length),
                None => to.write_bytes(0, length),
            }
        }
        found.map(|_| ()).ok_or(HelperFailed)
    }

    fn store<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        let (from, offset) = (bytes_of(value, length as usize)?, offset as usize);
        let end = offset.checked_add(from.len()).ok_or(HelperFailed)?;
        let mut skb = self.skb();
        skb.make_writable(end)?;
        let to = skb.as_mut_slice().get_mut(offset..end).ok_or(HelperFailed)?;
        to.copy_from_slice(from);
        Ok(())
    }

    fn correct_pseudo(self, offset: u32, difference: u32, kind: Checksum) -> Result<(), HelperFailed> {
        self.replace(offset, kind, true, (None, difference))
    }

    fn correct_word(self, offset: u32, old: u32, new: u32, kind: Checksum) -> Result<(), HelperFailed> {
        self.replace(offset, kind, false, (Some(old), new))
    }

    fn add_to_complete(self, difference: u32) {
        let mut skb = self.skb();
        if let ChecksumState::Complete(sum) = skb.checksum {
            skb.checksum = ChecksumState::Complete(add(sum, difference));
        }
    }

    fn push_link_header(self, bytes: u32) -> Result<(), HelperFailed> {
        self.skb().change_head(bytes as usize)
    }

    fn make_room(self, bytes: u16) -> Result<(), HelperFailed> {
        self.skb().make_room(usize::from(bytes))
    }

    fn encapsulate(self, bytes: u16, v6: bool) -> Result<(), HelperFailed> {
        if IS_EARLY {
            self.skb().adjust_head(usize::from(bytes))
        } else {
            self.skb().encapsulate(usize::from(bytes), v6)
        }
    }

    fn encapsulate_again(self, bytes: u16) -> Result<(), HelperFailed> {
        self.skb().adjust_room(usize::from(bytes))
    }

    fn decapsulate(self, bytes: u16, _mixed: bool, v6: bool) -> Result<(), HelperFailed> {
        self.skb().decapsulate(usize::from(bytes), v6)
    }

    fn add_note(self) -> Result<(), HelperFailed> {
        let mut skb = self.skb();
        if !skb.takes_notes || skb.headroom < size_of::<[u32; 2]>() {
            return Err(HelperFailed);
        }
        skb.note = Some([0; 2]);
        Ok(())
    }

    fn set_note(self, note: [u32; 2]) -> Result<(), HelperFailed> {
        *self.skb().note.as_mut().ok_or(HelperFailed)? = note;
        Ok(())
    }

    fn note(self) -> Option<[u32; 2]> {
        self.skb().note
    }

    fn cut_head(self, bytes: u32) -> Result<(), HelperFailed> {
        self.skb().cut_head(bytes as usize)
    }

    fn replace(self, length: u32, l4: u32) -> Result<(), HelperFailed> {
        let (mut skb, gone) = (self.skb(), l4 as usize + 1);
        skb.change_tail(length as usize + gone)?;
        let v6 = skb.ethertype == crate::net::ETHERTYPE_IPV6;
        skb.decapsulate(gone, v6)
    }

    fn fib_lookup<A: Address>(self, _src: &A, dst: &A, length: u32, route: &mut Route) -> Fib {
        self.skb().routes.find(dst, length, route)
    }

    fn has_connection<A: Address>(self, _: &FlowKey<A>) -> bool {
        self.skb().has_connection
    }

    fn is_for_backend_of_socket<A: Address>(self, _: &A, _: u16) -> bool {
        self.skb().is_for_backend_of_socket
    }

    fn has_socket(self, _: u16) -> bool {
        self.skb().has_socket
    }

    fn redirect(self, ifindex: u32) -> i32 {
        self.set_translated();
        self.skb().redirect = Some(Redirect::Out(ifindex));
        REDIRECT
    }

    fn redirect_ingress(self, ifindex: u32) -> i32 {
        self.skb().redirect = Some(Redirect::In(ifindex));
        REDIRECT
    }

    fn redirect_neigh(self, route: &Route) -> i32 {
        self.set_translated();
        self.skb().redirect = Some(Redirect::Neighbour(*route));
        REDIRECT
    }

    fn can_send(self, route: &Route) -> bool {
        route.resolved != 0
    }

    fn sum_of<const N: usize>(self, words: &[u32; N]) -> u64 {
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
        u64::from(sum_at(&bytes.collect::<std::vec::Vec<_>>(), 0))
    }
}
