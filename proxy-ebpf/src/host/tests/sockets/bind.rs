//! bind(2) of a port that is a node port.

use proxy_common::Address as _;
use proxy_common::config::CONFIG_NODE_PORT_BIND_REFUSE;
use proxy_common::node::NODE_ADDR_LOOPBACK;
use proxy_common::service::KIND_NODE_PORT;

use super::*;
use crate::socket::bind;

const NODE_PORT: u16 = 30080;
const OTHER_PORT: u16 = 30081;
const EADDRINUSE: i32 = 98;

/// Returns the maps of a node that refuses binds: an IPv4 node port, and an IPv6 node port.
fn both_maps() -> (HostMaps<V4>, HostMaps<V6>) {
    let (v4, v6) = (socket_maps::<V4>(), socket_maps::<V6>());
    let entry = ServiceEntry { kind: KIND_NODE_PORT, ..CLUSTER };
    add_frontend(v4, ([0], NODE_PORT), PROTO_TCP, (7, &[7]), entry);
    add_frontend(v6, ([0; 4], OTHER_PORT), PROTO_TCP, (7, &[7]), ServiceEntry { id: 2, ..entry });
    v4.add_node_addr([u32::from_ne_bytes([127, 0, 0, 1])], NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK);
    v4.edit_config(|config| config.flags |= CONFIG_NODE_PORT_BIND_REFUSE);
    (v4, v6)
}

fn bound(netns: u64, proto: u8, bound_addr: [u32; 4], bound_port: u16) -> HostSock {
    HostSock { bound_addr, bound_port, ..HostSock::new(netns, 1, proto) }
}

fn result((v4, v6): (HostMaps<V4>, HostMaps<V6>), is_v6: bool, socket: &HostSock) -> Result<(), i32> {
    let verdict = if is_v6 { bind::bound6(v4, v6, socket) } else { bind::bound4(v4, socket) };
    match (verdict, v4.take_errno()) {
        (1, None) => Ok(()),
        (0, errno) => Err(errno.unwrap_or(EPERM)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn bind_of_a_node_port_is_refused_to_processes_of_the_node() {
    let maps = both_maps();
    let bind4 =
        |netns, proto, addr: [u32; 1], port| result(maps, false, &bound(netns, proto, addr.words(), port));
    let (any, own) = ([0], node::<V4>());
    assert_eq!(bind4(NODE, PROTO_TCP, any, NODE_PORT), Err(EADDRINUSE));
    assert_eq!(bind4(NODE, PROTO_TCP, own, NODE_PORT), Err(EADDRINUSE));
    assert_eq!(
        bind4(NODE, PROTO_TCP, [u32::from_ne_bytes([127, 0, 0, 9])], NODE_PORT),
        Err(EADDRINUSE),
        "node ports answer on loopback"
    );
    let counts = (maps.0.count_of(Reason::NodePortTaken), maps.0.refusals_of(1, Reason::NodePortTaken));
    assert_eq!(counts, (3, 3));
    assert_eq!(bind4(POD_A, PROTO_TCP, any, NODE_PORT), Ok(()), "a pod has its own ports");
    assert_eq!(bind4(NODE, PROTO_UDP, any, NODE_PORT), Ok(()), "another protocol");
    assert_eq!(bind4(NODE, PROTO_TCP, any, OTHER_PORT), Ok(()), "another port");
    assert_eq!(bind4(NODE, PROTO_TCP, V4::addr(8), NODE_PORT), Ok(()), "no node port answers there");
    maps.0.set_can_set_errno(false);
    assert_eq!(bind4(NODE, PROTO_TCP, any, NODE_PORT), Err(EPERM));
}

#[test]
fn wildcard_ipv6_bind_is_refused_for_node_ports_of_both_families() {
    let maps = both_maps();
    let bind6 = |addr: [u32; 4], port| result(maps, true, &bound(NODE, PROTO_TCP, addr, port));
    let (any, own) = ([0; 4], node::<V6>());
    assert_eq!((bind6(any, NODE_PORT), bind6(any, OTHER_PORT)), (Err(EADDRINUSE), Err(EADDRINUSE)));
    assert_eq!((bind6(own, NODE_PORT), bind6(own, OTHER_PORT)), (Ok(()), Err(EADDRINUSE)));
    let mapped = |[addr]: [u32; 1]| [0, 0, 0xffffu32.to_be(), addr];
    for addr in [mapped([0]), mapped(node::<V4>())] {
        assert_eq!((bind6(addr, NODE_PORT), bind6(addr, OTHER_PORT)), (Err(EADDRINUSE), Ok(())));
    }
    let service_of = |id| maps.0.refusals_of(id, Reason::NodePortTaken);
    assert_eq!((service_of(1), service_of(2)), (3, 2));
}

#[test]
fn node_port_bind_succeeds_by_default() {
    let maps = both_maps();
    maps.0.edit_config(|config| config.flags = 0);
    let socket = bound(NODE, PROTO_TCP, [0; 4], NODE_PORT);
    assert_eq!((result(maps, false, &socket), result(maps, true, &socket)), (Ok(()), Ok(())));
    assert_eq!(maps.0.count_of(Reason::NodePortTaken), 0);
}
