//! A client that uses few source ports for connections to a Service and directly to its endpoint: each packet must get to the
//! connection that it belongs to, also if the client connects from a port that the endpoint has seen before.

use proxy_common::conntrack::{is_closed, tcp};
use proxy_common::flow::STATE_DIRECT;

use super::*;

const ACK: Shape = Shape { flags: 0x10, ..SYN };
const FIN: Shape = Shape { flags: 0x11, ..SYN };
const RST: Shape = Shape { flags: 0x04, ..SYN };

/// Returns a segment with these numbers. Its checksum is wrong, and stays so.
fn numbered<F: Net>(src: End<F>, dst: End<F>, shape: Shape, [seq, ack]: [u32; 2]) -> Vec<u8> {
    let mut bytes = packet::<F>(src, dst, shape);
    let start = build::ETHERNET + F::HEADER;
    bytes[start + 4..start + 8].copy_from_slice(&seq.to_be_bytes());
    bytes[start + 8..start + 12].copy_from_slice(&ack.to_be_bytes());
    bytes
}

/// Returns source and destination port of a packet after a hook.
fn ports_after<F: Net>(maps: HostMaps<F>, hook: Hook, bytes: &[u8]) -> [u16; 2] {
    let device = if hook == Hook::Ingress { UPLINK } else { POD };
    let (verdict, skb) = run_over(hook, maps, device, bytes);
    assert_eq!(verdict, NEXT);
    let wire = skb.wire();
    let start = build::ETHERNET + F::HEADER;
    [0, 2].map(|at| u16::from_be_bytes([wire[start + at], wire[start + at + 1]]))
}

/// A connection of the client, to the frontend or directly to the endpoint, with the initial numbers of both ends.
#[derive(Clone, Copy)]
struct Connection<F: Net> {
    maps: HostMaps<F>,
    client: u16,
    dst: End<F>,
    /// The client's port, as the endpoint sees it.
    seen: u16,
    numbers: [u32; 2],
}

impl<F: Net> Connection<F> {
    /// Sends a SYN.
    fn send_syn(maps: HostMaps<F>, client_port: u16, dst: End<F>, numbers: [u32; 2]) -> Self {
        let mut connection = Self { maps, client: client_port, dst, seen: 0, numbers };
        connection.seen = connection.sends(SYN);
        connection
    }

    /// Sends a SYN, and completes the handshake.
    fn open(maps: HostMaps<F>, client_port: u16, dst: End<F>, numbers: [u32; 2]) -> Self {
        let connection = Self::send_syn(maps, client_port, dst, numbers);
        connection.gets(SYN_ACK);
        connection.exchanges();
        connection
    }

    /// Sends a segment of the client; returns the source port that the endpoint sees.
    fn sends(&self, shape: Shape) -> u16 {
        let [seq, ack] = self.numbers;
        let ack = if shape.flags & 0x10 == 0 { 0 } else { ack };
        let bytes = numbered::<F>((client::<F>().0, self.client), self.dst, shape, [seq, ack]);
        let [seen, port] = ports_after(self.maps, Hook::Ingress, &bytes);
        assert_eq!(port, backend::<F>().1);
        seen
    }

    /// Sends a segment of the endpoint, which must get to the client's socket.
    fn gets(&self, shape: Shape) {
        let [ack, seq] = self.numbers;
        let bytes = numbered::<F>(backend::<F>(), (client::<F>().0, self.seen), shape, [seq, ack]);
        let ports = ports_after(self.maps, Hook::Egress, &bytes);
        assert_eq!(ports, [self.dst.1, self.client], "a segment of the connection from {}", self.client);
    }

    fn exchanges(&self) {
        for shape in [DATA, ACK] {
            assert_eq!(self.sends(shape), self.seen);
            self.gets(shape);
        }
    }

    fn close(&self, shape: Shape) {
        assert_eq!(self.sends(shape), self.seen);
        if shape.flags & tcp::FIN as u8 != 0 {
            self.gets(shape);
            assert_eq!(self.sends(ACK), self.seen);
        }
    }
}

const A: u16 = 4000;
/// Jiffies after which the endpoint has forgotten a closed connection.
const AFTER_TIME_WAIT: u32 = 67 * HZ;

/// The client has a connection through the Service and a direct one from one port, so the endpoint sees the second one with
/// another port. Both end, and the client connects to the endpoint from that port.
fn reuse_after_both_ended<F: Net>(end: Shape) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let service = Connection::open(maps, A, frontend, [10 << 24, 20 << 24]);
    let direct = Connection::open(maps, A, backend, [30 << 24, 40 << 24]);
    assert_eq!((service.seen, direct.seen != A), (A, true));
    service.close(end);
    direct.close(end);
    assert!(live(maps).iter().all(|flow| is_closed(flow.bits())));
    maps.advance(AFTER_TIME_WAIT);
    // The endpoint's numbers continue, since it sees the same ports.
    let again = Connection::open(maps, direct.seen, backend, [50 << 24, (40 << 24) + 1000]);
    assert_eq!(again.seen, direct.seen, "the ports are free");
    again.exchanges();
    again.close(end);
    maps.advance(AFTER_TIME_WAIT);
    // And again through the Service.
    let service = Connection::open(maps, direct.seen, frontend, [60 << 24, (40 << 24) + 2000]);
    assert_eq!(service.seen, direct.seen);
}

#[test]
fn a_port_that_the_endpoint_saw_is_reused_after_both_connections_ended() {
    for end in [RST, FIN] {
        reuse_after_both_ended::<V4>(end);
        reuse_after_both_ended::<V6>(end);
    }
}

/// As before, but the first direct connection is still open.
fn a_port_in_use<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let service = Connection::open(maps, A, frontend, [10 << 24, 20 << 24]);
    let direct = Connection::open(maps, A, backend, [30 << 24, 40 << 24]);
    let second = Connection::open(maps, direct.seen, backend, [50 << 24, 60 << 24]);
    let third = Connection::open(maps, second.seen, backend, [70 << 24, 80 << 24]);
    let seen = [service.seen, direct.seen, second.seen, third.seen];
    assert!((1..4).all(|at| !seen[..at].contains(&seen[at])), "{seen:?}");
    for connection in [service, direct, second, third] {
        connection.exchanges();
    }
    // The same with datagrams.
    let sends = |port, dst| {
        let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>((client::<F>().0, port), dst, UDP));
        build::src_port::<F>(&skb.wire())
    };
    let direct = (sends(A, frontend), sends(A, backend)).1;
    assert_ne!(direct, A);
    assert_ne!(sends(direct, backend), direct, "the answers are those of the first direct flow");
}

#[test]
fn a_port_of_an_open_direct_flow_is_translated_again() {
    a_port_in_use::<V4>();
    a_port_in_use::<V6>();
}

/// No program has seen the SYN of the direct connection, which began after the flow was closed.
fn replies_to_a_closed_flow<F: Net>(end: Shape) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let service = Connection::open(maps, A, frontend, [10 << 24, 20 << 24]);
    service.close(end);
    let unseen = Connection { dst: backend, numbers: [50 << 24, (20 << 24) + 1000], ..service };
    for shape in [SYN_ACK, ACK, DATA, FIN] {
        unseen.gets(shape);
    }
    // The last segments of the closed connection.
    for shape in [SYN_ACK, DATA, ACK, RST] {
        service.gets(shape);
    }
    assert_eq!(live(maps).len(), 1);
}

#[test]
fn replies_to_a_closed_flow_are_told_apart_by_numbers() {
    for end in [RST, FIN] {
        replies_to_a_closed_flow::<V4>(end);
        replies_to_a_closed_flow::<V6>(end);
    }
}

/// The port that was chosen for a direct connection is one of an older connection, which has no flow.
fn a_port_of_an_older_connection<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    Connection::open(maps, A, frontend, [10 << 24, 20 << 24]);
    let younger = Connection::send_syn(maps, A, backend, [30 << 24, 0]);
    let older = Connection { client: younger.seen, numbers: [50 << 24, 60 << 24], ..younger };
    older.gets(ACK);
    assert!(live(maps).iter().any(|flow| {
        flow.bits() & STATE_DIRECT != 0 && (flow.client_port, flow.source_port) == (older.seen, older.seen)
    }));
    let younger = Connection::open(maps, A, backend, [30 << 24, 40 << 24]);
    assert_ne!(younger.seen, older.seen, "its SYN is sent again, from another port");
    older.exchanges();
    younger.exchanges();
}

#[test]
fn translated_port_of_an_older_connection_stays_with_it() {
    a_port_of_an_older_connection::<V4>();
    a_port_of_an_older_connection::<V6>();
}

/// Two connections from one port have ended, one through the Service and a direct one, whose flow still exists. The socket of the
/// first one at the endpoint is in `TIME_WAIT`, and answers the SYN of a third connection with an ACK of the first.
fn a_socket_in_time_wait<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let service = Connection::open(maps, A, frontend, [10 << 24, 20 << 24]);
    let direct = Connection::open(maps, A, backend, [30 << 24, 40 << 24]);
    direct.close(FIN);
    service.close(FIN);
    let younger = Connection::send_syn(maps, A, frontend, [5 << 24, 20 << 24]);
    assert_eq!(younger.seen, A);
    younger.gets(ACK);
    assert_eq!(younger.sends(RST), A, "the RST ends the socket");
    assert_eq!(Connection::open(maps, A, younger.dst, [5 << 24, 60 << 24]).seen, A);
}

#[test]
fn an_endpoint_in_time_wait_beside_a_direct_flow_gets_the_clients_reset() {
    a_socket_in_time_wait::<V4>();
    a_socket_in_time_wait::<V6>();
}

/// A connection through the Service has ended, and its socket at the endpoint is in `TIME_WAIT`. The client connects from that
/// port to `dst`: the numbers of this connection do not follow those of the first, so the endpoint would not accept its SYN.
fn a_port_in_time_wait<F: Net>(dst: End<F>) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let entry =
        ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    let (addr, port) = second_frontend::<F>();
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    let first = Connection::open(maps, A, frontend::<F>(), [10 << 24, 20 << 24]);
    first.close(FIN);
    let second = Connection::open(maps, A, dst, [5 << 24, 40 << 24]);
    assert_ne!(second.seen, first.seen);
    second.exchanges();
    second.close(RST);
    let again = Connection::open(maps, A, frontend::<F>(), [11 << 24, 30 << 24]);
    assert_eq!(again.seen, first.seen, "the numbers of the same client and frontend follow each other");
    again.close(FIN);
    maps.advance(AFTER_TIME_WAIT);
    assert_eq!(Connection::open(maps, A, dst, [6 << 24, 50 << 24]).seen, A);
}

fn second_frontend<F: Net>() -> End<F> {
    (F::addr(97), 80)
}

#[test]
fn port_in_time_wait_is_translated() {
    for dst in [second_frontend::<V4>(), backend::<V4>()] {
        a_port_in_time_wait::<V4>(dst);
    }
    for dst in [second_frontend::<V6>(), backend::<V6>()] {
        a_port_in_time_wait::<V6>(dst);
    }
}
