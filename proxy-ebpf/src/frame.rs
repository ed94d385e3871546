//! The interface of a stage to a packet, implemented for a socket buffer of the kernel and for a buffer of the host.

use proxy_common::flow::FlowKey;
use proxy_common::{Address, crc32c};

/// Start and end address of the directly readable part of a packet.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// Address of the first byte: of the Ethernet header, or of the IP header if there is no Ethernet header.
    pub data: usize,
    /// Address after the last byte that can be read directly.
    pub end: usize,
    /// Length of the whole packet in bytes, with the part that cannot be read directly.
    pub frame: usize,
}

impl Bounds {
    /// Returns the header of type `T` at `offset`; `None` if it is not completely readable.
    ///
    /// The address is computed once, checked and used: the verifier knows the result of the check only for that register.
    #[inline(always)]
    pub fn at<T>(self, offset: usize) -> Option<*const T> {
        let address = self.data + offset;
        if address + size_of::<T>() > self.end { None } else { Some(address as *const T) }
    }
}

/// Writes the first `length` bytes of `value` at `offset`. Returns an error if they cannot all be written directly.
///
/// # Safety
/// `bounds` are those of a packet that the program may write to.
#[expect(clippy::cast_ptr_alignment, reason = "headers are as aligned as `NET_IP_ALIGN` makes them")]
#[inline(always)]
pub unsafe fn write<T>(bounds: Bounds, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
    let length = length as usize;
    let to = bounds.data + offset as usize;
    if length > size_of::<T>() || to + length > bounds.end {
        return Err(HelperFailed);
    }
    let (from, to) = (core::ptr::from_ref(value).cast::<u8>(), to as *mut u8);
    let mut at = 0;
    while at + size_of::<u32>() <= length {
        // SAFETY: inside the value and inside the packet. On machines that require alignment, BPF code copies single bytes
        // instead.
        unsafe { *to.add(at).cast::<u32>() = *from.add(at).cast::<u32>() };
        at += size_of::<u32>();
    }
    if at + size_of::<u16>() <= length {
        // SAFETY: as above.
        unsafe { *to.add(at).cast::<u16>() = *from.add(at).cast::<u16>() };
        at += size_of::<u16>();
    }
    if at < length {
        // SAFETY: as above.
        unsafe { *to.add(at) = *from.add(at) };
    }
    Ok(())
}

/// A helper failed. The packet may be partly changed, so the only safe verdict is drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelperFailed;

/// Result of a route lookup in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fib {
    /// The route was found and written.
    Found,
    /// The packet is longer than the MTU, which the route states.
    TooBig,
    /// The kernel would drop the packet.
    NoRoute,
    /// The kernel would answer with an ICMP error; [`Route::mtu`] is its code ([`Unreachable`]).
    Unreachable,
}

impl Fib {
    /// Whether there is a route, also if the packet is too long for it.
    #[inline(always)]
    pub const fn is_route(self) -> bool {
        matches!(self, Self::Found | Self::TooBig)
    }
}

/// The codes of "destination unreachable" of a family (RFC 792 and RFC 1812, 5.2.7.1; RFC 4443, 3.1), as the kernel chooses
/// them (`ip_error`, `ip6_pkt_drop`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreachable {
    /// There is no route.
    pub no_route: u32,
    /// The route is of type `unreachable`.
    pub by_route: u32,
    /// The route is of type `prohibit`.
    pub prohibited: u32,
}

impl Unreachable {
    /// Returns the codes of the family with addresses of type `A`.
    pub const fn of<A>() -> Self {
        if size_of::<A>() > size_of::<u32>() {
            Self { no_route: 0, by_route: 0, prohibited: 1 }
        } else {
            Self { no_route: 0, by_route: 1, prohibited: 13 }
        }
    }
}

/// A route: the next hop of a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Index of the device.
    pub ifindex: u32,
    /// Address family of `next_hop`: `AF_INET` or `AF_INET6`.
    pub family: u32,
    /// Address of the next hop.
    pub next_hop: [u32; 4],
    /// Destination and source address, in the order of an Ethernet header.
    pub macs: [u32; 3],
    /// MTU, in bytes; of [`Fib::Unreachable`], the code of the ICMP error.
    pub mtu: u32,
    /// Not 0: `macs` are known; 0: the kernel has to resolve the next hop.
    pub resolved: u32,
    /// Not 0: the route was looked up for this packet; 0: it is from the cache.
    pub fresh: u32,
}

impl Route {
    /// The kernel's stack routes the packet, as it does with a packet that arrives on the loopback device: there, a source
    /// address of this node is no martian (`accept_local`).
    pub const BY_STACK: Self = Self {
        ifindex: LOOPBACK,
        family: 0,
        next_hop: [0; 4],
        macs: [0; 3],
        mtu: u32::MAX,
        resolved: 0,
        fresh: 0,
    };

    /// Whether this is [`Route::BY_STACK`]: no packet is forwarded to the loopback device.
    #[inline(always)]
    pub const fn is_by_stack(&self) -> bool {
        self.ifindex == LOOPBACK
    }
}

/// Index of the loopback device, in every network namespace (`LOOPBACK_IFINDEX`).
pub(crate) const LOOPBACK: u32 = 1;

/// Kind of a transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// TCP: the checksum always exists.
    Always,
    /// UDP: zero means "no checksum" and stays zero; a computed checksum of zero is sent as its complement.
    Optional,
}

/// The packet is addressed to the device's MAC address, or has none (`linux/if_packet.h`).
pub const PACKET_HOST: u32 = 0;
/// The packet is addressed to another MAC address.
pub const PACKET_OTHERHOST: u32 = 3;

/// A packet. All offsets count from its first byte: of the Ethernet header, or of the IP header (see [`Frame::link_header`]).
pub trait Frame: Copy {
    /// Whether another hook of Ballast gets the packet next if this hook passes it (XDP, before tc). Such a hook does only
    /// what it can complete: it forwards or drops. For everything else it returns [`Step::Pass`](crate::step::Step::Pass),
    /// before it has changed or counted anything. A constant, so that code which such a hook never runs is not compiled.
    const EARLY: bool = false;
    /// Returns the Ethernet type, in network byte order (`ETHERTYPE_*`).
    fn ethertype(self) -> u32;
    /// Returns the number of bytes before the IP header: an Ethernet header, or 0 on devices whose packets begin with the IP
    /// header (tun, `WireGuard`, IP-in-IP). In the programs, a constant for the verifier.
    fn link_header(self) -> usize;
    /// Whether the packet's metadata has a VLAN tag. Such a packet also arrives on the VLAN device, whose program processes
    /// it. A priority tag (VLAN 0) does not count.
    fn has_vlan_tag(self) -> bool;
    /// Returns the kernel's packet type (`PACKET_*`). An early hook sees the frame before the kernel computes it.
    #[inline(always)]
    fn packet_type(self) -> u32 {
        PACKET_HOST
    }
    /// Returns the length of the whole packet in bytes, with the part that cannot be read directly.
    fn length(self) -> u32;
    /// Returns the payload of each segment into which the kernel will split the packet, in bytes; 0: no GSO packet.
    fn gso_size(self) -> u32;
    /// Returns the index of the device that the hook is on.
    fn ifindex(self) -> u32;
    /// Whether the hook is on the loopback device.
    #[inline(always)]
    fn is_loopback(self) -> bool {
        false
    }
    /// Returns the index of the device on which the packet arrived, at an ingress hook the hook's; 0: a process of this node sent it
    /// (local origin).
    fn arrival(self) -> u32;
    /// Whether a process of this node sent the packet.
    #[inline(always)]
    fn is_local_origin(self) -> bool {
        self.arrival() == 0
    }
    /// Whether [`Frame::set_translated`] was called for the packet, at this hook or at an earlier one. The mark stays with
    /// the packet on its way out, also through a VLAN or tunnel device.
    #[inline(always)]
    fn is_translated(self) -> bool {
        false
    }
    /// Marks the packet as translated, since the hook of the device by which it leaves could not know. Redirecting the packet
    /// out of a device marks it, too.
    #[inline(always)]
    fn set_translated(self) {}
    /// Sets bits of the packet's mark, which the stack and netfilter see.
    #[inline(always)]
    fn mark(self, _bits: u32) {}
    /// Returns the bounds of the directly readable part. They are invalid after a call that changes the packet, and so are
    /// pointers into the packet.
    fn bounds(self) -> Bounds;
    /// Makes the first `length` bytes directly readable.
    fn pull(self, length: u32) -> Result<(), HelperFailed>;
    /// Reads `length` bytes at `offset` into `buffer`; `length` must be 1 to the size of `T`.
    fn load<T>(self, offset: u32, buffer: &mut T, length: u32) -> Result<(), HelperFailed>;
    /// Writes the first `length` bytes of `value` at `offset`; `length` must be 1 to the size of `T`. If the packet shares
    /// its headers with another packet (a clone), the headers are copied first.
    fn store<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed>;
    /// Does the same for directly readable bytes. Without a helper call, if the program may write to packets.
    #[inline(always)]
    fn overwrite<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        self.store(offset, value, length)
    }
    /// Corrects a TCP or UDP checksum at `offset` by a difference of the pseudo header (addresses).
    fn correct_pseudo(self, offset: u32, difference: u32, kind: Checksum) -> Result<(), HelperFailed>;
    /// Corrects a TCP or UDP checksum at `offset` by a change of four bytes of the segment itself (ports).
    fn correct_word(self, offset: u32, old: u32, new: u32, kind: Checksum) -> Result<(), HelperFailed>;
    /// Adds to the sum over the whole packet that some drivers supply (`CHECKSUM_COMPLETE`); does nothing if there is no such
    /// sum.
    fn add_to_complete(self, difference: u32);
    /// Inserts room for a link-layer header of `bytes` bytes in front of a packet without one.
    fn push_link_header(self, bytes: u32) -> Result<(), HelperFailed>;
    /// Inserts room of `bytes` bytes after the link-layer header.
    fn make_room(self, bytes: u16) -> Result<(), HelperFailed>;
    /// Inserts room of `bytes` bytes after the link-layer header for an outer IP header; `v6`: of IPv6. At an early hook, the
    /// link-layer header is undefined afterwards.
    fn encapsulate(self, bytes: u16, v6: bool) -> Result<(), HelperFailed>;
    /// Does the same for a packet that the kernel still marks as encapsulated (`skb->encapsulation`): the kernel refuses to
    /// mark a packet twice. The offsets of the inner headers that the kernel has noted are correct again after the new outer
    /// header.
    fn encapsulate_again(self, bytes: u16) -> Result<(), HelperFailed>;
    /// Removes the outer IP header of `bytes` bytes. `mixed`: the inner header is of the other family; `v6`: the inner header
    /// is IPv6.
    fn decapsulate(self, bytes: u16, mixed: bool, v6: bool) -> Result<(), HelperFailed>;
    /// Makes room for a note in front of the packet: what an early hook tells the next one about it. The note is zero. Fails without
    /// a change if the driver has no room for notes.
    #[inline(always)]
    fn add_note(self) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }
    /// Writes the note, for which there is room.
    #[inline(always)]
    fn set_note(self, _note: [u32; 2]) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }
    /// Returns what is in the place of a note.
    #[inline(always)]
    fn note(self) -> Option<[u32; 2]> {
        None
    }
    /// Removes `bytes` bytes at the start of the packet, behind a note; the link-layer header is undefined afterwards. For early
    /// hooks. Fails without a change.
    #[inline(always)]
    fn cut_head(self, _bytes: u32) -> Result<(), HelperFailed> {
        Err(HelperFailed)
    }
    /// Makes the packet one of `length` bytes that are undefined after the link-layer header. The kernel will complete no checksum in
    /// it (`CHECKSUM_PARTIAL`). `l4`: offset of the transport header so far.
    fn replace(self, length: u32, l4: u32) -> Result<(), HelperFailed>;
    /// Looks up the route of a packet with these addresses and this length that arrived on the hook's device.
    fn fib_lookup<A: Address>(self, src: &A, dst: &A, length: u32, route: &mut Route) -> Fib;
    /// Whether a TCP socket of the hook's network namespace has a connection with this source and destination. Not called for early
    /// hooks.
    fn has_connection<A: Address>(self, key: &FlowKey<A>) -> bool;
    /// Whether the packet's socket, if it is of this node, connects or sends to a Service for which the socket programs have
    /// selected this backend. Not called for early hooks.
    #[inline(always)]
    fn is_for_backend_of_socket<A: Address>(self, _addr: &A, _port: u16) -> bool {
        false
    }
    /// Whether a socket with this port sends the packet, host byte order. The kernel sends the last segments of a TCP connection, and
    /// those to a closed socket, without it.
    #[inline(always)]
    fn has_socket(self, _port: u16) -> bool {
        true
    }
    /// Sends the packet out of a device, with its current link-layer header. Returns the program's verdict.
    fn redirect(self, ifindex: u32) -> i32;
    /// Redirects the packet to the ingress of a device. Returns the program's verdict.
    fn redirect_ingress(self, ifindex: u32) -> i32;
    /// Sends the packet out of a device; the kernel resolves the next hop and writes the link-layer header. Returns the
    /// program's verdict.
    fn redirect_neigh(self, route: &Route) -> i32;

    /// Whether the hook can send a packet by this route. Called only for early hooks.
    #[inline(always)]
    fn can_send(self, _route: &Route) -> bool {
        true
    }

    /// Returns the ones' complement sum of `words`, folded to 32 bits, from which a checksum can be computed.
    fn sum_of<const N: usize>(self, words: &[u32; N]) -> u64;

    /// Whether the packet is a list of SCTP packets behind one header (`GSO_BY_FRAGS`). Bytes that are pulled out of the
    /// first packet of the list are missing when the kernel splits the list.
    #[inline(always)]
    fn is_frag_list(self) -> bool {
        self.gso_size() == u32::from(u16::MAX)
    }

    /// [`header::walk_extensions`](crate::header::walk_extensions).
    fn walk_extensions(self, proto: u8, offset: u32) -> u64;

    /// [`stage::sctp::change_ports`](crate::stage::sctp::change_ports).
    fn change_sctp_ports(self, at: u32, end: u32, old: u32, new: u32) -> Result<(), HelperFailed>;

    /// [`crc32c::change`].
    #[inline(always)]
    fn crc32c_change(self, difference: u32, length: u32) -> u32 {
        crc32c::change(difference, length, crc32c::multiply)
    }

    /// Writes all of `value` at `offset`.
    #[inline(always)]
    fn store_all<T>(self, offset: u32, value: &T) -> Result<(), HelperFailed> {
        self.store(offset, value, size_of::<T>() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_written_in_part_and_never_beyond_the_end() {
        let bytes: [u8; 8] = core::array::from_fn(|at| at as u8 + 1);
        let value =
            [0, 4].map(|at| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        for length in 0..=9 {
            for room in 0..=12 {
                let mut words = [0u32; 3];
                let data = words.as_mut_ptr().addr();
                let bounds = Bounds { data, end: data + room, frame: 12 };
                // SAFETY: a local array, to which nothing else refers.
                let written = unsafe { write(bounds, 4, &value, length as u32) };
                let mut expected = [0u8; 12];
                if length <= 8 && 4 + length <= room {
                    expected[4..4 + length].copy_from_slice(&bytes[..length]);
                    assert_eq!(written, Ok(()));
                } else {
                    assert_eq!(written, Err(HelperFailed));
                }
                assert_eq!(words.map(u32::to_ne_bytes).as_flattened(), expected, "{length} of {room}");
            }
        }
    }
}
