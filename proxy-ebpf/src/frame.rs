//! What a stage may ask of a packet, whatever holds it: a socket buffer of the kernel, or a buffer of the host.

use proxy_common::{Address, crc32c};

/// Where the readable part of a packet begins and ends, as addresses.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// First byte: the Ethernet header, or the IP header where there is none.
    pub data: usize,
    /// One past the last byte that can be read directly.
    pub end: usize,
    /// Bytes in the whole packet, with those that cannot be read directly.
    pub frame: usize,
}

impl Bounds {
    /// The header of type `T` at `offset`, if all of it is readable.
    ///
    /// The address is computed once, checked and used: the verifier ties the check to that register.
    #[inline(always)]
    pub fn at<T>(self, offset: usize) -> Option<*const T> {
        let address = self.data + offset;
        if address + size_of::<T>() > self.end { None } else { Some(address as *const T) }
    }
}

/// Writes the first `length` bytes of `value` at `offset`, if all of them can be written directly.
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
        // SAFETY: inside the value and inside the packet; BPF machines that would mind the alignment copy bytes instead.
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

/// A helper said no; the packet may be half changed, so the only safe verdict is to drop it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelperFailed;

/// What the kernel's routes say of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fib {
    /// It may go, by the route that was written.
    Found,
    /// It is larger than the device takes; the route says how large it may be.
    TooBig,
    /// There is no route, or none that forwards.
    NoRoute,
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
    /// Destination and source, as they stand in an Ethernet header.
    pub macs: [u32; 3],
    /// How large a packet the device takes.
    pub mtu: u32,
    /// Not 0: `macs` are known; without them the kernel has to resolve the next hop.
    pub resolved: u32,
    /// Not 0: the kernel was asked for this packet.
    pub fresh: u32,
}

/// Flags of a checksum helper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// TCP's: always there.
    Always,
    /// UDP's: zero means "none", and stays; one that becomes zero is sent as its complement.
    Optional,
}

/// A packet. All offsets are from its first byte, which [`Frame::link_header`] tells what it is.
pub trait Frame: Copy {
    /// Whether another hook of ours gets the packet next if this one passes it on (XDP, before tc). Such a hook does only what
    /// it can finish by itself: it forwards, and it drops. For all else it answers [`Step::Pass`](crate::step::Step::Pass)
    /// before anything was changed or counted. A constant: what it never does is not compiled in.
    const EARLY: bool = false;
    /// The Ethernet type, in network order (`ETHERTYPE_*`).
    fn ethertype(self) -> u32;
    /// Bytes before the IP header: an Ethernet header, or nothing on devices whose packets begin with the IP header
    /// (tun, `WireGuard`, IP-in-IP). In programs a constant to the verifier.
    fn link_header(self) -> usize;
    /// Whether the packet has the tag of a VLAN beside it: it comes again by the VLAN's own device, which knows where it
    /// belongs. A tag that only tells a priority (its VLAN is 0) is none.
    fn has_vlan_tag(self) -> bool;
    /// The whole length, with the part that cannot be read directly.
    fn length(self) -> u32;
    /// Payload of each packet that the kernel will cut this one into; 0: it is one packet.
    fn gso_size(self) -> u32;
    /// Index of the device that the hook is on.
    fn ifindex(self) -> u32;
    /// Whether a process of this node has made the packet: it never came in by a device.
    fn is_local_origin(self) -> bool;
    /// Whether [`Frame::set_translated`] was called for the packet, at this hook or at one before. It stays with the packet on its
    /// way out, also through a VLAN's or a tunnel's device.
    #[inline(always)]
    fn is_translated(self) -> bool {
        false
    }
    /// Notes that the packet is translated: the hook of the device that it leaves by would not know. What redirects a packet does so, too.
    #[inline(always)]
    fn set_translated(self) {}
    /// The part that can be read directly. What was read before a call that changes the packet is void.
    fn bounds(self) -> Bounds;
    /// Makes the first `length` bytes readable.
    fn pull(self, length: u32) -> Result<(), HelperFailed>;
    /// Reads `length` bytes at `offset` into `buffer`; `length` must be 1 to the size of `T`.
    fn load<T>(self, offset: u32, buffer: &mut T, length: u32) -> Result<(), HelperFailed>;
    /// Writes the first `length` bytes of `value` at `offset`; `length` must be 1 to the size of `T`. A packet that shares
    /// its headers with another one (a clone) gets headers of its own first.
    fn store<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed>;
    /// The same for bytes that can be read directly. Without a call where the program may write to packets.
    #[inline(always)]
    fn overwrite<T>(self, offset: u32, value: &T, length: u32) -> Result<(), HelperFailed> {
        self.store(offset, value, length)
    }
    /// Corrects a TCP or UDP checksum at `offset` by a difference of the pseudo header (addresses).
    fn correct_pseudo(self, offset: u32, difference: u32, kind: Checksum) -> Result<(), HelperFailed>;
    /// Corrects it by a change of four bytes that the checksum covers itself (ports).
    fn correct_word(self, offset: u32, old: u32, new: u32, kind: Checksum) -> Result<(), HelperFailed>;
    /// Adds to the sum over the whole packet that some drivers supply (`CHECKSUM_COMPLETE`); nothing where there is none.
    fn add_to_complete(self, difference: u32);
    /// Puts room for a link-layer header of `bytes` in front of a packet that has none.
    fn push_link_header(self, bytes: u32) -> Result<(), HelperFailed>;
    /// Makes room of `bytes` behind the link-layer header.
    fn make_room(self, bytes: u16) -> Result<(), HelperFailed>;
    /// Makes room of `bytes` behind the link-layer header for an outer IP header; `v6`: of IPv6.
    fn encapsulate(self, bytes: u16, v6: bool) -> Result<(), HelperFailed>;
    /// The same for a packet that the kernel still marks as encapsulated (`skb->encapsulation`): it marks none twice. What it has noted of
    /// the inner headers is right again behind the new outer header.
    fn encapsulate_again(self, bytes: u16) -> Result<(), HelperFailed>;
    /// Takes the outer IP header of `bytes` away. `mixed`: the inner one is of the other family; `v6`: it is IPv6.
    fn decapsulate(self, bytes: u16, mixed: bool, v6: bool) -> Result<(), HelperFailed>;
    /// Cuts or extends the packet to `length` bytes.
    fn set_length(self, length: u32) -> Result<(), HelperFailed>;
    /// Asks the kernel's routes about a packet with these addresses and of this length, that came in by the hook's device.
    fn fib_lookup<A: Address>(self, src: &A, dst: &A, length: u32, route: &mut Route) -> Fib;
    /// Sends the packet out of a device, with the link-layer header that it has. Gives the program's verdict.
    fn redirect(self, ifindex: u32) -> i32;
    /// Lets the packet come in by a device.
    fn redirect_ingress(self, ifindex: u32) -> i32;
    /// Sends the packet out of a device; the kernel writes the link-layer header, and resolves the next hop.
    fn redirect_neigh(self, route: &Route) -> i32;

    /// Whether the hook can send a packet by that route. Asked of early hooks only.
    #[inline(always)]
    fn can_send(self, _route: &Route) -> bool {
        true
    }

    /// The sum of all words of `words`, folded to 32 bits; a checksum may be made of it.
    fn sum_of<const N: usize>(self, words: &[u32; N]) -> u64;

    /// Whether it is a list of SCTP packets behind one header (`GSO_BY_FRAGS`): what is pulled out of the first of them is
    /// missing where the kernel takes them apart.
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

    /// Writes all of `value`.
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
                // SAFETY: the words are ours, and nothing else refers to them.
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
