//! From a frontend to the backend that a new connection takes.

use proxy_common::decide;
use proxy_common::reason::Reason;
use proxy_common::select::random_slot;
use proxy_common::service::ServiceEntry;

use crate::maps::{self, Tables};

/// Picks after which an extent is taken to hold no serving backend.
const PICKS: u32 = 4;

/// Where a connection goes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Choice<A> {
    /// Id of the backend.
    pub backend_id: u32,
    /// Its address.
    pub addr: A,
    /// Its port.
    pub port: u16,
    /// Its `BACKEND_*` flag bits.
    pub flags: u32,
}

/// Chooses a backend of the Service.
///
/// `random` is a number that no two connections share but by chance. A backend that has just left may still stand
/// in the extent that this reader began with; another pick then finds one that serves.
#[inline(always)]
pub fn choose<F: Tables>(service: &ServiceEntry, mut random: u32) -> Option<Choice<F::Words>> {
    let (base, count) = (service.slot_base, service.slot_count);
    if count == 0 {
        return None;
    }
    let mut pick = 0;
    while pick < PICKS {
        let backend_id = maps::slot(base + random_slot(random, count))?;
        let backend = F::backend(backend_id)?;
        if decide::serves(backend, service) {
            return Some(Choice { backend_id, addr: backend.addr, port: backend.port, flags: backend.flags });
        }
        // The step of a linear congruential generator (Numerical Recipes): every 32-bit number comes up.
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        pick += 1;
    }
    None
}

/// Why [`choose`] found nothing.
#[inline(always)]
pub fn why_nobody(service: &ServiceEntry) -> Reason {
    if service.slot_count == 0 { decide::nobody(service) } else { Reason::MapInconsistent }
}
