//! Node ports that processes of this node have bound, too.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use proxy_common::node::{NODE_ADDR_PORTS, NodeAddr};

use crate::host::diag::Server;
use crate::maps::view::{BackendState, FrontendRow, FrontendRowKind, Snapshot};

/// Returns a sentence for each socket that waits for clients on a node port, with the Service, and who receives the traffic.
/// `addresses`: the node's own addresses.
pub(super) fn shared_ports(
    servers: &[Server],
    snapshot: &Snapshot,
    addresses: &BTreeMap<IpAddr, NodeAddr>,
) -> Vec<String> {
    let sentences = servers.iter().flat_map(|server| {
        let node_ports = snapshot.frontends.iter().filter(|row| row.kind == FrontendRowKind::NodePort);
        let shared = node_ports.filter(|row| is_bound_by(row, server, addresses));
        shared.map(|row| sentence(row, server, snapshot, addresses))
    });
    // A Service has a node port for each family, and with a policy for each kind of client.
    sentences.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the socket's address; an IPv4 address that an IPv6 socket uses is an IPv4 address here.
fn address(server: &Server) -> IpAddr {
    server.addr.ip().to_canonical()
}

/// Whether clients of the node port would reach the socket if there were no Service.
fn is_bound_by(row: &FrontendRow, server: &Server, addresses: &BTreeMap<IpAddr, NodeAddr>) -> bool {
    let bound = address(server);
    let is_family = if bound.is_unspecified() && bound.is_ipv6() && !server.v6_only {
        true
    } else {
        bound.is_ipv4() == row.address.is_ipv4()
    };
    let has_node_ports =
        bound.is_unspecified() || addresses.get(&bound).is_some_and(|bits| bits & NODE_ADDR_PORTS != 0);
    (row.port, row.protocol.0) == (server.addr.port(), server.protocol) && is_family && has_node_ports
}

fn sentence(
    row: &FrontendRow,
    server: &Server,
    snapshot: &Snapshot,
    addresses: &BTreeMap<IpAddr, NodeAddr>,
) -> String {
    let FrontendRow { service, port, protocol, .. } = *row;
    let name = snapshot.names.get(&service).map_or_else(|| format!("Service {service}"), ToString::to_string);
    let bound = SocketAddr::new(address(server), port);
    let is_endpoint = row.backends.iter().filter_map(|id| snapshot.backends.get(id)).any(|endpoint| {
        let at = endpoint.socket;
        endpoint.state == BackendState::Active
            && at.port() == port
            && addresses.contains_key(&at.ip())
            && (bound.ip().is_unspecified() || bound.ip() == at.ip())
    });
    let rest = if is_endpoint {
        "the process receives what the Service sends to it as its endpoint"
    } else if bound.ip().is_unspecified() {
        "the process receives only what is sent to addresses without node ports (--nodeport-addresses)"
    } else {
        "the process receives nothing"
    };
    format!(
        "{port}/{protocol} is a node port of {name}, and a process of this node has bound {bound}: clients reach the \
         Service; {rest}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::cluster;
    use super::*;

    fn server(protocol: u8, addr: &str, v6_only: bool) -> Server {
        Server { protocol, addr: addr.parse().unwrap(), v6_only }
    }

    fn own() -> BTreeMap<IpAddr, NodeAddr> {
        BTreeMap::from([
            ("192.0.2.1".parse().unwrap(), NODE_ADDR_PORTS),
            ("127.0.0.1".parse().unwrap(), 0),
            ("2001:db8::1".parse().unwrap(), NODE_ADDR_PORTS),
        ])
    }

    #[test]
    fn sockets_on_a_node_port_are_named_once() {
        let shown = |server: Server| shared_ports(&[server, server], &cluster(), &own());
        assert_eq!(
            shown(server(6, "0.0.0.0:30079", false)),
            [
                "30079/TCP is a node port of default/redis:resp, and a process of this node has bound 0.0.0.0:30079: clients \
                 reach the Service; the process receives only what is sent to addresses without node ports \
                 (--nodeport-addresses)"
            ]
        );
        let [one] = shown(server(6, "192.0.2.1:30079", false)).try_into().unwrap();
        assert!(one.ends_with("the process receives nothing"), "{one}");
        assert_eq!(shown(server(6, "[::]:30079", false)).len(), 1, "it accepts IPv4, too");
        assert_eq!(shown(server(6, "[::ffff:192.0.2.1]:30079", false)).len(), 1);
        for other in [
            server(17, "0.0.0.0:30079", false),
            server(6, "0.0.0.0:30080", false),
            server(6, "127.0.0.1:30079", false),
            server(6, "[::]:30079", true),
            server(6, "[2001:db8::1]:30079", false),
        ] {
            assert_eq!(shown(other), Vec::<String>::new(), "{other:?}");
        }
    }

    #[test]
    fn an_endpoint_on_its_own_node_port_is_no_surprise() {
        let mut snapshot = cluster();
        let socket = "192.0.2.1:30079".parse().unwrap();
        snapshot.backends.entry(1).and_modify(|endpoint| endpoint.socket = socket);
        let shown = |at| shared_ports(&[server(6, at, false)], &snapshot, &own()).join("\n");
        assert!(
            shown("0.0.0.0:30079").ends_with("sends to it as its endpoint"),
            "{}",
            shown("0.0.0.0:30079")
        );
        assert!(shown("192.0.2.1:30079").ends_with("sends to it as its endpoint"));
        snapshot.backends.entry(1).and_modify(|endpoint| endpoint.state = BackendState::Gone);
        let shown = shared_ports(&[server(6, "0.0.0.0:30079", false)], &snapshot, &own()).join("\n");
        assert!(!shown.contains("its endpoint"), "{shown}");
    }
}
