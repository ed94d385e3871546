//! Where a packet goes on from here: the kernel's routes, asked for each packet, so that the answer is always true.
//!
//! A packet whose source is an address of this node must not go up the stack, which drops it as a martian. It is
//! sent on from where it came in, as a router does: next hop, time to live, and the size of the next link.

use core::mem::{MaybeUninit, replace, size_of};

use aya_ebpf::bindings::{
    BPF_F_INGRESS, BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS,
    bpf_fib_lookup, bpf_redir_neigh,
};
use aya_ebpf::helpers::generated as helper;
use proxy_common::csum::{replace32, update};
use proxy_common::select::SPREAD;
use proxy_common::{Address, V4, V6};

use crate::header::same;
use crate::maps::{self, Tables};
use crate::nat::Tuple;
use crate::net::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ipv4, Ipv6, link_header};
use crate::packet::Parse;
use crate::skb::Skb;

/// Where the packet goes on; one for each CPU, from [`Routes::route`] to [`Routes::send`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Route {
    /// The device.
    pub ifindex: u32,
    /// Address family of `next_hop`; 0: `macs` are known.
    pub family: u32,
    /// The next hop.
    pub next_hop: [u32; 4],
    /// Destination and source, as they stand in an Ethernet header.
    pub macs: [u32; 3],
    /// How large a packet the device takes.
    pub mtu: u32,
    /// 0: out of the device. `BPF_F_INGRESS`: as if it had come in by it; for one packet.
    pub inward: u32,
}

/// The way that a packet took, for those that follow in the same tick of the clock: to ask the kernel costs more than all
/// else, and a way that is four milliseconds old at most is as true as that of a packet which waits in a queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Hop<A> {
    /// Source address; routes may depend on it.
    src: A,
    /// Destination address.
    dst: A,
    /// The device by which the packet came.
    from: u32,
    /// Low 32 bits of jiffies.
    at: u32,
    /// The way; its device is 0 if nothing stands here.
    route: Route,
}

/// Ways that each CPU remembers, a power of two.
pub const HOPS: usize = 256;

/// Where the way between two addresses is remembered.
#[inline(always)]
fn hop_number<A: Address>(tuple: &Tuple<A>) -> u32 {
    let folded = |[a, b, c, d]: [u32; 4]| a ^ b ^ c ^ d;
    let mixed = (folded(tuple.dst.words()) ^ folded(tuple.src.words())).wrapping_mul(SPREAD);
    mixed >> (u32::BITS - HOPS.trailing_zeros())
}

/// The packet may go on.
pub const FOUND: i32 = 0;
/// It is larger than the device takes.
pub const TOO_BIG: i32 = 1;
/// The kernel knows no way.
pub const NO_ROUTE: i32 = 2;

/// `AF_INET`.
const INET: u8 = 2;
/// `AF_INET6`.
const INET6: u8 = 10;

/// A family that can be routed.
pub trait Routes: Parse + Tables {
    /// Number of the address family.
    const FAMILY: u8;
    /// Its Ethernet type, as it stands in a packet.
    const ETHERTYPE: u16;
    /// Writes both addresses.
    fn fill(params: &mut bpf_fib_lookup, tuple: &Tuple<Self::Words>);
    /// Takes one from the time to live; `false`: it is over.
    fn hop(header: &mut Self::Header) -> bool;
    /// [`route`].
    fn route(skb: Skb, tuple: &Tuple<Self::Words>, length: u32) -> i32;
    /// [`send`].
    fn send(skb: Skb) -> i32;
}

/// The size of parameters, as helpers want it.
#[inline(always)]
const fn size<T>() -> i32 {
    (size_of::<T>() as u32).cast_signed()
}

/// Asks for the way of a packet with these addresses and of this length, and notes it for [`Routes::send`].
#[inline(always)]
fn route<F: Routes>(skb: Skb, tuple: &Tuple<F::Words>, length: u32) -> i32 {
    let (Some(route), Some(hop)) = (maps::route(), F::way(hop_number(tuple))) else { return NO_ROUTE };
    // SAFETY: map values that are this CPU's own.
    let (route, hop) = unsafe { (&mut *route, &mut *hop) };
    // SAFETY: the helper takes nothing and cannot fail.
    let now = unsafe { helper::bpf_jiffies64() } as u32;
    let is_same = hop.at == now
        && hop.from == skb.ifindex()
        && hop.route.ifindex != 0
        && same(&hop.dst, &tuple.dst)
        && same(&hop.src, &tuple.src);
    if is_same && length <= hop.route.mtu {
        *route = hop.route;
        return FOUND;
    }
    // SAFETY: plain integers.
    let mut params: bpf_fib_lookup = unsafe { MaybeUninit::zeroed().assume_init() };
    params.family = F::FAMILY;
    params.ifindex = skb.ifindex();
    // Left to itself, the kernel would not look at segments that are yet to be cut, nor at anything without a neighbour.
    params.__bindgen_anon_1.tot_len = length as u16;
    F::fill(&mut params, tuple);
    // SAFETY: a valid context, and parameters of the size that is told.
    let found =
        unsafe { helper::bpf_fib_lookup(skb.raw().cast(), &raw mut params, size::<bpf_fib_lookup>(), 0) };
    // Negative: the parameters are not as the kernel wants them.
    let found = u32::try_from(found).unwrap_or(u32::MAX);
    route.ifindex = params.ifindex;
    // A next hop may be of the other family (RFC 5549); the kernel writes which.
    route.family = if found == BPF_FIB_LKUP_RET_NO_NEIGH { u32::from(params.family) } else { 0 };
    // SAFETY: all readings of the unions are integers.
    unsafe {
        route.mtu = u32::from(params.__bindgen_anon_1.mtu_result);
        route.next_hop = params.__bindgen_anon_4.ipv6_dst;
    }
    let ([d0, d1, d2, d3, d4, d5], [s0, s1, s2, s3, s4, s5]) = (params.dmac, params.smac);
    route.macs = [
        u32::from_ne_bytes([d0, d1, d2, d3]),
        u32::from_ne_bytes([d4, d5, s0, s1]),
        u32::from_ne_bytes([s2, s3, s4, s5]),
    ];
    match found {
        BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH => {
            *hop = Hop { src: tuple.src, dst: tuple.dst, from: skb.ifindex(), at: now, route: *route };
            FOUND
        }
        BPF_FIB_LKUP_RET_FRAG_NEEDED => TOO_BIG,
        _ => NO_ROUTE,
    }
}

/// Makes of the way that was noted the way up the stack by its device; `false` if that is this one, or if its
/// link-layer address is not known.
#[inline(always)]
pub fn turn_inward(device: u32) -> bool {
    let Some(route) = maps::route() else { return false };
    // SAFETY: a map value that is this CPU's own.
    let route = unsafe { &mut *route };
    if route.ifindex == device || route.family != 0 {
        return false;
    }
    let [_, between, end] = route.macs.map(u32::to_ne_bytes);
    let ([_, _, s0, s1], [s2, s3, s4, s5]) = (between, end);
    route.macs[0] = u32::from_ne_bytes([s0, s1, s2, s3]);
    route.macs[1] = u32::from_ne_bytes([s4, s5, s0, s1]);
    route.inward = BPF_F_INGRESS;
    true
}

/// An Ethernet header without tags. Packed: it is 14 bytes long.
#[repr(C, packed(2))]
struct Ethernet {
    /// Destination and source.
    macs: [u32; 3],
    ethertype: u16,
}

/// The time to live of the packet is over.
pub const EXPIRED: i32 = -2;
/// The packet could not be sent.
pub const FAILED: i32 = -3;

/// Sends the packet the way that was noted. Gives the program's verdict, [`EXPIRED`] or [`FAILED`].
#[inline(always)]
fn send<F: Routes>(skb: Skb) -> i32 {
    let Some(route) = maps::route() else { return FAILED };
    // SAFETY: a map value that is this CPU's own.
    let route = unsafe { &mut *route };
    let inward = replace(&mut route.inward, 0);
    let bounds = skb.bounds();
    let link = link_header();
    let Some(header) = bounds.at::<F::Header>(link) else { return FAILED };
    // SAFETY: `at` found all of it inside the packet, and the kernel has made it writable for this program.
    if inward == 0 && !F::hop(unsafe { &mut *header.cast_mut() }) {
        return EXPIRED;
    }
    if link == 0 && skb.push_link_header(ETHERNET as u32).is_err() {
        // The kernel's helpers want one, and take it off again where the next device has none.
        return FAILED;
    }
    if route.family != 0 {
        let mut params: bpf_redir_neigh = {
            // SAFETY: plain integers.
            unsafe { MaybeUninit::zeroed().assume_init() }
        };
        params.nh_family = route.family;
        params.__bindgen_anon_1.ipv6_nh = route.next_hop;
        // SAFETY: parameters of the size that is told.
        return unsafe {
            helper::bpf_redirect_neigh(route.ifindex, &raw mut params, size::<bpf_redir_neigh>(), 0)
        } as i32;
    }
    let Some(ethernet) = skb.bounds().at::<Ethernet>(0) else { return FAILED };
    // SAFETY: as above. A device without link-layer header takes the packet without these.
    unsafe {
        let ethernet = &mut *ethernet.cast_mut();
        ethernet.macs = route.macs;
        if link == 0 {
            ethernet.ethertype = F::ETHERTYPE;
        }
        helper::bpf_redirect(route.ifindex, u64::from(inward)) as i32
    }
}

macro_rules! routes {
    ($family:ty, $route:ident, $send:ident, $number:expr, $ethertype:expr, $fill:expr, $hop:expr) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $route(
            skb: *mut aya_ebpf::bindings::__sk_buff,
            tuple: *const Tuple<<$family as proxy_common::Family>::Words>,
            length: u32,
        ) -> i32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            match unsafe { tuple.as_ref() } {
                Some(tuple) => route::<$family>(Skb::from_raw(skb), tuple, length),
                None => NO_ROUTE,
            }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $send(skb: *mut aya_ebpf::bindings::__sk_buff) -> i32 {
            send::<$family>(Skb::from_raw(skb))
        }

        impl Routes for $family {
            const FAMILY: u8 = $number;
            const ETHERTYPE: u16 = $ethertype as u16;

            #[inline(always)]
            fn fill(params: &mut bpf_fib_lookup, tuple: &Tuple<Self::Words>) {
                ($fill)(params, tuple);
            }

            #[inline(always)]
            fn hop(header: &mut Self::Header) -> bool {
                ($hop)(header)
            }

            #[inline(always)]
            fn route(skb: Skb, tuple: &Tuple<Self::Words>, length: u32) -> i32 {
                $route(skb.raw(), tuple, length)
            }

            #[inline(always)]
            fn send(skb: Skb) -> i32 {
                $send(skb.raw())
            }
        }
    };
}

routes!(
    V4,
    route4,
    send4,
    INET,
    ETHERTYPE_IPV4,
    |params: &mut bpf_fib_lookup, tuple: &Tuple<[u32; 1]>| {
        params.__bindgen_anon_3.ipv4_src = tuple.src[0];
        params.__bindgen_anon_4.ipv4_dst = tuple.dst[0];
    },
    |header: &mut Ipv4| {
        if header.ttl <= 1 {
            return false;
        }
        let old = u32::from_ne_bytes([header.ttl, header.protocol, 0, 0]);
        header.ttl -= 1;
        let new = u32::from_ne_bytes([header.ttl, header.protocol, 0, 0]);
        header.check = update(header.check, replace32(old, new));
        true
    }
);
routes!(
    V6,
    route6,
    send6,
    INET6,
    ETHERTYPE_IPV6,
    |params: &mut bpf_fib_lookup, tuple: &Tuple<[u32; 4]>| {
        params.__bindgen_anon_3.ipv6_src = tuple.src;
        params.__bindgen_anon_4.ipv6_dst = tuple.dst;
    },
    |header: &mut Ipv6| {
        if header.hop_limit <= 1 {
            return false;
        }
        header.hop_limit -= 1;
        true
    }
);
