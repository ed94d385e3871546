//! `backends` and `backends6`: one endpoint of one Service port, by id.
//!
//! An id belongs to one (Service port, address, port). An endpoint that is removed from one Service is removed for that
//! Service at once, even if another Service still has it. Slots and flows refer to ids. A flow also holds the address, so
//! the programs notice a reused id and never follow it.

use crate::Address;
use crate::map_names::TUNNEL_COUNT;

/// Value of `backends` (an array; the index is the backend id, and id 0 is never used).
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendEntry<A> {
    /// Endpoint address.
    pub addr: A,
    /// Endpoint port, host byte order.
    pub port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// A `BACKEND_*` state.
    pub state: u8,
    /// Id of the Service port of the endpoint.
    pub service: u32,
    /// `BACKEND_*` flag bits, the number of the endpoint's node ([`tunnel_of`]), and the weight in the upper half
    /// ([`weight_of`]).
    pub flags: u32,
}

/// The id is free.
pub const BACKEND_FREE: u8 = 0;
/// The endpoint serves: ready, or serving while it terminates.
pub const BACKEND_ACTIVE: u8 = 1;
/// The endpoint was removed from the Service; the id is in quarantine until nothing can refer to it.
pub const BACKEND_GONE: u8 = 2;
/// As [`BACKEND_GONE`], and connections to the endpoint are reset: the removal policy of the Service is `reset`, and the
/// removal delay has passed. TCP only.
pub const BACKEND_RESET: u8 = 3;

/// The endpoint runs on this node.
pub const BACKEND_LOCAL: u32 = 1 << 0;
/// The endpoint is terminating.
pub const BACKEND_TERMINATING: u32 = 1 << 1;
/// The endpoint is in the extents of policy Cluster: a client with affinity to the endpoint may keep it.
pub const BACKEND_IN_CLUSTER: u32 = 1 << 2;
/// The endpoint is in the extents of policy Local.
pub const BACKEND_IN_LOCAL: u32 = 1 << 3;

/// Lowest bit of the number of the endpoint's node in `tunnels`, in [`BackendEntry::flags`].
pub const BACKEND_TUNNEL_SHIFT: u32 = 4;

/// Returns the number of an endpoint's node in `tunnels`; 0 if the endpoint is on this node, or its node has no number.
#[inline(always)]
pub const fn tunnel_of(flags: u32) -> u32 {
    flags >> BACKEND_TUNNEL_SHIFT & (TUNNEL_COUNT - 1)
}

/// Lowest bit of the weight in [`BackendEntry::flags`]; the weight has all higher bits, too.
pub const BACKEND_WEIGHT_SHIFT: u32 = 16;

/// Returns the weight in the flags of a backend. A stored 0 means weight 1.
#[inline(always)]
pub const fn weight_of(flags: u32) -> u32 {
    let weight = flags >> BACKEND_WEIGHT_SHIFT;
    if weight == 0 { 1 } else { weight }
}

impl<A: Address> BackendEntry<A> {
    /// The entry of a free id.
    pub const FREE: Self =
        Self { addr: A::ZERO, port: 0, proto: 0, state: BACKEND_FREE, service: 0, flags: 0 };

    /// Whether the id still belongs to the endpoint at `addr`:`port`, and the endpoint serves.
    #[inline(always)]
    pub fn serves(&self, addr: A, port: u16) -> bool {
        self.state == BACKEND_ACTIVE && self.port == port && self.addr == addr
    }
}
