//! connect(2), sendmsg(2), recvmsg(2), getpeername(2).
//!
//! A socket's own address is not known yet when it connects. Its network namespace identifies the client: for session
//! affinity, and for what only processes of the node itself may do. Clients on the node are inside the cluster.

use proxy_common::affinity::{AffinityEntry, NetnsAffinityKey};
use proxy_common::config::{
    CONFIG_POD_UDP_BY_PACKETS, CONFIG_SOCKET_DROP_FAIL, CONFIG_SOCKET_LB_HOST_ONLY, CONFIG_SOCKET_LB_OFF,
};
use proxy_common::decide::{self, SocketSource};
use proxy_common::health::{ANSWERED_ONLY, NO_CLIENT, socket_client};
use proxy_common::node::{NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS};
use proxy_common::prefilter::Role;
use proxy_common::reason::{Reason, Verdict};
use proxy_common::select::{is_round_robin, socket_selector};
use proxy_common::service::{SERVICE_EJECTS, ServiceEntry};
use proxy_common::{PROTO_SCTP, PROTO_TCP, PROTO_UDP};

use super::client::{is_host, is_pod};
use super::peer::{self, OrigDst, orig_dst};
use super::unconnected;
use crate::env::{EventKind, Node, Sockets, Time, Words};
use crate::header::same;
use crate::report;
use crate::select::backend::{self, SelectedBackend};
use crate::select::{affinity, health, lookup};
use crate::shared::add;
use crate::sock::Sockaddr;

/// The call proceeds.
pub(super) const ALLOW: i32 = 1;
/// The call fails; with `EPERM`, unless the program sets another error.
const DENY: i32 = 0;
const ECONNREFUSED: i32 = 111;
const ETIMEDOUT: i32 = 110;

/// A refused call, and the reason.
struct Refusal {
    /// Id of the Service port; 0: no Service.
    service: u32,
    reason: Reason,
}

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Connect,
    Send,
}

/// The maps of the address family of a call.
pub trait SocketMaps<S: Sockaddr>: Sockets<Family = S::Family> {}

impl<S: Sockaddr, M: Sockets<Family = S::Family>> SocketMaps<S> for M {}

/// Handles connect(2) of TCP and UDP sockets.
#[inline(always)]
pub fn connect<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S) -> i32 {
    let orig_dst = orig_dst(call);
    let refusal = match find(maps, call, &orig_dst, Call::Connect) {
        Ok(Some(service)) => match select(maps, call, &service) {
            Ok(selected) if is_translated_again(maps, call, &selected) => None,
            Ok(selected) => {
                peer::connected(maps, call, &service, &selected, &orig_dst);
                count_connection(maps, call, &service, selected.id);
                call.set(selected.addr, selected.port);
                return ALLOW;
            }
            Err(reason) => Some(Refusal { service: service.id, reason }),
        },
        Ok(None) => None,
        Err(refusal) => Some(refusal),
    };
    if refusal.is_some_and(|refusal| refuse(maps, call, &refusal, Call::Connect)) {
        return DENY;
    }
    // A connect ends the socket's earlier connection, whatever the address is: a TCP socket may connect again after a refusal, and
    // the result must not count for the earlier backend.
    peer::disconnected(maps, call);
    untranslated(maps, call, &orig_dst)
}

/// Handles sendmsg(2) and sendto(2) of unconnected UDP sockets. Each step reads the address from the call again, which costs less
/// than keeping it on the stack.
#[inline(always)]
pub fn send<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S) -> i32 {
    // connect(2) has decided for a connected socket: it would not take answers from another address. It may name its peer again, as
    // the application knows it. The kernel also comes here, with the endpoint's address, if an IPv6 socket that is connected to an
    // IPv4 address sends without an address (`udpv6_sendmsg`).
    if call.is_connected() {
        if let Some((addr, port)) = peer::backend(call, &orig_dst(call)) {
            call.set(addr, port);
        }
        return ALLOW;
    }
    let refusal = match find(maps, call, &orig_dst(call), Call::Send) {
        Ok(Some(service)) => {
            if let Some(same) = same_backend(maps, call, &service) {
                call.set(same.addr, same.port);
                return ALLOW;
            }
            match select(maps, call, &service) {
                Ok(selected) if is_translated_again(maps, call, &selected) => None,
                Ok(selected) => {
                    unconnected::put(maps, call, service.id, &selected);
                    count_connection(maps, call, &service, selected.id);
                    call.set(selected.addr, selected.port);
                    return ALLOW;
                }
                Err(reason) => Some(Refusal { service: service.id, reason }),
            }
        }
        Ok(None) => None,
        Err(refusal) => Some(refusal),
    };
    if refusal.is_some_and(|refusal| refuse(maps, call, &refusal, Call::Send)) {
        return DENY;
    }
    untranslated(maps, call, &orig_dst(call))
}

/// Handles recvmsg(2) and recvfrom(2): translates the address for the application back to the original address. The prefilter spares
/// the datagrams of foreign peers the lookups.
#[inline(always)]
pub fn restore<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S) -> i32 {
    let from = orig_dst(call);
    if !maps.may_be(Role::Backend, &from.addr, from.port, from.proto).is_no() {
        set_frontend(maps, call, &from);
    }
    ALLOW
}

/// Handles getpeername(2), in the same way. The prefilter forgets an endpoint that was removed long ago, and a connection to it may
/// still exist.
#[inline(always)]
pub fn peer_name<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S) -> i32 {
    set_frontend(maps, call, &orig_dst(call));
    ALLOW
}

#[inline(always)]
fn set_frontend<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S, from: &OrigDst<Words<M>>) {
    if let Some((addr, port)) = peer::frontend(call, from).or_else(|| unconnected::frontend(maps, call, from))
    {
        call.set(addr, port);
    }
}

/// Lets the call proceed with its own address, and removes a translation that the socket has for this address.
#[inline(always)]
fn untranslated<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S, direct: &OrigDst<Words<M>>) -> i32 {
    if !maps.may_be(Role::Backend, &direct.addr, direct.port, direct.proto).is_no() {
        unconnected::direct(maps, call, direct);
    }
    ALLOW
}

/// Returns the Service that a call is for; `None`: the call proceeds unchanged.
#[inline(always)]
fn find<S: Sockaddr, M: SocketMaps<S>>(
    maps: M,
    call: &S,
    orig_dst: &OrigDst<Words<M>>,
    what: Call,
) -> Result<Option<ServiceEntry>, Refusal> {
    let OrigDst { addr, port, proto } = *orig_dst;
    if !maps.may_be(Role::Frontend, &decide::host_address(&addr), port, proto).is_no() {
        if is_left_to_packets(maps, call, proto, what) {
            return Ok(None);
        }
        let from_node = is_host(maps, call.netns());
        let on = if from_node { NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK } else { NODE_ADDR_PORTS };
        if let Some(service) = lookup::frontend(maps, addr, port, proto, false, on) {
            let is_attended = || maps.time().is_some_and(|time| decide::is_attended(time.config, time.now));
            // From one port, a second connection to the endpoint of the first one, by another Service, needs another source port,
            // which only packets get.
            let is_bound = what == Call::Connect && proto == PROTO_TCP && call.is_bound();
            if is_bound && !from_node && service.affinity_secs == 0 && is_attended() {
                return Ok(None);
            }
            return match decide::socket_source(&service, from_node, is_attended) {
                SocketSource::Allowed => Ok(Some(service)),
                SocketSource::LeftToPackets => Ok(None),
                SocketSource::Refused => {
                    Err(Refusal { service: service.id, reason: Reason::SourceNotAllowed })
                }
            };
        }
    }
    if maps.is_service_address(&addr)
        && matches!(proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP)
        && !is_left_to_packets(maps, call, proto, what)
    {
        let reason = lookup::why_nothing(maps, addr);
        if reason.verdict() == Verdict::Pass {
            return Ok(None);
        }
        return Err(Refusal { service: 0, reason });
    }
    Ok(None)
}

/// Whether the socket's packets are translated instead of its calls: by `--socket-lb`; because a connected socket would keep an
/// endpoint that is removed; because the proxy of a service mesh listens in the pod, and rules there redirect packets to it by the
/// Service's address, which the proxy also reads (`SO_ORIGINAL_DST`), also while no agent runs; or because the socket is neither the
/// node's nor a pod's. Another container or guest may have no route to pods, and is served as a client on the network is.
#[inline(always)]
fn is_left_to_packets<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S, proto: u8, what: Call) -> bool {
    let Some(config) = maps.config() else { return false };
    if config.flags & CONFIG_SOCKET_LB_OFF != 0 {
        return true;
    }
    if is_host(maps, call.netns()) {
        return false;
    }
    if config.flags & CONFIG_SOCKET_LB_HOST_ONLY != 0 || !is_pod(maps, config, call.netns()) {
        return true;
    }
    let is_connect = what == Call::Connect;
    if is_connect
        && proto == PROTO_UDP
        && config.flags & CONFIG_POD_UDP_BY_PACKETS != 0
        && packets_are_translated(maps, call).is_some()
    {
        return true;
    }
    // A socket with peers had a datagram translated: it stays so, and pays no lookup for each.
    (is_connect || call.peers(false).is_none()) && call.has_listener(&config.mesh_ports)
}

/// Returns the time if the packets of a socket that is not translated are translated: it is not the node's, and an agent attaches
/// programs to the devices of pods.
#[inline(always)]
fn packets_are_translated<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S) -> Option<Time> {
    maps.time().filter(|time| !is_host(maps, call.netns()) && decide::is_attended(time.config, time.now))
}

/// Whether a hook would translate packets to this backend again, since its address and port are those of a Service, too: that
/// Service may have other ranges or policies. Packets to the frontend are translated once. (Those of the node's own sockets are
/// recognised by their socket.)
#[inline(always)]
fn is_translated_again<S: Sockaddr, M: SocketMaps<S>>(
    maps: M,
    call: &S,
    selected: &SelectedBackend<Words<M>>,
) -> bool {
    let SelectedBackend { id, addr, port, .. } = *selected;
    !maps.may_be(Role::Frontend, &addr, port, call.proto()).is_no()
        && packets_are_translated(maps, call).is_some()
        && maps.backend_is_frontend(id)
}

/// Returns the client number of the socket, if the Service skips failing backends; else [`NO_CLIENT`]. Only TCP connections
/// report failures.
#[inline(always)]
fn client_of<S: Sockaddr, M: Node>(maps: M, call: &S, service: &ServiceEntry) -> u32 {
    let seed = maps.config().map_or(0, |config| config.flow_seed);
    if service.flags & SERVICE_EJECTS != 0 { socket_client(call.netns(), seed) } else { NO_CLIENT }
}

/// Selects the backend for a new connection: the one of the client's session affinity, or any.
#[inline(always)]
fn select<S: Sockaddr, M: SocketMaps<S>>(
    maps: M,
    call: &S,
    service: &ServiceEntry,
) -> Result<SelectedBackend<Words<M>>, Reason> {
    let number = client_of(maps, call, service);
    if service.affinity_secs == 0 || service.slot_count == 0 {
        return any(maps, call, service, number);
    }
    let Some(time) = maps.time() else { return any(maps, call, service, number) };
    let key = NetnsAffinityKey { netns: call.netns(), service: service.id, reserved: 0 };
    let kept = stay(maps, &key, service, time);
    let selected = match kept {
        Some(kept) if number == NO_CLIENT || !health::refuses(maps, kept.id, number) => kept,
        Some(kept) => match any(maps, call, service, number | ANSWERED_ONLY) {
            Ok(other) if affinity::leaves(maps, kept.id, other.id, number) => other,
            _ => kept,
        },
        None => any(maps, call, service, number)?,
    };
    note(maps, &key, selected.id, time);
    Ok(selected)
}

#[inline(always)]
fn any<S: Sockaddr, M: SocketMaps<S>>(
    maps: M,
    call: &S,
    service: &ServiceEntry,
    number: u32,
) -> Result<SelectedBackend<Words<M>>, Reason> {
    let random = match maps.time() {
        Some(time) if service.affinity_secs != 0 && number & ANSWERED_ONLY == 0 => {
            let client = socket_client(call.netns(), time.config.flow_seed);
            backend::random_of_client(client, service, time)
        }
        _ => maps.random(),
    };
    let selector = socket_selector(service.algorithm, call.netns(), &call.addr(), random);
    match backend::select(maps, service, selector, number) {
        Some(selected) => Ok(selected),
        None => Err(backend::why_none(service)),
    }
}

/// Returns the backend of the session affinity of a network namespace.
#[inline(always)]
fn stay<M: Sockets>(
    maps: M,
    key: &NetnsAffinityKey,
    service: &ServiceEntry,
    time: Time,
) -> Option<SelectedBackend<Words<M>>> {
    // SAFETY: a map value of plain integers, which are checked after they are read.
    let entry = unsafe { maps.netns_affinity(key)?.read_volatile() };
    affinity::backend_of(maps, &entry, service, time)
}

#[inline(always)]
fn note<M: Sockets>(maps: M, key: &NetnsAffinityKey, backend_id: u32, time: Time) {
    let put = |entry: &AffinityEntry| maps.put_netns_affinity(key, entry);
    if !affinity::write(maps.netns_affinity(key), backend_id, time, put) {
        report::reason(maps, Reason::AffinityTableFull);
    }
}

/// Returns the backend that an unconnected socket has for this address, if the backend still serves.
#[inline(always)]
fn same_backend<S: Sockaddr, M: SocketMaps<S>>(
    maps: M,
    call: &S,
    service: &ServiceEntry,
) -> Option<SelectedBackend<Words<M>>> {
    let entry = unconnected::backend(maps, call)?;
    let backend = maps.backend(entry.backend_id)?;
    let stays = decide::serves(backend, service)
        && backend.port == entry.port
        && same(&backend.addr, &entry.addr)
        && service.slot_count != 0;
    stays.then_some(SelectedBackend {
        id: entry.backend_id,
        addr: entry.addr,
        port: entry.port,
        flags: backend.flags,
    })
}

/// Counts a connection of a socket. The call must still have the original destination.
#[inline(always)]
fn count_connection<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S, entry: &ServiceEntry, backend: u32) {
    let service = entry.id;
    if let Some(stats) = maps.service_stats(service) {
        // SAFETY: a map value of this CPU; atomic because a packet may interrupt a system call that counts.
        unsafe { add(&raw mut (*stats).connections, 1) };
    }
    report::connection(maps, backend);
    if is_round_robin(entry.algorithm) {
        report::next_turn(maps, service);
    }
    maps.notify_call(call, service, EventKind::NewFlow { backend });
}

/// Makes the call fail where kube-proxy rejects the packet; returns whether it fails. Where kube-proxy drops it, or where the
/// kernel returns no error but `EPERM`, the call succeeds untranslated, and the packet programs reject each packet, or drop and
/// count it, until an endpoint exists (`--socket-drop fail`: the call fails at once). A pod's datagrams are left to the packets:
/// an error of sendmsg(2) also ends the program's messages to other destinations, and connect(2) of a UDP socket sends nothing.
/// Programs learn their own address by such a connect(2) to any port of an address: it succeeds everywhere.
#[inline(always)]
fn refuse<S: Sockaddr, M: SocketMaps<S>>(maps: M, call: &S, refusal: &Refusal, what: Call) -> bool {
    let Refusal { service, reason } = *refusal;
    let fails = maps.config().is_some_and(|config| config.flags & CONFIG_SOCKET_DROP_FAIL != 0);
    let sends_nothing = what == Call::Connect && orig_dst(call).proto == PROTO_UDP;
    let asks = sends_nothing && reason == Reason::UndefinedPort;
    let is_left = || (what == Call::Send || sends_nothing) && packets_are_translated(maps, call).is_some();
    let rejects = reason.verdict() == Verdict::Reject && (fails || !(asks || is_left()));
    if !maps.can_set_errno() || (!rejects && !fails) {
        return false;
    }
    report::count_for(maps, service, reason);
    maps.notify_call(call, service, EventKind::Reason(reason));
    deny(maps, if rejects { ECONNREFUSED } else { ETIMEDOUT }) == DENY
}

/// Makes the call fail with this error; with `EPERM` if the kernel does not let programs set an error.
#[inline(always)]
pub(super) fn deny<M: Sockets>(maps: M, error: i32) -> i32 {
    if maps.can_set_errno() {
        maps.set_errno(error);
    }
    DENY
}
