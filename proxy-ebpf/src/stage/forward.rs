//! Forwards packets by the kernel's routes.
//!
//! The kernel drops a packet whose source is an address of this node as a martian, so such a packet must not go up the
//! stack. The hook on which it arrived forwards it as a router does: next hop, time to live, and MTU of the next link.

use proxy_common::node::{DEVICE_SOURCES, NodeEntry};
use proxy_common::prefilter::SPREAD;
use proxy_common::{Address, Family, V4, V6};

use crate::calls::{declare, routing_calls};
use crate::context::{PacketCtx, Tuple};
use crate::env::{FIB_CACHE_ENTRIES, FibCache, FibEntry, Node, Words};
use crate::frame::{Fib, Frame, HelperFailed, Route};
use crate::header::same;
use crate::net::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use crate::stage::translate::Rewrite;

/// Route lookup, in the kernel or in `fib_cache`.
pub trait Routing<F: Frame>: FibCache<Family: Rewrite + EtherType> {
    routing_calls!(declare!(), Words<Self>, F);
}

/// Whether an `IPsec` policy of the kernel applies to packets with this tuple, or a route by a mark may: then the stack routes what is
/// forwarded with SNAT to a backend. Answers to clients leave as if there were no such route: netfilter, which has not seen the request
/// of their connection, would have no mark for them.
#[inline(always)]
pub fn matches_ipsec_policy<M: Node>(maps: M, tuple: &Tuple<Words<M>>) -> bool {
    let (Some(node), Some(config)) = (maps.node(), maps.config()) else { return false };
    node.has_ipsec_policy(&tuple.src, &tuple.dst)
        || node.routes_by_mark != 0 && config.is_snat_port(tuple.src_port) && is_source(node, &tuple.src)
}

/// Whether packets that are forwarded with SNAT may have this source address.
#[inline(always)]
fn is_source<A: Address>(node: &NodeEntry<A>, addr: &A) -> bool {
    let mut number = 0;
    while number < DEVICE_SOURCES && (number as u32) < node.source_count {
        if same(&node.sources[number].addr, addr) {
            return true;
        }
        number += 1;
    }
    same(&node.source, addr)
}

/// Returns the index in `fib_cache` for the addresses of a tuple.
#[inline(always)]
fn cache_index<A: Address>(tuple: &Tuple<A>) -> u32 {
    let folded = |[a, b, c, d]: [u32; 4]| a ^ b ^ c ^ d;
    let mixed = (folded(tuple.dst.words()) ^ folded(tuple.src.words())).wrapping_mul(SPREAD);
    mixed >> (u32::BITS - FIB_CACHE_ENTRIES.trailing_zeros())
}

/// Returns the route that this CPU has cached for a packet with these addresses and of this length in the tick `now`.
#[inline(always)]
pub fn known_route<M: FibCache, F: Frame>(
    maps: M,
    frame: F,
    tuple: &Tuple<Words<M>>,
    length: u32,
    now: u32,
) -> Option<&'static Route> {
    let entry = maps.fib_entry(cache_index(tuple))?;
    // SAFETY: this CPU's own value, which nothing else refers to.
    let entry = unsafe { &*entry };
    let is_same = entry.at == now
        && entry.from == frame.ifindex()
        && entry.route.ifindex != 0
        && same(&entry.dst, &tuple.dst)
        && same(&entry.src, &tuple.src);
    (is_same && length <= entry.route.mtu).then_some(&entry.route)
}

/// Finds the route of a packet with these addresses and of this length.
///
/// The route is cached for the packets that follow in the same tick: a lookup in the kernel costs more than the rest of the
/// path, and a route that is one tick old (4 ms at 250 Hz) is as valid as that of a packet that waits in a queue. The
/// packet that caused the lookup is sent by the kernel's neighbour code ([`Route::fresh`]), so that a stale next hop is
/// probed at least once a tick.
#[inline(always)]
pub fn find_route<M: FibCache, F: Frame>(
    maps: M,
    frame: F,
    tuple: &Tuple<Words<M>>,
    length: u32,
    route: &mut Route,
) -> Fib {
    let now = maps.jiffies();
    if let Some(known) = known_route(maps, frame, tuple, length, now) {
        *route = *known;
        return Fib::Found;
    }
    // An early hook leaves the comparison with the policies to the next one.
    let is_stacks = if F::EARLY { maps.has_ipsec() } else { maps.has_ipsec_policy(tuple) };
    if is_stacks {
        *route = Route::BY_STACK;
        return Fib::Found;
    }
    let Some(entry) = maps.fib_entry(cache_index(tuple)) else { return Fib::NoRoute };
    // SAFETY: this CPU's own value, which nothing else refers to.
    let entry = unsafe { &mut *entry };
    let probed = if F::EARLY {
        if is_probe_due(entry.probed, now) {
            return Fib::NoRoute;
        }
        if entry.probed == 0 { now | 1 } else { entry.probed }
    } else {
        now | 1
    };
    let found = frame.fib_lookup(&tuple.src, &tuple.dst, length, route);
    if found == Fib::Found {
        if !F::EARLY {
            route.macs[0] = without_group(route.macs);
        }
        let (src, dst, from) = (tuple.src, tuple.dst, frame.ifindex());
        *entry = FibEntry { src, dst, from, at: now, probed, reserved: 0, route: *route };
        route.fresh = 1;
    }
    found
}

/// Returns the first word of the destination and source address of a route. A tunnel has bytes of its own IP address in both places
/// (`ip6tnl`, `ipip`, `sit`), and the kernel drops a frame to a group address. No Ethernet device has one itself. XDP cannot send
/// into a tunnel.
#[inline(always)]
const fn without_group(macs: [u32; 3]) -> u32 {
    let is_group = macs[1] & u32::from_ne_bytes([0, 0, 1, 0]) != 0;
    if is_group { macs[0] & !u32::from_ne_bytes([1, 0, 0, 0]) } else { macs[0] }
}

/// Jiffies after which an early hook leaves a packet to the next hook, which sends it by the kernel's neighbour code:
/// 0.25 s to 2.5 s.
const PROBE: i32 = 250;

/// Whether the kernel has to see a packet of this entry: an early hook sends to the MAC address from its last lookup, and
/// the kernel does not probe a stale next hop to which it never sends. The time is odd: it may be one jiffy ahead.
#[inline(always)]
fn is_probe_due(probed: u32, now: u32) -> bool {
    probed != 0 && now.wrapping_sub(probed).cast_signed() > PROBE
}

/// An Ethernet header without tags. Packed: it is 14 bytes long.
#[repr(C, packed(2))]
struct Ethernet {
    /// Destination and source MAC address.
    macs: [u32; 3],
    ethertype: u16,
}

/// The Ethernet type of a family, in network byte order.
pub trait EtherType: Family {
    /// See [`EtherType`].
    const ETHERTYPE: u16;
}

impl EtherType for V4 {
    const ETHERTYPE: u16 = ETHERTYPE_IPV4 as u16;
}

impl EtherType for V6 {
    const ETHERTYPE: u16 = ETHERTYPE_IPV6 as u16;
}

/// Writes the whole link-layer header. `macs`: destination and source address.
#[inline(always)]
pub fn overwrite_link_header<F: Frame>(frame: F, macs: [u32; 3], ethertype: u16) -> Result<(), HelperFailed> {
    let header = Ethernet { macs, ethertype };
    frame.overwrite(0, &header, size_of::<Ethernet>() as u32)
}

/// Sends the packet by the route in `ctx`. Returns the program's verdict.
#[inline(always)]
pub fn send<F: Frame, Fam: EtherType>(frame: F, ctx: &PacketCtx<Fam::Words>) -> Result<i32, HelperFailed> {
    send_as(frame, &ctx.route, Fam::ETHERTYPE)
}

/// Sends a packet with this Ethernet type by `route`. Returns the program's verdict.
#[inline(always)]
pub fn send_as<F: Frame>(frame: F, route: &Route, ethertype: u16) -> Result<i32, HelperFailed> {
    let no_header = frame.link_header() == 0;
    if no_header {
        // The kernel's helpers need a link-layer header, and remove it if the next device has none.
        frame.push_link_header(ETHERNET as u32)?;
    }
    if route.resolved == 0 {
        return if route.is_by_stack() {
            overwrite_link_header(frame, route.macs, ethertype)?;
            frame.set_translated();
            Ok(frame.redirect_ingress(route.ifindex))
        } else {
            Ok(frame.redirect_neigh(route))
        };
    }
    overwrite_link_header(frame, route.macs, ethertype)?;
    Ok(if route.fresh != 0 { frame.redirect_neigh(route) } else { frame.redirect(route.ifindex) })
}

/// Redirects the packet to the ingress of the route's device instead of its egress; the destination MAC address is the
/// device's own. Returns the program's verdict.
#[inline(always)]
pub fn receive<F: Frame, Fam: EtherType>(frame: F, ctx: &PacketCtx<Fam::Words>) -> Result<i32, HelperFailed> {
    if frame.link_header() == 0 {
        frame.push_link_header(ETHERNET as u32)?;
    }
    let [_, between, last] = ctx.route.macs.map(u32::to_ne_bytes);
    let ([_, _, s0, s1], [s2, s3, s4, s5]) = (between, last);
    let macs = [
        u32::from_ne_bytes([s0, s1, s2, s3]),
        u32::from_ne_bytes([s4, s5, s0, s1]),
        u32::from_ne_bytes([s2, s3, s4, s5]),
    ];
    overwrite_link_header(frame, macs, Fam::ETHERTYPE)?;
    Ok(frame.redirect_ingress(ctx.route.ifindex))
}

#[cfg(test)]
mod tests {
    use proxy_common::Address as _;

    use super::*;

    #[test]
    fn each_word_of_both_addresses_changes_the_index() {
        let index = |words: [u32; 8]| {
            let (src, dst) = words.split_at(4);
            let [src, dst] = [src, dst].map(|words| <[u32; 4]>::from_words(words.try_into().unwrap()));
            let index = cache_index(&Tuple { src, dst, src_port: 0, dst_port: 0 });
            assert!((index as usize) < FIB_CACHE_ENTRIES);
            index
        };
        for set in 0..1u32 << 8 {
            let base: [u32; 8] = core::array::from_fn(|word| (set >> word & 1).wrapping_neg());
            for word in 0..8 {
                let mut words = base;
                words[word] ^= 1 << 5;
                assert_ne!(index(words), index(base), "{base:x?}, word {word}");
            }
        }
    }
}
