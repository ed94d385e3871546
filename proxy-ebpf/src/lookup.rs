//! From what a client dialled to the Service behind it. Both paths ask here.

use core::ptr::{from_ref, read_volatile};

use proxy_common::Address;
use proxy_common::decide;
use proxy_common::node::NodeAddr;
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};

use crate::maps::Tables;

/// Looks before an entry is taken to be gone.
const LOOKS: u32 = 3;

/// The Service of a frontend, copied so that all its fields belong together.
#[inline(always)]
pub fn service<F: Tables>(key: &ServiceKey<F::Words>) -> Option<ServiceEntry> {
    let tag = key.tag();
    let mut look = 0;
    while look < LOOKS {
        let entry = F::service(key)?;
        // SAFETY: a map value; volatile, because the agent may replace the entry while we read (see `tag`).
        unsafe {
            if read_volatile(&raw const entry.tag) == tag {
                let copy = read_volatile(from_ref(entry));
                if read_volatile(&raw const entry.tag) == tag {
                    return Some(copy);
                }
            }
        }
        look += 1;
    }
    None
}

/// What a client dialled: an address of a Service itself, or a node port on an address of this node; see
/// [`decide::frontend`].
#[inline(always)]
pub fn frontend<F: Tables>(
    addr: F::Words,
    port: u16,
    proto: u8,
    outside: bool,
    on: NodeAddr,
) -> Option<ServiceEntry> {
    let dialled = ServiceKey::internal(addr, port, proto);
    decide::frontend(dialled, outside, on, |key| service::<F>(key), |addr| F::node_addr(addr))
}

/// The Service whose node port this is.
#[inline(always)]
pub fn node_port<F: Tables>(port: u16, proto: u8) -> Option<ServiceEntry> {
    service::<F>(&ServiceKey::internal(F::Words::ZERO, port, proto))
}

/// Whether the address is in the range of Service addresses.
#[inline(always)]
pub fn is_service_address<F: Tables>(addr: &F::Words) -> bool {
    F::node().is_some_and(|node| node.is_service_address(addr))
}

/// Why nothing is behind an address in the range of Service addresses: the address has no Service, or its Service
/// no such port (kube-proxy's nftables mode).
#[inline(always)]
pub fn why_nothing<F: Tables>(addr: F::Words) -> Reason {
    decide::why_nothing(F::service(&ServiceKey::internal(addr, 0, 0)).is_some())
}
