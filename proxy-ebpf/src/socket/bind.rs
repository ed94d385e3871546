//! bind(2): a process of the node does not get a port that is a Service's.

use proxy_common::node::NODE_ADDR_PORTS;
use proxy_common::reason::Reason;
use proxy_common::{Address, V4, V6};

use super::call::{ALLOW, deny};
use super::sockaddr::{self, Bound};
use crate::env::{Services, Words};
use crate::header::same;
use crate::kernel::handle::Kernel;
use crate::kernel::sockets::is_host;
use crate::report;
use crate::select::lookup;

const EADDRINUSE: i32 = 98;

/// bind(2) of an IPv4 socket, done and not yet told.
#[inline(always)]
pub fn bound4(socket: &Bound) -> i32 {
    if !is_host(socket.netns()) {
        return ALLOW;
    }
    verdict(owner(Kernel::<V4>::new(), socket, socket.addr4()))
}

/// bind(2) of an IPv6 socket, which may take IPv4 connections too.
#[inline(always)]
pub fn bound6(socket: &Bound) -> i32 {
    if !is_host(socket.netns()) {
        return ALLOW;
    }
    let addr = socket.addr6();
    if let Some(mapped) = sockaddr::mapped(addr) {
        return verdict(owner(Kernel::<V4>::new(), socket, mapped));
    }
    // The socket's option that keeps IPv4 out is not told, and it may be set later.
    let is_wildcard = same(&addr, &Address::ZERO);
    let both = || if is_wildcard { owner(Kernel::<V4>::new(), socket, Address::ZERO) } else { None };
    verdict(owner(Kernel::<V6>::new(), socket, addr).or_else(both))
}

/// The Service whose node port the socket has just bound on the wildcard, or on an address where node ports answer.
#[inline(always)]
fn owner<M: Services>(maps: M, socket: &Bound, addr: Words<M>) -> Option<u32> {
    let service = lookup::node_port(maps, socket.port(), socket.proto())?;
    (same(&addr, &Address::ZERO) || maps.node_addr(&addr) & NODE_ADDR_PORTS != 0).then_some(service.id)
}

#[inline(always)]
fn verdict(owner: Option<u32>) -> i32 {
    match owner {
        Some(service) => {
            report::refusal(Kernel::<V4>::new(), service, Reason::NodePortTaken);
            deny(EADDRINUSE)
        }
        None => ALLOW,
    }
}
