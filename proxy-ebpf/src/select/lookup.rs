//! Looks up the Service of an original destination.

use core::ptr::read_volatile;

use proxy_common::Address;
use proxy_common::decide;
use proxy_common::node::{NODE_ADDR_INTERNAL, NODE_ADDR_PORTS, NodeAddr};
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, ServiceEntry, ServiceKey};

use crate::context::PacketCtx;
use crate::env::{Services, Words};

/// Number of lookups before an entry is considered missing. The kernel replaces an element of a hash map by adding the new one in
/// front of the old one, which it then removes: a lookup between both steps finds neither.
const LOOKS: u32 = 3;

/// Returns a copy of a frontend's entry, all of whose fields belong together.
#[inline(always)]
pub fn service<M: Services>(maps: M, key: &ServiceKey<Words<M>>) -> Option<ServiceEntry> {
    let tag = key.tag();
    let mut look = 0;
    while look < LOOKS {
        look += 1;
        let Some(entry) = maps.service_entry(key) else { continue };
        // SAFETY: a map value; volatile, because the agent may replace the entry while it is read (see `tag`).
        unsafe {
            if read_volatile(&raw const (*entry).tag) == tag {
                let copy = read_volatile(entry);
                if read_volatile(&raw const (*entry).tag) == tag {
                    return Some(copy);
                }
            }
        }
    }
    None
}

/// Returns the frontend of an original destination: an address of a Service itself, or a node port on an address of this
/// node; see [`decide::frontend`].
#[inline(always)]
pub fn frontend<M: Services>(
    maps: M,
    addr: Words<M>,
    port: u16,
    proto: u8,
    outside: bool,
    on: NodeAddr,
) -> Option<ServiceEntry> {
    let orig_dst = ServiceKey::internal(addr, port, proto);
    decide::frontend(orig_dst, outside, on, |key| service(maps, key), |addr| maps.node_addr(addr))
}

/// Whether the address and port of a backend are a frontend, too, for clients inside.
#[inline(always)]
pub fn backend_is_frontend<M: Services>(maps: M, id: u32) -> bool {
    let backend = maps.backend(id);
    backend.is_some_and(|backend| {
        frontend(maps, backend.addr, backend.port, backend.proto, false, NODE_ADDR_PORTS).is_some()
    })
}

/// Looks up the frontend of a packet, and writes it to the context. `outside`: the client is outside.
#[inline(always)]
pub fn packet_frontend<M: Services>(maps: M, ctx: &mut PacketCtx<Words<M>>, outside: bool) {
    let (addr, port, proto) = (ctx.packet.key.dst, ctx.packet.key.dst_port, ctx.packet.key.proto);
    // For an encapsulated packet, a node port on another node's address is one of this node, and the entry for clients
    // outside is not used.
    let tunnelled = ctx.tunnelled != 0;
    let node_addr = |addr: &Words<M>| {
        let bits = maps.node_addr(addr);
        if tunnelled && bits & NODE_ADDR_INTERNAL != 0 { NODE_ADDR_PORTS } else { bits }
    };
    let orig_dst = ServiceKey::internal(addr, port, proto);
    let found = decide::frontend(
        orig_dst,
        outside && !tunnelled,
        NODE_ADDR_PORTS,
        |key| service(maps, key),
        node_addr,
    );
    ctx.frontend = found.unwrap_or(ServiceEntry::NONE);
    ctx.frontend.algorithm = decide::algorithm(&ctx.frontend, outside || tunnelled);
}

/// Returns the frontend of a packet that another node has encapsulated: a Service address other than a cluster address, or a
/// node port on the address of that node; [`ServiceEntry::NONE`]: none.
#[inline(always)]
pub fn tunnelled_frontend<M: Services>(maps: M, addr: Words<M>, port: u16, proto: u8) -> ServiceEntry {
    let mut entry = service(maps, &ServiceKey::internal(addr, port, proto)).unwrap_or(ServiceEntry::NONE);
    if entry.kind == ServiceEntry::NONE.kind && maps.node_addr(&addr) & NODE_ADDR_INTERNAL != 0 {
        entry = node_port(maps, port, proto).unwrap_or(ServiceEntry::NONE);
    }
    let is_external = matches!(entry.kind, KIND_NODE_PORT | KIND_LOAD_BALANCER | KIND_EXTERNAL_IP);
    if is_external { entry } else { ServiceEntry::NONE }
}

/// Returns the Service of a node port.
#[inline(always)]
pub fn node_port<M: Services>(maps: M, port: u16, proto: u8) -> Option<ServiceEntry> {
    service(maps, &ServiceKey::internal(Words::<M>::ZERO, port, proto))
}

/// Returns the reason for a packet or call to an address in the range of Service addresses that has no frontend; see
/// [`decide::why_nothing`].
#[inline(always)]
pub fn why_nothing<M: Services>(maps: M, addr: Words<M>) -> Reason {
    decide::why_nothing(service(maps, &ServiceKey::internal(addr, 0, 0)).map(|entry| entry.kind))
}
