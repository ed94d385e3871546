//! Whether the kernel would receive a frame: the link-layer address of a frame decides, before the stack looks at its IP
//! header. On a flooded or promiscuous port a node sees the frames of all its neighbours.

use crate::context::PacketCtx;
use crate::env::{Node, Words};
use crate::frame::{Frame, PACKET_HOST, PACKET_OTHERHOST};
use crate::header::same;

/// Whether a frame at ingress is for this node. The kernel forwards no packet of a broadcast or multicast frame, and drops
/// frames for other machines; a port of a bridge hands on such frames, and the bridge receives those for its own address.
#[inline(always)]
pub fn is_for_node<M: Node, F: Frame>(maps: M, frame: F) -> bool {
    if frame.link_header() == 0 {
        return true;
    }
    if F::EARLY {
        // Frames of which this hook is not sure pass to the next one, which knows the packet type.
        return is_at(maps, frame).unwrap_or(false);
    }
    match frame.packet_type() {
        PACKET_HOST => true,
        PACKET_OTHERHOST => is_at(maps, frame).unwrap_or(true),
        _ => false,
    }
}

/// Whether a packet that arrived on a device has this node's address as its source. The IPv4 stack drops such a packet, the
/// IPv6 stack forwards it: at egress it must not be taken for a connection of this node, which may use a frontend's port.
#[inline(always)]
pub fn spoofs_node<M: Node>(maps: M, ctx: &PacketCtx<Words<M>>) -> bool {
    size_of::<Words<M>>() > size_of::<u32>()
        && maps.node().is_some_and(|node| same(&node.source, &ctx.packet.key.src))
}

/// Whether the frame has the MAC address at which this node receives the device's frames; `None`: the address is not known.
#[inline(always)]
fn is_at<M: Node, F: Frame>(maps: M, frame: F) -> Option<bool> {
    let known = maps.config()?.mac(frame.ifindex(), |ifindex| maps.device(ifindex));
    if known == 0 {
        return None;
    }
    let destination = frame.bounds().at::<[u16; 3]>(0)?;
    // SAFETY: `at` found all bytes inside the frame.
    let [a, b, c] = unsafe { *destination }.map(|word| u64::from(u16::from_le(word)));
    Some(a | b << 16 | c << 32 == known)
}
