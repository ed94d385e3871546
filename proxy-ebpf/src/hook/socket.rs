//! Socket calls: the address is translated once, at connect or at each message, and translated back when the
//! application asks who its peer is.

use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_set_retval};
use proxy_common::filter::Role;
use proxy_common::reason::{Reason, Verdict};
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey, TO_BACKEND, TO_FRONTEND};
use proxy_common::{Family, PROTO_UDP};

use crate::balance::{self, Choice};
use crate::lookup;
use crate::maps::{self, Tables};
use crate::report;
use crate::sockaddr::Sockaddr;

/// The call goes on.
const ALLOW: i32 = 1;
/// It fails; without a word from us with EPERM.
const DENY: i32 = 0;
const ECONNREFUSED: i32 = 111;
const ETIMEDOUT: i32 = 110;

type Addr<S> = <<S as Sockaddr>::Family as Family>::Words;

/// connect(2), of TCP and of UDP.
#[inline(always)]
pub fn connect<S: Sockaddr>(call: &S) -> i32 {
    let (addr, port, proto) = (call.addr(), call.port(), call.proto());
    let Some(service) = find::<S>(addr, port, proto) else {
        forget_peer(call, addr, port, proto);
        return ALLOW;
    };
    let choice = match balance::choose::<S::Family>(&service, random()) {
        Ok(choice) => choice,
        Err(reason) => return refuse(&service, reason),
    };
    remember_frontend(call, &service, &choice, addr, port, proto);
    report::connection(service.id, choice.backend_id);
    call.set(choice.addr, choice.port);
    ALLOW
}

/// sendmsg(2) and sendto(2) of an unconnected UDP socket.
#[inline(always)]
pub fn send<S: Sockaddr>(call: &S) -> i32 {
    let (addr, port, proto) = (call.addr(), call.port(), call.proto());
    let Some(service) = find::<S>(addr, port, proto) else {
        forget_peer(call, addr, port, proto);
        return ALLOW;
    };
    let cookie = call.cookie();
    let key = SocketKey::new(cookie, addr, port, proto, TO_BACKEND);
    let choice = match same_backend::<S::Family>(&key, &service) {
        Some(choice) => {
            let back = SocketKey::new(cookie, choice.addr, choice.port, proto, TO_FRONTEND);
            if S::Family::socket(&back).is_none() {
                remember_frontend(call, &service, &choice, addr, port, proto);
            }
            choice
        }
        None => match balance::choose::<S::Family>(&service, random()) {
            Ok(choice) => {
                let entry = SocketEntry {
                    addr: choice.addr,
                    port: choice.port,
                    grace: 0,
                    service: service.id,
                    backend_id: choice.backend_id,
                };
                remember::<S::Family>(&key, &entry);
                remember_frontend(call, &service, &choice, addr, port, proto);
                report::connection(service.id, choice.backend_id);
                choice
            }
            Err(reason) => return refuse(&service, reason),
        },
    };
    call.set(choice.addr, choice.port);
    ALLOW
}

/// recvmsg(2), recvfrom(2) and getpeername(2): the address on its way to the application.
#[inline(always)]
pub fn restore<S: Sockaddr>(call: &S) -> i32 {
    let (addr, port, proto) = (call.addr(), call.port(), call.proto());
    if maps::may_be(Role::Backend, &addr, port, proto) {
        let key = SocketKey::new(call.cookie(), addr, port, proto, TO_FRONTEND);
        if let Some(entry) = S::Family::socket(&key) {
            call.set(entry.addr, entry.port);
        }
    }
    ALLOW
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_get_prandom_u32() }
}

#[inline(always)]
fn find<S: Sockaddr>(addr: Addr<S>, port: u16, proto: u8) -> Option<ServiceEntry> {
    if !maps::may_be(Role::Frontend, &addr, port, proto) {
        return None;
    }
    lookup::service::<S::Family>(&ServiceKey::internal(addr, port, proto))
}

/// The backend this socket's last message to the frontend went to, while it serves.
#[inline(always)]
fn same_backend<F: Tables>(key: &SocketKey<F::Words>, service: &ServiceEntry) -> Option<Choice<F::Words>> {
    let entry = F::socket(key)?;
    let backend = F::backend(entry.backend_id)?;
    let stays =
        backend.service == service.id && backend.serves(entry.addr, entry.port) && service.slot_count != 0;
    stays.then_some(Choice {
        service: service.id,
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
    service: &ServiceEntry,
    choice: &Choice<Addr<S>>,
    addr: Addr<S>,
    port: u16,
    proto: u8,
) {
    let key = SocketKey::new(call.cookie(), choice.addr, choice.port, proto, TO_FRONTEND);
    let grace = u16::from(call.is_mapped() && proto == PROTO_UDP);
    let entry = SocketEntry { addr, port, grace, service: service.id, backend_id: choice.backend_id };
    remember::<S::Family>(&key, &entry);
}

/// The socket goes to an endpoint by its own address: what it once dialled is not what it sees now.
#[inline(always)]
fn forget_peer<S: Sockaddr>(call: &S, addr: Addr<S>, port: u16, proto: u8) {
    if maps::may_be(Role::Backend, &addr, port, proto) {
        let key = SocketKey::new(call.cookie(), addr, port, proto, TO_FRONTEND);
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
fn refuse(service: &ServiceEntry, reason: Reason) -> i32 {
    report::refusal(service.id, reason);
    let error = if reason.verdict() == Verdict::Reject { ECONNREFUSED } else { ETIMEDOUT };
    // SAFETY: the helper only notes the number (Linux 5.18).
    unsafe { bpf_set_retval(-error) };
    DENY
}
