//! Which packets can be rewritten without the kernel's helpers.

use proxy_common::PROTO_UDP;

use super::{BEFORE_TCP_CHECK, BEFORE_UDP_CHECK, Rewrite, Segment, may_be_partial};
use crate::context::Packet;
use crate::frame::Frame;

/// Whether [`rewrite`](super::rewrite) needs one store for the packet, and no helper and no answer: its headers are readable and
/// have no options, its checksum is certainly complete, and a hop is left.
#[inline(always)]
pub fn is_plain<F: Frame, Fam: Rewrite>(frame: F, packet: &Packet<Fam::Words>) -> bool {
    let (link, bounds) = (frame.link_header(), frame.bounds());
    if packet.l4 as usize != link + Fam::HEADER
        || packet.length > u32::from(u16::MAX)
        || frame.gso_size() != 0
    {
        return false;
    }
    let fields = if packet.key.proto == PROTO_UDP {
        bounds.at(link).map(|at: *const Segment<Fam::Header, BEFORE_UDP_CHECK>| {
            // SAFETY: `at` has checked that the whole header is inside the packet.
            unsafe { ((*at).check, Fam::ttl(&(*at).ip)) }
        })
    } else {
        bounds.at(link).map(|at: *const Segment<Fam::Header, BEFORE_TCP_CHECK>| {
            // SAFETY: as above.
            unsafe { ((*at).check, Fam::ttl(&(*at).ip)) }
        })
    };
    fields.is_some_and(|(check, ttl)| ttl > 1 && !may_be_partial::<Fam>(packet, check))
}
