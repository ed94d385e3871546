//! Lookup of the kernel's routes, for tc and XDP.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NO_NEIGH,
    BPF_FIB_LKUP_RET_NOT_FWDED, BPF_FIB_LKUP_RET_PROHIBIT, BPF_FIB_LKUP_RET_SUCCESS,
    BPF_FIB_LKUP_RET_UNREACHABLE, BPF_FIB_LKUP_RET_UNSUPP_LWT, bpf_fib_lookup,
};
use aya_ebpf::helpers::generated as helper;
use proxy_common::Address;

use crate::frame::{Fib, Route, Unreachable};

/// `AF_INET`.
const INET: u8 = 2;
/// `AF_INET6`.
const INET6: u8 = 10;

/// Returns the size of `T` in the type that helpers expect.
#[inline(always)]
pub(super) const fn size<T>() -> i32 {
    (size_of::<T>() as u32).cast_signed()
}

/// Implements [`Frame::fib_lookup`](crate::frame::Frame::fib_lookup) for a packet that arrived on the device `ifindex`. `early`:
/// of an early hook, which leaves packets that the stack has to route to the next hook.
///
/// # Safety
/// `context` must be the context of a tc or XDP program.
#[inline(always)]
pub unsafe fn lookup<A: Address>(
    context: *mut c_void,
    ifindex: u32,
    src: &A,
    dst: &A,
    length: u32,
    route: &mut Route,
    early: bool,
) -> Fib {
    // SAFETY: plain integers.
    let mut params: bpf_fib_lookup = unsafe { MaybeUninit::zeroed().assume_init() };
    let is_v6 = size_of::<A>() > size_of::<u32>();
    params.family = if is_v6 { INET6 } else { INET };
    params.ifindex = ifindex;
    // Without a length, the kernel does not compare GSO packets with the MTU, nor any packet whose next hop has no
    // neighbour entry.
    params.__bindgen_anon_1.tot_len = length as u16;
    if is_v6 {
        params.__bindgen_anon_3.ipv6_src = src.words();
        params.__bindgen_anon_4.ipv6_dst = dst.words();
    } else {
        params.__bindgen_anon_3.ipv4_src = src.words()[0];
        params.__bindgen_anon_4.ipv4_dst = dst.words()[0];
    }
    // SAFETY: the caller guarantees the context; the parameters have the size that is passed.
    let found = unsafe { helper::bpf_fib_lookup(context, &raw mut params, size::<bpf_fib_lookup>(), 0) };
    // A negative result means that the kernel rejects the parameters.
    let found = u32::try_from(found).unwrap_or(u32::MAX);
    route.ifindex = params.ifindex;
    // A next hop may be of the other family (RFC 5549); the kernel writes its family.
    route.family = u32::from(params.family);
    route.resolved = u32::from(found == BPF_FIB_LKUP_RET_SUCCESS);
    route.fresh = 0;
    // SAFETY: all variants of the unions are integers.
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
        BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH => Fib::Found,
        BPF_FIB_LKUP_RET_FRAG_NEEDED => Fib::TooBig,
        found if !early && is_stacks(found, is_v6) => {
            *route = Route::BY_STACK;
            Fib::Found
        }
        BPF_FIB_LKUP_RET_NOT_FWDED | BPF_FIB_LKUP_RET_UNREACHABLE | BPF_FIB_LKUP_RET_PROHIBIT => {
            let codes = Unreachable::of::<A>();
            route.mtu = match found {
                BPF_FIB_LKUP_RET_NOT_FWDED => codes.no_route,
                BPF_FIB_LKUP_RET_UNREACHABLE => codes.by_route,
                _ => codes.prohibited,
            };
            Fib::Unreachable
        }
        _ => Fib::NoRoute,
    }
}

/// Whether the stack may forward a packet for which the helper has no route. The helper does not know routes that encapsulate
/// (`ip route ... encap`: MPLS, segment routing, IP in IP). It reads the setting for forwarding of the device, while
/// `ip6_forward` reads that of all devices.
#[inline(always)]
const fn is_stacks(found: u32, is_v6: bool) -> bool {
    found == BPF_FIB_LKUP_RET_UNSUPP_LWT || is_v6 && found == BPF_FIB_LKUP_RET_FWD_DISABLED
}

#[cfg(test)]
mod tests {
    use aya_ebpf::bindings::BPF_FIB_LKUP_RET_BLACKHOLE;

    use super::*;

    #[test]
    fn a_route_that_encapsulates_is_the_stacks() {
        for is_v6 in [false, true] {
            assert!(is_stacks(BPF_FIB_LKUP_RET_UNSUPP_LWT, is_v6));
            assert_eq!(is_stacks(BPF_FIB_LKUP_RET_FWD_DISABLED, is_v6), is_v6);
            for none in [
                BPF_FIB_LKUP_RET_BLACKHOLE,
                BPF_FIB_LKUP_RET_NOT_FWDED,
                BPF_FIB_LKUP_RET_PROHIBIT,
                BPF_FIB_LKUP_RET_UNREACHABLE,
            ] {
                assert!(!is_stacks(none, is_v6), "{none}");
            }
        }
    }
}
