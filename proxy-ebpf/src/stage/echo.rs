//! Answers to ICMP echo requests whose destination is an address of a Service (`--vip-echo`). kube-proxy's mode nftables refuses
//! such packets at cluster addresses, and its mode iptables passes them on; in its mode ipvs, the kernel answers, since the node
//! has the address. The reply tells that the node serves the address, and nothing about endpoints.

use proxy_common::csum::{replace16, update};
use proxy_common::decide;
use proxy_common::node::NODE_ADDR_OWN;
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_ADDRESS, ServiceKey};
use proxy_common::{PROTO_ICMP, PROTO_ICMPV6, V4, V6};

use super::refuse::{HOPS, may_answer, send_back};
use super::translate::Rewrite;
use crate::context::Tuple;
use crate::env::{Counters, ECHO_REPLIES, FlowTable, RateLimit};
use crate::frame::{Frame, HelperFailed};
use crate::header::{Header, Read};
use crate::report;
use crate::select::lookup;
use crate::step::Step;

/// A family whose echo requests can be answered.
pub trait EchoReply: Rewrite + Read {
    /// Protocol number of ICMP.
    const ICMP_PROTO: u8;
    /// Type and code of an echo request.
    const REQUEST: [u8; 2];
    /// Type and code of an echo reply.
    const REPLY: [u8; 2];
}

impl EchoReply for V4 {
    const ICMP_PROTO: u8 = PROTO_ICMP;
    // RFC 792.
    const REQUEST: [u8; 2] = [8, 0];
    const REPLY: [u8; 2] = [0, 0];
}

impl EchoReply for V6 {
    const ICMP_PROTO: u8 = PROTO_ICMPV6;
    // RFC 4443, 4.
    const REQUEST: [u8; 2] = [128, 0];
    const REPLY: [u8; 2] = [129, 0];
}

/// Turns an echo request into its reply, and sends it back. Other packets pass, also later fragments, so a request in several
/// fragments gets no complete reply. `incoming`: the packet arrived on the device; others are answered if this node sends them.
#[inline(always)]
pub fn answer<M: FlowTable + RateLimit + Counters<Family: EchoReply>, F: Frame>(
    maps: M,
    frame: F,
    incoming: bool,
) -> Step {
    if !incoming && !frame.is_local_origin() {
        return Step::Pass;
    }
    let Some(ip) = <M::Family as Read>::read(frame, frame.link_header() as u32) else { return Step::Pass };
    if ip.proto != <M::Family as EchoReply>::ICMP_PROTO || ip.is_later {
        return Step::Pass;
    }
    let mut icmp = [0u16; 2];
    if frame.load(ip.l4, &mut icmp, size_of::<[u16; 2]>() as u32).is_err() {
        return Step::Pass;
    }
    if icmp[0].to_ne_bytes() != <M::Family as EchoReply>::REQUEST {
        return Step::Pass;
    }
    let key = ServiceKey::internal(ip.dst, 0, 0);
    let is_of_service = lookup::service(maps, &key).is_some_and(|entry| entry.kind == KIND_ADDRESS);
    // The stack answers at addresses of the node, and drops martian sources.
    if !is_of_service || maps.node_addr(&ip.dst) & NODE_ADDR_OWN != 0 || decide::is_martian(&ip.src) {
        return Step::Pass;
    }
    if !may_answer(maps, ECHO_REPLIES) {
        return Step::DropFor(Reason::RejectLimited);
    }
    report::reason(maps, Reason::EchoAnswered);
    let by_stack = maps.has_ipsec_policy(&Tuple { src: ip.dst, dst: ip.src, src_port: 0, dst_port: 0 });
    match turn::<F, M::Family>(frame, &ip, icmp).and_then(|()| send_back(frame, by_stack)) {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RejectFailed),
    }
}

/// Swaps the addresses, and writes the new type and time to live. `icmp`: type with code, and checksum.
#[inline(always)]
fn turn<F: Frame, Fam: EchoReply>(
    frame: F,
    ip: &Header<Fam::Words>,
    [request, check]: [u16; 2],
) -> Result<(), HelperFailed> {
    let link = frame.link_header() as u32;
    // The sum over both addresses stays.
    Fam::store_addresses(frame, link, ip.check, [&ip.dst, &ip.src], 0)?;
    Fam::set_ttl(frame, link, HOPS)?;
    let reply = u16::from_ne_bytes(Fam::REPLY);
    frame.store_all(ip.l4, &[reply, update(check, replace16(request, reply))])
}
