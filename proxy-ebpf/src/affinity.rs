//! Session affinity: a client stays with its backend while that one may be chosen, and it comes back in time.

use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;
use proxy_common::{Family, decide};

use crate::balance::Choice;
use crate::flow::Time;
use crate::maps::{self, Tables};
use crate::report;

/// The backend of an entry, if it holds still.
#[inline(always)]
pub fn holds<F: Tables>(
    entry: &AffinityEntry,
    service: &ServiceEntry,
    time: Time,
) -> Option<Choice<F::Words>> {
    if !decide::is_in_time(entry, service, time.now, time.config.hz) {
        return None;
    }
    let backend = F::backend(entry.backend_id)?;
    decide::may_stay(backend, service).then_some(Choice {
        backend_id: entry.backend_id,
        addr: backend.addr,
        port: backend.port,
        flags: backend.flags,
    })
}

/// The backend that a client of the packet path stays with.
#[inline(always)]
pub fn stay<F: Tables>(
    client: &F::Words,
    service: &ServiceEntry,
    time: Time,
) -> Option<Choice<<F as Family>::Words>> {
    let key = AffinityKey { client: *client, service: service.id };
    // SAFETY: a map value, of plain integers; what is read is checked.
    let choice = holds::<F>(unsafe { &*F::affinity(&key)? }, service, time)?;
    note::<F>(client, service, choice.backend_id, time);
    Some(choice)
}

/// Notes that a connection of the client began.
#[inline(always)]
pub fn note<F: Tables>(client: &F::Words, service: &ServiceEntry, backend_id: u32, time: Time) {
    let key = AffinityKey { client: *client, service: service.id };
    write(F::affinity(&key), backend_id, time, |entry| F::put_affinity(&key, entry));
}

/// The backend that a client of the socket path stays with: all sockets of a network namespace are one client.
#[inline(always)]
pub fn stay_netns<F: Tables>(netns: u64, service: &ServiceEntry, time: Time) -> Option<Choice<F::Words>> {
    let place = maps::netns_affinity(&netns_key(netns, service))?;
    // SAFETY: a map value, of plain integers; what is read is checked.
    let choice = holds::<F>(unsafe { &*place }, service, time)?;
    note_netns(netns, service, choice.backend_id, time);
    Some(choice)
}

/// Notes that one of its connections began.
#[inline(always)]
pub fn note_netns(netns: u64, service: &ServiceEntry, backend_id: u32, time: Time) {
    let key = netns_key(netns, service);
    write(maps::netns_affinity(&key), backend_id, time, |entry| maps::put_netns_affinity(&key, entry));
}

#[inline(always)]
fn netns_key(netns: u64, service: &ServiceEntry) -> NetnsAffinityKey {
    NetnsAffinityKey { netns, service: service.id, reserved: 0 }
}

#[inline(always)]
fn write(
    place: Option<*mut AffinityEntry>,
    backend_id: u32,
    time: Time,
    put: impl FnOnce(&AffinityEntry) -> Result<(), i32>,
) {
    let entry = AffinityEntry { backend_id, last_used: time.now };
    match place {
        // SAFETY: a map value. In place: to replace an element of an LRU map costs more than to add one.
        Some(place) => unsafe { *place = entry },
        None => {
            if put(&entry).is_err() {
                report::reason(Reason::AffinityTableFull);
            }
        }
    }
}
