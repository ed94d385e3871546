//! `backends` and `backends6`: one endpoint of one Service port, by id.
//!
//! An id belongs to one (Service port, address, port): an endpoint that leaves a Service is gone for that
//! Service at once, even when another one still holds it. Slots and flows refer to ids; a flow also holds the
//! address, so a reused id is noticed and never followed.

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
    /// Id of the Service port it belongs to.
    pub service: u32,
    /// `BACKEND_*` flag bits, the number of its node ([`tunnel_of`]), and the weight in the upper half ([`weight_of`]).
    pub flags: u32,
}

/// The id is free.
pub const BACKEND_FREE: u8 = 0;
/// The endpoint serves: ready, or serving while it terminates.
pub const BACKEND_ACTIVE: u8 = 1;
/// The endpoint left the Service; the id rests until nothing can refer to it.
pub const BACKEND_GONE: u8 = 2;
/// As [`BACKEND_GONE`], and connections to the endpoint are reset: the removal policy of the Service is `reset`, and its delay
/// is over. TCP only.
pub const BACKEND_RESET: u8 = 3;

/// The endpoint runs on this node.
pub const BACKEND_LOCAL: u32 = 1 << 0;
/// The endpoint is terminating.
pub const BACKEND_TERMINATING: u32 = 1 << 1;
/// The endpoint stands in the extents of policy Cluster: a client that has affinity to it may stay there.
pub const BACKEND_IN_CLUSTER: u32 = 1 << 2;
/// The endpoint stands in the extents of policy Local.
pub const BACKEND_IN_LOCAL: u32 = 1 << 3;

/// Where the number of the endpoint's node in `tunnels` begins in [`BackendEntry::flags`].
pub const BACKEND_TUNNEL_SHIFT: u32 = 4;

/// The number of an endpoint's node in `tunnels`; 0: the endpoint is on this node, or its node has no number.
#[inline(always)]
pub const fn tunnel_of(flags: u32) -> u32 {
    flags >> BACKEND_TUNNEL_SHIFT & (TUNNEL_COUNT - 1)
}

/// Where the weight begins in [`BackendEntry::flags`]; it has the bits above.
pub const BACKEND_WEIGHT_SHIFT: u32 = 16;

/// The weight in the flags of a backend; 0 stands for 1, which layout 2 wrote.
#[inline(always)]
pub const fn weight_of(flags: u32) -> u32 {
    let weight = flags >> BACKEND_WEIGHT_SHIFT;
    if weight == 0 { 1 } else { weight }
}

impl<A: Address> BackendEntry<A> {
    /// A free id.
    pub const FREE: Self =
        Self { addr: A::ZERO, port: 0, proto: 0, state: BACKEND_FREE, service: 0, flags: 0 };

    /// Whether this is still the endpoint at `addr`:`port`, and it serves.
    #[inline(always)]
    pub fn serves(&self, addr: A, port: u16) -> bool {
        self.state == BACKEND_ACTIVE && self.port == port && self.addr == addr
    }
}
