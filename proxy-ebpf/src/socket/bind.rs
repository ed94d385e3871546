//! bind(2): a process of the node cannot bind a port that is a node port of a Service, if the operator wants it
//! (`--node-port-bind refuse`).

use proxy_common::config::CONFIG_NODE_PORT_BIND_REFUSE;
use proxy_common::decide;
use proxy_common::node::NODE_ADDR_PORTS;
use proxy_common::reason::Reason;
use proxy_common::{Address, V4, V6};

use super::call::{ALLOW, deny};
use super::sockaddr::{self, Bound};
use crate::env::{Node as _, Services, Words};
use crate::header::same;
use crate::kernel::handle::Kernel;
use crate::kernel::sockets::is_host;
use crate::report;
use crate::select::lookup;

const EADDRINUSE: i32 = 98;

/// Checks bind(2) of an IPv4 socket, after the kernel has bound it and before the call returns.
#[inline(always)]
pub fn bound4(socket: &Bound) -> i32 {
    if !is_refused(socket) {
        return ALLOW;
    }
    verdict(owner(Kernel::<V4>::new(), socket, socket.addr4()))
}

/// Checks bind(2) of an IPv6 socket, which may accept IPv4 connections, too.
#[inline(always)]
pub fn bound6(socket: &Bound) -> i32 {
    if !is_refused(socket) {
        return ALLOW;
    }
    let addr = socket.addr6();
    if let Some(mapped) = sockaddr::mapped(addr) {
        return verdict(owner(Kernel::<V4>::new(), socket, mapped));
    }
    // The hook cannot read the socket's option `IPV6_V6ONLY`.
    let is_wildcard = same(&addr, &Address::ZERO);
    let both = || if is_wildcard { owner(Kernel::<V4>::new(), socket, Address::ZERO) } else { None };
    verdict(owner(Kernel::<V6>::new(), socket, addr).or_else(both))
}

/// Whether this process may be refused a node port. kube-proxy binds no node port since Kubernetes 1.27, so processes may bind
/// them.
#[inline(always)]
fn is_refused(socket: &Bound) -> bool {
    let config = Kernel::<V4>::new().config();
    config.is_some_and(|config| config.flags & CONFIG_NODE_PORT_BIND_REFUSE != 0) && is_host(socket.netns())
}

/// Returns the id of the Service whose node port the socket has just bound on the wildcard address, or on an address with
/// node ports.
#[inline(always)]
fn owner<M: Services>(maps: M, socket: &Bound, addr: Words<M>) -> Option<u32> {
    let service = lookup::node_port(maps, socket.port(), socket.proto())?;
    (same(&addr, &Address::ZERO) || maps.node_addr(&decide::host_address(&addr)) & NODE_ADDR_PORTS != 0)
        .then_some(service.id)
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
