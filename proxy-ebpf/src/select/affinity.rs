//! Session affinity: a client stays with its backend while that one may be selected, and it comes back in time.

use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::decide;
use proxy_common::health::NO_CLIENT;
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;

use super::backend::SelectedBackend;
use crate::env::{Affinity, Counters, Services, Time, Words};
use crate::report;
use crate::select::health;

/// The backend of an entry, if the entry still counts, and the backend is not ejected for the client of that number
/// ([`proxy_common::health`]).
#[inline(always)]
pub fn backend_of<M: Services>(
    maps: M,
    entry: &AffinityEntry,
    service: &ServiceEntry,
    number: u32,
    time: Time,
) -> Option<SelectedBackend<Words<M>>> {
    if !decide::is_in_time(entry, service, time.now, time.config.hz) {
        return None;
    }
    if number != NO_CLIENT && health::is_ejected(maps, entry.backend_id, number) {
        return None;
    }
    let backend = maps.backend(entry.backend_id)?;
    decide::may_stay(backend, service).then_some(SelectedBackend {
        id: entry.backend_id,
        addr: backend.addr,
        port: backend.port,
        flags: backend.flags,
    })
}

/// The backend that a client of the packet path stays with. Its time begins anew. `number`: as of [`backend_of`].
#[inline(always)]
pub fn stay<M: Affinity + Counters>(
    maps: M,
    client: &Words<M>,
    service: &ServiceEntry,
    number: u32,
    time: Time,
) -> Option<SelectedBackend<Words<M>>> {
    let key = AffinityKey { client: *client, service: service.id };
    // SAFETY: a map value, of plain integers; what is read is checked.
    let entry = unsafe { maps.affinity(&key)?.read_volatile() };
    let selected = backend_of(maps, &entry, service, number, time)?;
    note(maps, client, service, selected.id, time);
    Some(selected)
}

/// Notes that a connection of the client began.
#[inline(always)]
pub fn note<M: Affinity + Counters>(
    maps: M,
    client: &Words<M>,
    service: &ServiceEntry,
    backend_id: u32,
    time: Time,
) {
    let key = AffinityKey { client: *client, service: service.id };
    let put = |entry: &AffinityEntry| maps.put_affinity(&key, entry);
    if !write(maps.affinity(&key), backend_id, time, put) {
        report::reason(maps, Reason::AffinityTableFull);
    }
}

/// Writes an entry, or adds it; `false` if that failed.
#[inline(always)]
pub fn write(
    entry: Option<*mut AffinityEntry>,
    backend_id: u32,
    time: Time,
    put: impl FnOnce(&AffinityEntry) -> Result<(), i32>,
) -> bool {
    let new = AffinityEntry { backend_id, last_used: time.now };
    match entry {
        Some(entry) => {
            // SAFETY: a map value. In place: to replace an element of an LRU map costs more than to add one.
            unsafe { entry.write_volatile(new) };
            true
        }
        None => put(&new).is_ok(),
    }
}
