//! The Services to which an unconnected UDP socket sends: in the socket's own storage, else in `sockets`.

use proxy_common::Address;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_FREE, BackendEntry};
use proxy_common::socket::{
    SOCKET_PEERS, SocketEntry, SocketKey, SocketPeer, SocketPeers, TO_BACKEND, TO_FRONTEND, socket_family,
};

use super::peer::{self, OrigDst, orig_dst};
use crate::env::{Services, Sockets, Words};
use crate::header::same;
use crate::select::backend::SelectedBackend;
use crate::shared::{opaque, opaque_to_verifier};
use crate::sock::Sockaddr;

/// Returns the peers of the socket; with `create` they are allocated if there are none.
#[inline(always)]
fn peers<'a, S: Sockaddr>(call: &S, create: bool) -> Option<&'a mut SocketPeers> {
    // SAFETY: the socket's own storage, and the kernel locks the socket while the programs for its messages run.
    call.peers(create).map(|peers| unsafe { &mut *peers })
}

/// Returns the same peers, about which the compiler knows nothing. If it kept the families that it has read before, each
/// combination of them would be a state for the verifier.
#[inline(always)]
fn again(peers: &mut SocketPeers) -> &SocketPeers {
    let address = opaque((&raw mut *peers).expose_provenance() as u64);
    // SAFETY: the same address.
    unsafe { &*core::ptr::with_exposed_provenance(address as usize) }
}

/// Returns a place about which the compiler knows nothing, so that it keeps the mask that the verifier needs; the verifier knows
/// nothing, either: it would walk through the code after it again for each place. `addr` is what was looked for.
#[inline(always)]
fn opaque_place<A: Address>(place: u32, addr: &A) -> u32 {
    opaque_to_verifier(u64::from(place), u64::from(addr.words()[0])) as u32
}

/// Returns the backend that the socket has for this address, and shows the address as the source of its messages. Whether the
/// backend still serves is for the caller to decide.
#[inline(always)]
pub fn backend<S: Sockaddr, M>(maps: M, call: &S) -> Option<SocketEntry<Words<M>>>
where
    M: Sockets<Family = S::Family>,
{
    // No hook sees `connect(AF_UNSPEC)`, nor a `connect` that fails after its hook.
    peer::disconnected(maps, call);
    let OrigDst { addr, port, .. } = orig_dst(call);
    if let Some(peers) = peers(call, false)
        && let Some(place) = peers.of_frontend(socket_family::<Words<M>>(), &addr.words(), port)
    {
        let place = opaque_place(place, &addr);
        if peers.at(place).shown == 0 {
            peers.show(place);
        }
        let peer = peers.at(place);
        return Some(SocketEntry {
            addr: Address::from_words(peer.backend),
            port: peer.backend_port,
            reserved: 0,
            service: peer.service,
            backend_id: peer.backend_id,
            last_used: 0,
        });
    }
    let orig_dst = orig_dst(call);
    let found = peer::find(maps, &key_to_backend(call, &orig_dst))?;
    hide(call, &found.addr, found.port);
    let backend = SelectedBackend { id: found.backend_id, addr: found.addr, port: found.port, flags: 0 };
    refresh_back_translation(maps, call, found.service, &backend, &orig_dst);
    Some(found)
}

/// Stores the backend that was selected for an address.
#[inline(always)]
pub fn put<S: Sockaddr, M>(maps: M, call: &S, service: u32, backend: &SelectedBackend<Words<M>>)
where
    M: Sockets<Family = S::Family>,
{
    let OrigDst { addr, port, .. } = orig_dst(call);
    let family = socket_family::<Words<M>>();
    if let Some(peers) = peers(call, true) {
        let serves = |peer: &SocketPeer| is_serving(maps, peer);
        let place = peers.of_frontend(family, &addr.words(), port).or_else(|| again(peers).vacant(serves));
        let place = place.map(|place| opaque_place(place, &addr));
        // True for each place. The verifier compares states at branches only, and here they become equal.
        if let Some(place) = place
            && place < SOCKET_PEERS as u32
        {
            // In place: a whole value would need too much stack.
            let peer = peers.at(place);
            peer.frontend = call.addr().words();
            peer.backend = backend.addr.words();
            peer.frontend_port = port;
            peer.backend_port = backend.port;
            peer.service = service;
            peer.backend_id = backend.id;
            peer.family = family;
            peers.show(place);
            return;
        }
    }
    let entry = SocketEntry {
        addr: backend.addr,
        port: backend.port,
        reserved: 0,
        service,
        backend_id: backend.id,
        last_used: maps.jiffies(),
    };
    hide(call, &backend.addr, backend.port);
    let orig_dst = orig_dst(call);
    peer::put(maps, &key_to_backend(call, &orig_dst), &entry);
    peer::put_back_translation(maps, call, service, backend, &orig_dst);
}

/// Returns the row of a backend if it is still that of this endpoint of the Service.
#[inline(always)]
fn row<M: Services>(
    maps: M,
    id: u32,
    service: u32,
    addr: &Words<M>,
    port: u16,
) -> Option<&'static BackendEntry<Words<M>>> {
    maps.backend(id).filter(|row| {
        row.state != BACKEND_FREE && row.service == service && row.port == port && same(&row.addr, addr)
    })
}

/// Whether the backend of a peer serves. A peer of the other family is not examined, and stays.
#[inline(always)]
fn is_serving<M: Services>(maps: M, peer: &SocketPeer) -> bool {
    let addr = Address::from_words(peer.backend);
    peer.family != socket_family::<Words<M>>()
        || row(maps, peer.backend_id, peer.service, &addr, peer.backend_port)
            .is_some_and(|row| row.state == BACKEND_ACTIVE)
}

/// Shows a backend's own address as the source of its messages, because the socket connects or sends directly to it. With a stack
/// frame of its own: the caller's is large.
#[inline(never)]
pub fn direct<S: Sockaddr, M: Sockets<Family = S::Family>>(maps: M, call: &S, direct: &OrigDst<Words<M>>) {
    peer::disconnected(maps, call);
    hide(call, &direct.addr, direct.port);
    let key = SocketKey::new(call.cookie(), direct.addr, direct.port, direct.proto, TO_FRONTEND);
    if maps.peer(&key).is_some() {
        maps.remove_peer(&key);
    }
}

/// Shows no frontend of the storage as the source of a backend's messages.
#[inline(always)]
fn hide<S: Sockaddr, A: Address>(call: &S, addr: &A, port: u16) {
    if let Some(peers) = peers(call, false) {
        peers.hide(socket_family::<A>(), &addr.words(), port);
    }
}

/// Returns the frontend to which the application sends messages for this backend; `None`: it sends to the backend itself, or the
/// endpoint was removed long ago, and another pod may have its address.
#[inline(always)]
pub fn frontend<S: Sockaddr, M>(maps: M, call: &S, peer: &OrigDst<Words<M>>) -> Option<(Words<M>, u16)>
where
    M: Sockets<Family = S::Family>,
{
    if let Some(peers) = peers(call, false)
        && let Some(place) = peers.shown(socket_family::<Words<M>>(), &peer.addr.words(), peer.port)
    {
        let shown = peers.at(opaque_place(place, &peer.addr));
        row(maps, shown.backend_id, shown.service, &peer.addr, peer.port)?;
        return Some((Address::from_words(shown.frontend), shown.frontend_port));
    }
    let key = SocketKey::new(call.cookie(), peer.addr, peer.port, peer.proto, TO_FRONTEND);
    let entry = peer::find(maps, &key)?;
    row(maps, entry.backend_id, entry.service, &peer.addr, peer.port)?;
    Some((entry.addr, entry.port))
}

/// Stores the frontend to which the socket sends messages for this backend, unless the entry is already there. If two Services
/// have the backend, the entry is that of the Service to which the socket sent last.
#[inline(always)]
fn refresh_back_translation<S: Sockaddr, M>(
    maps: M,
    call: &S,
    service: u32,
    backend: &SelectedBackend<Words<M>>,
    orig_dst: &OrigDst<Words<M>>,
) where
    M: Sockets<Family = S::Family>,
{
    let key = SocketKey::new(call.cookie(), backend.addr, backend.port, orig_dst.proto, TO_FRONTEND);
    let is_known = peer::find(maps, &key).is_some_and(|entry| {
        entry.port == orig_dst.port && same(&entry.addr, &orig_dst.addr) && entry.service == service
    });
    if !is_known {
        peer::put_back_translation(maps, call, service, backend, orig_dst);
    }
}

/// Returns the key in `sockets` for a frontend to which the socket sends.
#[inline(always)]
fn key_to_backend<S: Sockaddr, A: Address>(call: &S, orig_dst: &OrigDst<A>) -> SocketKey<A> {
    SocketKey::new(call.cookie(), orig_dst.addr, orig_dst.port, orig_dst.proto, TO_BACKEND)
}
