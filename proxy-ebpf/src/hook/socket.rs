//! Socket calls: the address is translated once, at connect or at each message, and translated back when the
//! application asks who its peer is.
//!
//! A socket's own address is not known yet when it connects. Its client is its network namespace: for affinity, and
//! for what only the node itself may do. Clients on the node are inside the cluster.

use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_set_retval};
use proxy_common::decide::{self, SocketSource};
use proxy_common::filter::Role;
use proxy_common::node::{NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS};
use proxy_common::reason::{Reason, Verdict};
use proxy_common::service::ServiceEntry;
use proxy_common::socket::{SocketEntry, SocketKey, TO_BACKEND, TO_FRONTEND};
use proxy_common::{Family, PROTO_SCTP, PROTO_TCP, PROTO_UDP};

use crate::balance::{self, Choice};
use crate::flow::Time;
use crate::maps::{self, Tables};
use crate::sockaddr::Sockaddr;
use crate::{affinity, lookup, report};

/// The call goes on.
pub(super) const ALLOW: i32 = 1;
/// It fails; without a word from us with EPERM.
const DENY: i32 = 0;
const ECONNREFUSED: i32 = 111;
const ETIMEDOUT: i32 = 110;

type Addr<S> = <<S as Sockaddr>::Family as Family>::Words;

/// What a call was about.
struct Dialled<A> {
    addr: A,
    port: u16,
    proto: u8,
}

/// Why a call fails.
struct Refusal {
    /// Id of the Service port; 0: none has to do with it.
    service: u32,
    reason: Reason,
}

/// connect(2), of TCP and of UDP.
#[inline(always)]
pub fn connect<S: Sockaddr>(call: &S) -> i32 {
    let dialled = dialled(call);
    let service = match find(call, &dialled) {
        Ok(Some(service)) => service,
        Ok(None) => {
            forget_peer(call, &dialled);
            return ALLOW;
        }
        Err(refusal) => return refuse(call, &refusal),
    };
    let choice = match choose(call, &service) {
        Ok(choice) => choice,
        Err(reason) => return refuse(call, &Refusal { service: service.id, reason }),
    };
    remember_frontend(call, service.id, &choice, &dialled);
    report::connected(call, service.id, choice.backend_id);
    call.set(choice.addr, choice.port);
    ALLOW
}

/// sendmsg(2) and sendto(2) of an unconnected UDP socket.
#[inline(always)]
pub fn send<S: Sockaddr>(call: &S) -> i32 {
    let dialled = dialled(call);
    let service = match find(call, &dialled) {
        Ok(Some(service)) => service,
        Ok(None) => {
            forget_peer(call, &dialled);
            return ALLOW;
        }
        Err(refusal) => return refuse(call, &refusal),
    };
    let Dialled { addr, port, proto } = dialled;
    let cookie = call.raw().cookie();
    let key = SocketKey::new(cookie, addr, port, proto, TO_BACKEND);
    let choice = match same_backend::<S::Family>(&key, &service) {
        Some(choice) => {
            let back = SocketKey::new(cookie, choice.addr, choice.port, proto, TO_FRONTEND);
            if S::Family::socket(&back).is_none() {
                remember_frontend(call, service.id, &choice, &dialled);
            }
            choice
        }
        None => match choose(call, &service) {
            Ok(choice) => {
                let entry = SocketEntry {
                    addr: choice.addr,
                    port: choice.port,
                    grace: 0,
                    service: service.id,
                    backend_id: choice.backend_id,
                };
                remember::<S::Family>(&key, &entry);
                remember_frontend(call, service.id, &choice, &dialled);
                report::connected(call, service.id, choice.backend_id);
                choice
            }
            Err(reason) => return refuse(call, &Refusal { service: service.id, reason }),
        },
    };
    call.set(choice.addr, choice.port);
    ALLOW
}

/// recvmsg(2), recvfrom(2) and getpeername(2): the address on its way to the application.
#[inline(always)]
pub fn restore<S: Sockaddr>(call: &S) -> i32 {
    let Dialled { addr, port, proto } = dialled(call);
    if maps::may_be(Role::Backend, &addr, port, proto) {
        let key = SocketKey::new(call.raw().cookie(), addr, port, proto, TO_FRONTEND);
        if let Some(entry) = S::Family::socket(&key) {
            call.set(entry.addr, entry.port);
        }
    }
    ALLOW
}

#[inline(always)]
fn dialled<S: Sockaddr>(call: &S) -> Dialled<Addr<S>> {
    let raw = call.raw();
    Dialled { addr: call.addr(), port: raw.port(), proto: raw.proto() }
}

#[inline(always)]
fn anew<S: Sockaddr>(service: &ServiceEntry) -> Result<Choice<Addr<S>>, Reason> {
    balance::choose::<S::Family>(service, random()).ok_or_else(|| balance::why_nobody(service))
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}

/// The Service that a call is for; `None`: it goes on as it is.
#[inline(always)]
fn find<S: Sockaddr>(call: &S, dialled: &Dialled<Addr<S>>) -> Result<Option<ServiceEntry>, Refusal> {
    let Dialled { addr, port, proto } = *dialled;
    if maps::may_be(Role::Frontend, &addr, port, proto) {
        let is_host = maps::is_host(call.raw().netns());
        let on = if is_host { NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK } else { NODE_ADDR_PORTS };
        if let Some(service) = lookup::frontend::<S::Family>(addr, port, proto, false, on) {
            return match decide::socket_source(&service, is_host) {
                SocketSource::Allowed => Ok(Some(service)),
                SocketSource::LeftToPackets => Ok(None),
                SocketSource::Refused => {
                    Err(Refusal { service: service.id, reason: Reason::SourceNotAllowed })
                }
            };
        }
    }
    if lookup::is_service_address::<S::Family>(&addr) && matches!(proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP) {
        return Err(Refusal { service: 0, reason: lookup::why_nothing::<S::Family>(addr) });
    }
    Ok(None)
}

/// The backend for a new connection: the one that the client stays with, or any.
#[inline(always)]
fn choose<S: Sockaddr>(call: &S, service: &ServiceEntry) -> Result<Choice<Addr<S>>, Reason> {
    if service.affinity_secs == 0 || service.slot_count == 0 {
        return anew::<S>(service);
    }
    let (netns, time) = (call.raw().netns(), Time::now().ok_or(Reason::MapInconsistent)?);
    if let Some(choice) = affinity::stay_netns::<S::Family>(netns, service, time) {
        return Ok(choice);
    }
    let choice = anew::<S>(service)?;
    affinity::note_netns(netns, service, choice.backend_id, time);
    Ok(choice)
}

/// The backend this socket's last message to the frontend went to, while it serves.
#[inline(always)]
fn same_backend<F: Tables>(key: &SocketKey<F::Words>, service: &ServiceEntry) -> Option<Choice<F::Words>> {
    let entry = F::socket(key)?;
    let backend = F::backend(entry.backend_id)?;
    let stays =
        backend.service == service.id && backend.serves(entry.addr, entry.port) && service.slot_count != 0;
    stays.then_some(Choice {
        backend_id: entry.backend_id,
        addr: entry.addr,
        port: entry.port,
        flags: backend.flags,
    })
}

#[inline(always)]
fn remember<F: Tables>(key: &SocketKey<F::Words>, entry: &SocketEntry<F::Words>) {
    if F::put_socket(key, entry).is_err() {
        report::reason(Reason::SocketTableFull);
    }
}

#[inline(always)]
fn remember_frontend<S: Sockaddr>(
    call: &S,
    service: u32,
    choice: &Choice<Addr<S>>,
    dialled: &Dialled<Addr<S>>,
) {
    let Dialled { addr, port, proto } = *dialled;
    let key = SocketKey::new(call.raw().cookie(), choice.addr, choice.port, proto, TO_FRONTEND);
    let grace = u16::from(call.is_mapped() && proto == PROTO_UDP);
    let entry = SocketEntry { addr, port, grace, service, backend_id: choice.backend_id };
    remember::<S::Family>(&key, &entry);
}

/// The socket goes to an endpoint by its own address: what it once dialled is not what it sees now.
#[inline(always)]
fn forget_peer<S: Sockaddr>(call: &S, dialled: &Dialled<Addr<S>>) {
    let Dialled { addr, port, proto } = *dialled;
    if maps::may_be(Role::Backend, &addr, port, proto) {
        let key = SocketKey::new(call.raw().cookie(), addr, port, proto, TO_FRONTEND);
        match S::Family::socket(&key) {
            Some(entry) if entry.grace != 0 => {
                remember::<S::Family>(&key, &SocketEntry { grace: 0, ..*entry });
            }
            Some(_) => S::Family::remove_socket(&key),
            None => {}
        }
    }
}

/// Lets the call fail as it does where netfilter rejects, or drops, the packet: at once instead of after it.
#[inline(always)]
fn refuse<S: Sockaddr>(call: &S, refusal: &Refusal) -> i32 {
    let Refusal { service, reason } = *refusal;
    report::failed(call, service, reason);
    deny(if reason.verdict() == Verdict::Reject { ECONNREFUSED } else { ETIMEDOUT })
}

/// Lets the call fail with this error.
#[inline(always)]
pub(super) fn deny(error: i32) -> i32 {
    // SAFETY: the helper only notes the number (Linux 5.18; at `post_bind` 6.1).
    unsafe { bpf_set_retval(-error) };
    DENY
}
