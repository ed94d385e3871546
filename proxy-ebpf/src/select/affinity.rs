//! Session affinity: a client keeps its backend while the backend may be selected and the client comes back within the
//! timeout. Silence of the backend changes nothing, as with kube-proxy. A refusal moves the client, if it moves to a backend
//! that has answered lately: see [`leaves`].

use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::decide;
use proxy_common::health::NO_CLIENT;
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;

use super::backend::SelectedBackend;
use crate::env::{Affinity, Counters, Services, Time, Words};
use crate::report;
use crate::select::health;

/// Whether the client with this number leaves its backend for another one: its backend is ejected, or has refused a
/// connection of the client lately, and the other one has answered lately ([`proxy_common::health`]).
#[inline(always)]
pub fn leaves<M: Services>(maps: M, id: u32, other: u32, number: u32) -> bool {
    number != NO_CLIENT
        && health::refuses(maps, id, number)
        && other != 0
        && other != id
        && health::works(maps, other, number)
}

/// Returns the backend of an entry, if the entry is not expired and the backend may still be used.
#[inline(always)]
pub fn backend_of<M: Services>(
    maps: M,
    entry: &AffinityEntry,
    service: &ServiceEntry,
    time: Time,
) -> Option<SelectedBackend<Words<M>>> {
    if !decide::is_in_time(entry, service, time.now, time.config.hz) {
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

/// Returns the backend of a client of the packet path, and restarts the timeout; `None`: the client gets the backend
/// `planned`. `number`: as for [`leaves`].
#[inline(always)]
pub fn lookup_and_refresh<M: Affinity + Counters>(
    maps: M,
    client: &Words<M>,
    service: &ServiceEntry,
    number: u32,
    planned: u32,
    time: Time,
) -> Option<SelectedBackend<Words<M>>> {
    let key = AffinityKey { client: *client, service: service.id };
    // SAFETY: a map value of plain integers, which are checked after they are read.
    let entry = unsafe { maps.affinity(&key)?.read_volatile() };
    let selected = backend_of(maps, &entry, service, time)?;
    if leaves(maps, selected.id, planned, number) {
        return None;
    }
    note(maps, client, service, selected.id, time);
    Some(selected)
}

/// Stores the backend of a client, and the time.
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
        // The map is full, or the kernel could not allocate memory.
        report::reason(maps, Reason::AffinityTableFull);
    }
}

/// Writes the existing entry, or adds one; returns `false` if the entry could not be added.
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
            // SAFETY: a map value. Written in place, since replacing an element of an LRU map costs more than adding one.
            unsafe { entry.write_volatile(new) };
            true
        }
        None => put(&new).is_ok(),
    }
}
