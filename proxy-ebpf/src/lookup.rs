//! From what a client dialled to the Service behind it.

use core::ptr::{from_ref, read_volatile};

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
