//! bind(2): a process of the node does not get a port that is a Service's.

use proxy_common::node::NODE_ADDR_PORTS;
use proxy_common::reason::Reason;
use proxy_common::{Address, V4, V6};

use super::socket::{ALLOW, deny};
use crate::header::same;
use crate::maps::{self, Tables};
use crate::sockaddr::{self, Bound};
use crate::{lookup, report};

const EADDRINUSE: i32 = 98;

/// bind(2) of an IPv4 socket, done and not yet told.
#[inline(always)]
pub fn bound4(socket: &Bound) -> i32 {
    if !is_host(socket) {
        return ALLOW;
    }
    verdict(owner::<V4>(socket, socket.addr4()))
}

/// bind(2) of an IPv6 socket, which may take IPv4 connections too.
#[inline(always)]
pub fn bound6(socket: &Bound) -> i32 {
    if !is_host(socket) {
        return ALLOW;
    }
    let addr = socket.addr6();
    if let Some(mapped) = sockaddr::mapped(addr) {
        return verdict(owner::<V4>(socket, mapped));
    }
    // The socket's option that keeps IPv4 out is not told, and it may be set later.
    let is_wildcard = same(&addr, &Address::ZERO);
    let both = || if is_wildcard { owner::<V4>(socket, Address::ZERO) } else { None };
    verdict(owner::<V6>(socket, addr).or_else(both))
}

/// Whether the socket is the node's own: pods bind what they want.
#[inline(always)]
fn is_host(socket: &Bound) -> bool {
    maps::is_host(socket.netns())
}

/// The Service whose node port the socket has just bound on the wildcard, or on an address where node ports answer.
#[inline(always)]
fn owner<F: Tables>(socket: &Bound, addr: F::Words) -> Option<u32> {
    let service = lookup::node_port::<F>(socket.port(), socket.proto())?;
    (same(&addr, &Address::ZERO) || F::node_addr(&addr) & NODE_ADDR_PORTS != 0).then_some(service.id)
}

#[inline(always)]
fn verdict(owner: Option<u32>) -> i32 {
    match owner {
        Some(service) => {
            report::refusal(service, Reason::NodePortTaken);
            deny(EADDRINUSE)
        }
        None => ALLOW,
    }
}
