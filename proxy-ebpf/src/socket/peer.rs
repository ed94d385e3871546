//! The original destination of a socket and the backend that replaced it: in the socket's own storage if it is connected,
//! else in `sockets`. The module `unconnected` is for unconnected UDP sockets.

use proxy_common::reason::Reason;
use proxy_common::select::{is_by_latency, is_by_load};
use proxy_common::service::{SERVICE_EJECTS, ServiceEntry};
use proxy_common::socket::{
    SocketEntry, SocketKey, SocketStorage, TIMED, TO_FRONTEND, USED_WITHIN, socket_family,
};
use proxy_common::{Address, Family, decide};

use crate::env::{OpenConnections, Sockets, Words};
use crate::header::same;
use crate::report;
use crate::select::backend::SelectedBackend;
use crate::select::load;
use crate::sock::Sockaddr;

/// The address of a call, as the application wrote it.
#[derive(Clone, Copy)]
pub struct OrigDst<A> {
    /// The address.
    pub addr: A,
    /// The port, host byte order.
    pub port: u16,
    /// The protocol.
    pub proto: u8,
}

/// Returns the address of a call. The kernel connects to 127.0.0.1 instead of 0.0.0.0 (`ip_route_output_key`), where the node's node
/// ports may answer.
#[inline(always)]
pub fn orig_dst<S: Sockaddr>(call: &S) -> OrigDst<<S::Family as Family>::Words> {
    OrigDst { addr: decide::loopback_of_zero(&call.addr()), port: call.port(), proto: call.proto() }
}

/// Stores the original destination of a connected socket, and its backend.
#[inline(always)]
pub fn connected<S: Sockaddr, M>(
    maps: M,
    call: &S,
    service: &ServiceEntry,
    backend: &SelectedBackend<Words<M>>,
    orig_dst: &OrigDst<Words<M>>,
) where
    M: Sockets<Family = S::Family>,
{
    match call.storage(true) {
        Some(storage) => {
            let value = SocketStorage {
                frontend: orig_dst.addr.words(),
                backend: backend.addr.words(),
                frontend_port: orig_dst.port,
                backend_port: backend.port,
                service: service.id,
                backend_id: backend.id,
                family: socket_family::<Words<M>>(),
                reserved: 0,
                counted: if is_by_latency(service.algorithm) {
                    TIMED
                } else {
                    is_by_load(service.algorithm).into()
                },
                watched: u8::from(service.flags & SERVICE_EJECTS != 0),
            };
            // SAFETY: the socket's own storage; only one call at a time changes the socket's connection.
            let storage = unsafe { &mut *storage };
            uncount(maps, storage);
            *storage = value;
            if value.counted != 0 {
                load::begun(maps, backend.id);
            }
        }
        None => put_back_translation(maps, call, service.id, backend, orig_dst),
    }
}

/// Stops counting the socket as an open connection of its backend.
#[inline(always)]
pub fn uncount<M: OpenConnections>(maps: M, storage: &mut SocketStorage) {
    if storage.counted != 0 {
        storage.counted = 0;
        load::ended(maps, storage.backend_id);
    }
}

/// Stores in `sockets` the frontend to which the socket sends messages for this backend.
#[inline(always)]
pub fn put_back_translation<S: Sockaddr, M>(
    maps: M,
    call: &S,
    service: u32,
    backend: &SelectedBackend<Words<M>>,
    orig_dst: &OrigDst<Words<M>>,
) where
    M: Sockets<Family = S::Family>,
{
    let (OrigDst { addr, port, proto }, last_used) = (*orig_dst, maps.jiffies());
    let key = SocketKey::new(call.cookie(), backend.addr, backend.port, proto, TO_FRONTEND);
    let entry = SocketEntry { addr, port, reserved: 0, service, backend_id: backend.id, last_used };
    put(maps, &key, &entry);
}

/// Returns the translated address of a peer in `sockets`: the backend for a frontend, or the frontend for a backend.
#[inline(always)]
pub fn find<M: Sockets>(maps: M, key: &SocketKey<Words<M>>) -> Option<SocketEntry<Words<M>>> {
    let (entry, now) = (maps.peer(key)?, maps.jiffies());
    // SAFETY: a map value, and only the socket that owns the cookie writes its entries.
    let found = unsafe { *entry };
    if now.wrapping_sub(found.last_used) > USED_WITHIN {
        // SAFETY: as above.
        unsafe { (&raw mut (*entry).last_used).write_volatile(now) };
    }
    Some(found)
}

/// Adds an entry to `sockets`, or replaces it.
#[inline(always)]
pub fn put<M: Sockets>(maps: M, key: &SocketKey<Words<M>>, entry: &SocketEntry<Words<M>>) {
    if maps.put_peer(key, entry).is_err() {
        report::reason(maps, Reason::SocketTableFull);
    }
}

/// Removes the Service to which the socket was connected.
#[inline(always)]
pub fn disconnected<S: Sockaddr, M: OpenConnections>(maps: M, call: &S) {
    if let Some(storage) = call.storage(false) {
        // SAFETY: the socket's own storage; only one call at a time changes the socket's connection.
        let storage = unsafe { &mut *storage };
        storage.family = 0;
        uncount(maps, storage);
    }
}

/// Returns the frontend to which the application connected the socket; `None`: by its storage, the socket is not connected to
/// this peer through a Service.
#[inline(always)]
pub fn frontend<S: Sockaddr, A: Address>(call: &S, peer: &OrigDst<A>) -> Option<(A, u16)>
where
    S::Family: Family<Words = A>,
{
    let storage = call.storage(false)?;
    // SAFETY: the socket's own storage.
    let storage = unsafe { &*storage };
    storage
        .has_backend(socket_family::<A>(), &peer.addr.words(), peer.port)
        .then(|| (Address::from_words(storage.frontend), storage.frontend_port))
}

/// Returns the backend of a socket that the application connected to this frontend, by the socket's storage.
#[inline(always)]
pub fn backend<S: Sockaddr, A: Address>(call: &S, frontend: &OrigDst<A>) -> Option<(A, u16)>
where
    S::Family: Family<Words = A>,
{
    let storage = call.storage(false)?;
    // SAFETY: the socket's own storage.
    let storage = unsafe { &*storage };
    let is_same = storage.family == socket_family::<A>()
        && storage.frontend_port == frontend.port
        && same(&storage.frontend, &frontend.addr.words());
    is_same.then(|| (Address::from_words(storage.backend), storage.backend_port))
}
