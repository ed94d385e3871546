//! bind(2): a process of the node cannot bind a port that is a node port of a Service, if the operator wants it
//! (`--node-port-bind refuse`).

use proxy_common::config::CONFIG_NODE_PORT_BIND_REFUSE;
use proxy_common::decide;
use proxy_common::node::NODE_ADDR_PORTS;
use proxy_common::reason::Reason;
use proxy_common::{Address, V4, V6};

use super::call::{ALLOW, deny};
use super::client::is_host;
use crate::env::{Node, Services, Sockets, Words};
use crate::header::same;
use crate::report;
use crate::select::lookup;
use crate::sock::{Bound, mapped};

const EADDRINUSE: i32 = 98;

/// Checks bind(2) of an IPv4 socket, after the kernel has bound it and before the call returns.
#[inline(always)]
pub fn bound4<M: Sockets<Family = V4>, B: Bound>(maps: M, socket: &B) -> i32 {
    if !is_refused(maps, socket) {
        return ALLOW;
    }
    verdict(maps, owner(maps, socket, socket.addr4()))
}

/// Checks bind(2) of an IPv6 socket, which may accept IPv4 connections, too.
#[inline(always)]
pub fn bound6<M4: Sockets<Family = V4>, M6: Sockets<Family = V6>, B: Bound>(
    maps4: M4,
    maps6: M6,
    socket: &B,
) -> i32 {
    if !is_refused(maps4, socket) {
        return ALLOW;
    }
    let addr = socket.addr6();
    if let Some(mapped) = mapped(addr) {
        return verdict(maps4, owner(maps4, socket, mapped));
    }
    // The hook cannot read the socket's option `IPV6_V6ONLY`.
    let is_wildcard = same(&addr, &Address::ZERO);
    let both = || if is_wildcard { owner(maps4, socket, Address::ZERO) } else { None };
    verdict(maps4, owner(maps6, socket, addr).or_else(both))
}

/// Whether this process may be refused a node port. kube-proxy binds no node port since Kubernetes 1.27, so processes may bind
/// them.
#[inline(always)]
fn is_refused<M: Node, B: Bound>(maps: M, socket: &B) -> bool {
    let config = maps.config();
    config.is_some_and(|config| config.flags & CONFIG_NODE_PORT_BIND_REFUSE != 0)
        && is_host(maps, socket.netns())
}

/// Returns the id of the Service whose node port the socket has just bound on the wildcard address, or on an address with
/// node ports.
#[inline(always)]
fn owner<M: Services, B: Bound>(maps: M, socket: &B, addr: Words<M>) -> Option<u32> {
    let service = lookup::node_port(maps, socket.port(), socket.proto())?;
    (same(&addr, &Address::ZERO) || maps.node_addr(&decide::host_address(&addr)) & NODE_ADDR_PORTS != 0)
        .then_some(service.id)
}

#[inline(always)]
fn verdict<M: Sockets>(maps: M, owner: Option<u32>) -> i32 {
    match owner {
        Some(service) => {
            report::refusal(maps, service, Reason::NodePortTaken);
            deny(maps, EADDRINUSE)
        }
        None => ALLOW,
    }
}
