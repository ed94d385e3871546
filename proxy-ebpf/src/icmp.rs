//! ICMP and ICMPv6 errors about translated packets. An error quotes the packet that it is about as its sender saw
//! it: the quote, and the error's own addresses, are translated back, so that path MTU discovery, traceroute and
//! "port unreachable" reach the socket that sent the packet.
//!
//! What is quoted may be short: eight bytes behind the IP header are all that a sender owes (RFC 792). The sums are
//! corrected by what is written, so they are as right as they came.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::csum::{replace16, replace32, update};
use proxy_common::filter::Role;
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY, FLOW_OWN, FLOW_SNAT, FlowKey};
use proxy_common::reason::Reason;
use proxy_common::{Address, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4, V6};

use crate::flow::{self, Index, Time};
use crate::header::{Header, Read, same};
use crate::hook::tc::{DROP, NEXT, SEND, drop_because};
use crate::maps;
use crate::nat::{self, Rewrite, Tuple, address_difference, ports};
use crate::net::{link_header, tcp, udp};
use crate::route::{self, Routes};
use crate::sctp;
use crate::skb::{HelperFailed, Skb};

/// Bytes of an ICMP header.
const ICMP: u32 = 8;
/// Bytes of a transport header that every quote has.
const QUOTED: u32 = 8;
/// Instead of a verdict: it is translated, and its addresses are left for [`Control::onward`].
const ONWARD: i32 = 200;
/// Offset of the checksum in an ICMP header.
const CHECK: u32 = 2;

/// A family whose errors can be translated.
pub trait Control: Routes + Rewrite + Index + Read {
    /// The protocol of its errors.
    const PROTO: u8;
    /// Whether their checksum covers the addresses (RFC 4443, 2.3).
    const COVERS_ADDRESSES: bool;
    /// Whether a message of that type quotes a packet, and is no order to route otherwise.
    fn is_error(kind: u8) -> bool;
    /// Translates an ICMP packet if it is an error about a packet of ours, and gives the verdict. `direction` is
    /// [`DIRECTION_FORWARD`] where it comes in, and [`DIRECTION_REPLY`] where it goes out.
    fn error(skb: Skb, direction: u32) -> i32;
    /// Finds the way of an error about a packet that was sent on from here.
    fn onward(skb: Skb) -> i32;
}

/// An error, and the packet that it quotes.
struct Quote<A> {
    outer: Header<A>,
    inner: Header<A>,
    /// Checksum of the error.
    check: u16,
    /// Both ports of the quoted packet as they stand.
    ports: u32,
}

impl<A: Address> Quote<A> {
    /// The key of a packet that goes the error's way.
    #[inline(always)]
    fn key(&self, direction: u8) -> FlowKey<A> {
        let [a, b, c, d] = self.ports.to_ne_bytes();
        FlowKey {
            src: self.inner.dst,
            dst: self.inner.src,
            src_port: u16::from_be_bytes([c, d]),
            dst_port: u16::from_be_bytes([a, b]),
            proto: self.inner.proto,
            direction,
            reserved: 0,
        }
    }
}

/// Reads an error; `None` if the packet is none, or quotes too little.
#[inline(always)]
fn read<F: Control>(skb: Skb) -> Option<Quote<F::Words>> {
    let outer = F::read(skb, link_header() as u32)?;
    if outer.proto != F::PROTO || outer.is_later {
        return None;
    }
    let mut icmp = [0u16; 2];
    skb.load(outer.l4, &mut icmp, size_of::<[u16; 2]>() as u32).ok()?;
    let [kind, _code] = icmp[0].to_ne_bytes();
    if !F::is_error(kind) {
        return None;
    }
    let inner = F::read(skb, outer.l4 + ICMP)?;
    let is_ours = matches!(inner.proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP);
    // An error goes to whom the packet came from.
    if inner.is_later || !is_ours || inner.l4 + QUOTED > outer.end || !same(&inner.src, &outer.dst) {
        return None;
    }
    let mut start = [0u32; 2];
    skb.load(inner.l4, &mut start, QUOTED).ok()?;
    let [ports, _] = start;
    Some(Quote { outer, inner, check: icmp[1], ports })
}

/// The direction of packets that go the error's way: that of the hook, unless the quoted packet was sent on under an
/// address of this node; then its error comes in as its reply would.
#[inline(always)]
fn way<A>(quote: &Quote<A>, direction: u8, time: Time) -> u8 {
    let [high, low, _, _] = quote.ports.to_ne_bytes();
    let port = u16::from_be_bytes([high, low]);
    let is_snat = port >= time.config.snat_first && port <= time.config.snat_last;
    if is_snat { DIRECTION_REPLY } else { direction }
}

/// [`Control::error`].
#[inline(always)]
fn error<F: Control>(skb: Skb, at: u8) -> i32 {
    let Some(quote) = read::<F>(skb) else { return NEXT };
    let Some(time) = Time::now() else { return NEXT };
    let key = quote.key(way(&quote, at, time));
    let may_be = if key.direction == DIRECTION_FORWARD {
        maps::may_be(Role::Frontend, &key.dst, key.dst_port, key.proto)
    } else {
        maps::may_be(Role::Backend, &key.src, key.src_port, key.proto)
    };
    if !may_be {
        return NEXT;
    }
    let Some(known) = flow::find::<F>(&key, time.hash(&key), time) else { return NEXT };
    let to = if key.direction == DIRECTION_FORWARD { known.to_backend() } else { known.to_client() };
    let Some(to) = to else { return drop_because(Reason::MapInconsistent) };
    let is_sent_on = at == DIRECTION_FORWARD && known.state() & (FLOW_SNAT | FLOW_OWN) == FLOW_SNAT;
    if translate::<F>(skb, &quote, &to).is_err() {
        return drop_because(Reason::RewriteFailed);
    }
    if !is_sent_on {
        return NEXT;
    }
    let Some(scratch) = F::scratch() else { return DROP };
    // SAFETY: a map value that is this CPU's own.
    unsafe {
        (*scratch).left.packet.key.src = sender(&quote, &to);
        (*scratch).left.packet.key.dst = to.dst;
    }
    ONWARD
}

/// [`Control::onward`].
#[inline(always)]
fn onward<F: Control>(skb: Skb) -> i32 {
    let Some(left) = F::scratch() else { return DROP };
    // SAFETY: a map value that is this CPU's own.
    let key = unsafe { &(*left).left.packet.key };
    let to = Tuple { src: key.src, dst: key.dst, src_port: 0, dst_port: 0 };
    let length = skb.length() - link_header() as u32;
    if F::route(skb, &to, length) == route::FOUND { SEND } else { drop_because(Reason::NoRoute) }
}

/// Translates an ICMP packet that comes in, if it is an error about a packet of ours.
#[inline(always)]
pub fn incoming<F: Control>(skb: Skb) -> i32 {
    match F::error(skb, u32::from(DIRECTION_FORWARD)) {
        ONWARD => F::onward(skb),
        verdict => verdict,
    }
}

/// The same for one that goes out.
#[inline(always)]
pub fn outgoing<F: Control>(skb: Skb) -> i32 {
    F::error(skb, u32::from(DIRECTION_REPLY))
}

/// Whom the error is from: what the quoted packet's end says of itself; what a router on the way says stays its own.
#[inline(always)]
fn sender<A: Address>(quote: &Quote<A>, to: &Tuple<A>) -> A {
    if same(&quote.outer.src, &quote.inner.dst) { to.src } else { quote.outer.src }
}

/// Writes the error about a packet which, the error's way, becomes `to`.
#[inline(always)]
fn translate<F: Control>(
    skb: Skb,
    quote: &Quote<F::Words>,
    to: &Tuple<F::Words>,
) -> Result<(), HelperFailed> {
    let (outer, inner) = (&quote.outer, &quote.inner);
    let src = sender(quote, to);
    let addresses = address_difference(&outer.src, &src) + address_difference(&outer.dst, &to.dst);
    F::store_addresses(skb, link_header() as u32, outer.check, [&src, &to.dst], addresses)?;
    let mut sum = if F::COVERS_ADDRESSES { addresses } else { 0 };
    // The quoted packet went the other way.
    let addresses = address_difference(&inner.src, &to.dst) + address_difference(&inner.dst, &to.src);
    sum += F::store_addresses(skb, outer.l4 + ICMP, inner.check, [&to.dst, &to.src], addresses)?;
    let new_ports = ports(to.dst_port, to.src_port);
    skb.store(inner.l4, &new_ports)?;
    let difference = replace32(quote.ports, new_ports);
    sum += difference;
    sum += if inner.proto == PROTO_SCTP {
        sctp::correct(skb, inner.l4, inner.end, outer.end, quote.ports ^ new_ports)?
    } else {
        transport_check(skb, outer, inner, addresses + difference)?
    };
    // A sum over the whole packet that a driver made stays: each checksum makes up for what it covers.
    skb.store(outer.l4 + CHECK, &update(quote.check, sum))
}

/// Corrects the quoted transport checksum if it is quoted, and gives what that adds to a sum.
#[inline(always)]
fn transport_check<A>(
    skb: Skb,
    outer: &Header<A>,
    inner: &Header<A>,
    difference: u64,
) -> Result<u64, HelperFailed> {
    let at = inner.l4 + if inner.proto == PROTO_UDP { udp::CHECK } else { tcp::CHECK };
    let mut old = 0u16;
    let size = size_of::<u16>() as u32;
    if at + size > outer.end || skb.load(at, &mut old, size).is_err() {
        return Ok(0);
    }
    let new = update(old, difference);
    let new = if inner.proto == PROTO_UDP { nat::udp_check(old, new) } else { new };
    skb.store(at, &new)?;
    Ok(replace16(old, new))
}

/// As a function that the verifier checks once, on its own ("global").
macro_rules! control {
    ($family:ty, $error:ident, $onward:ident, $proto:ident, $covers_addresses:literal, $kinds:pat) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $error(skb: *mut __sk_buff, direction: u32) -> i32 {
            error::<$family>(Skb::from_raw(skb), direction as u8 & 1)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $onward(skb: *mut __sk_buff) -> i32 {
            onward::<$family>(Skb::from_raw(skb))
        }

        impl Control for $family {
            const PROTO: u8 = $proto;
            const COVERS_ADDRESSES: bool = $covers_addresses;

            #[inline(always)]
            fn is_error(kind: u8) -> bool {
                matches!(kind, $kinds)
            }

            #[inline(always)]
            fn error(skb: Skb, direction: u32) -> i32 {
                $error(skb.raw(), direction)
            }

            #[inline(always)]
            fn onward(skb: Skb) -> i32 {
                $onward(skb.raw())
            }
        }
    };
}

// Destination unreachable, time exceeded, parameter problem (RFC 792).
control!(V4, error4, onward4, PROTO_ICMP, false, 3 | 11 | 12);
// Destination unreachable, packet too big, time exceeded, parameter problem (RFC 4443).
control!(V6, error6, onward6, PROTO_ICMPV6, true, 1..=4);
