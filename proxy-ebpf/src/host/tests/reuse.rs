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

families!(a_port_of_an_open_direct_flow_is_translated_again = a_port_in_use());

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
fn reply_to_a_closed_flow_needs_its_sequence_numbers() {
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

families!(translated_port_of_an_older_connection_stays_with_it = a_port_of_an_older_connection());

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

families!(an_endpoint_in_time_wait_beside_a_direct_flow_gets_the_clients_reset = a_socket_in_time_wait());

/// The endpoint has closed a direct connection, which no program has seen, and its socket is in `TIME_WAIT`. The client connects to
/// the Service from the same port: the endpoint answers the SYN with an ACK of the first connection.
fn a_direct_connection_in_time_wait<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let younger = Connection::send_syn(maps, A, frontend::<F>(), [10 << 24, 20 << 24]);
    assert_eq!(younger.seen, A);
    younger.gets(ACK);
    let again = Connection::open(maps, A, frontend::<F>(), [10 << 24, 60 << 24]);
    assert_ne!(again.seen, A, "the SYN that the client sends again does not get to the same socket");
    again.exchanges();
    again.close(FIN);
}

families!(ack_of_an_older_direct_connection_reaches_the_client = a_direct_connection_in_time_wait());

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
    maps.advance(2 * AFTER_TIME_WAIT);
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

/// Returns the addresses and ports of a client's packet after ingress.
fn ends_after<F: Net>(maps: HostMaps<F>, bytes: &[u8]) -> Vec<u8> {
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, bytes);
    let addresses = 2 * size_of::<F::Words>();
    let start = build::ETHERNET + F::HEADER - addresses;
    skb.wire()[start..start + addresses + 4].to_vec()
}

/// Opening, answer, acknowledgement and reset of a connection.
const TCP_SEGMENTS: [Shape; 4] = [SYN, SYN_ACK, DATA, RST];
/// The same chunks: INIT, INIT ACK, COOKIE ECHO and ABORT.
const CHUNKS: [Shape; 4] =
    [INIT, Shape { flags: 2, ..INIT }, Shape { flags: 10, ..INIT }, Shape { flags: 6, ..INIT }];

/// Opens a connection through the Service, whose next connections go to the endpoint `next`; a RST under the client's address
/// follows. Returns the maps, and what the endpoint sees as the ends of the connection.
fn with_a_reset<F: Net>(
    local: u32,
    [open, answer, data, reset]: [Shape; 4],
    next: u32,
) -> (HostMaps<F>, Vec<u8>) {
    let maps = maps::<F>(local);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let seen = ends_after(maps, &packet::<F>(client, frontend, open));
    if local == 0 {
        let port = u16::from_be_bytes([seen[seen.len() - 4], seen[seen.len() - 3]]);
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, (node::<F>(), port), answer));
    } else {
        run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, answer));
    }
    assert_eq!(ends_after(maps, &packet::<F>(client, frontend, data)), seen);
    let id = if open.proto == PROTO_TCP { 7 } else { 9 };
    let (addr, port) = second_frontend::<F>();
    let entry =
        ServiceEntry { id: 1, slot_base: 17, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(addr, port, open.proto), entry);
    maps.set_slots(17, &[id]);
    add_endpoint(maps, 11, (F::addr(3), 8080), open.proto);
    maps.set_slots(id, &[if next == 0 { id } else { next }]);
    assert_eq!(ends_after(maps, &packet::<F>(client, frontend, reset)), seen);
    (maps, seen)
}

/// A sender that does not see a connection sends a RST in the window and a SYN, to the Service or to another address of the
/// endpoint. The endpoint ignores both, and the client continues.
fn a_forged_reset_and_syn<F: Net>() {
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    for local in [BACKEND_LOCAL, 0] {
        for segments in [TCP_SEGMENTS, CHUNKS] {
            for (next, dst) in
                [(11, frontend), (0, frontend), (11, second_frontend::<F>()), (11, backend), (0, backend)]
            {
                let [open, _, data, _] = segments;
                let (maps, seen) = with_a_reset::<F>(local, segments, next);
                for _ in 0..2 {
                    let forged = ends_after(maps, &packet::<F>(client, dst, open));
                    assert_eq!(
                        forged == seen,
                        dst == frontend,
                        "the endpoint can tell other connections apart"
                    );
                    maps.advance(HZ / 10);
                }
                if local != 0 {
                    // The endpoint's answer to the SYN is one of the connection.
                    let answer = packet::<F>(backend, client, data);
                    let (_, skb) = run_over(Hook::Egress, maps, POD, &answer);
                    assert_eq!(skb.wire(), packet::<F>(frontend, client, data));
                }
                assert_eq!(ends_after(maps, &packet::<F>(client, frontend, data)), seen);
            }
        }
    }
}

families!(forged_reset_and_syn_end_no_connection = a_forged_reset_and_syn());

/// The client itself has reset its connection, and connects from the same port at once.
fn a_port_that_was_reset<F: Net>() {
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let first = Connection::<F>::open(maps(BACKEND_LOCAL), A, frontend, [10 << 24, 20 << 24]);
    first.close(RST);
    let second = Connection::open(first.maps, A, frontend, [70 << 24, 90 << 24]);
    assert_eq!(second.seen, first.seen);
    second.exchanges();
    // An endpoint that no longer serves gets no new connection.
    let (maps, seen) = with_a_reset::<F>(BACKEND_LOCAL, TCP_SEGMENTS, 11);
    let (addr, port) = backend::<F>();
    let flags = BACKEND_LOCAL | BACKEND_IN_CLUSTER;
    let row = BackendEntry { addr, port, proto: PROTO_TCP, state: BACKEND_GONE, service: 1, flags };
    maps.set_backend(7, row);
    assert_ne!(ends_after(maps, &packet::<F>(client, frontend, SYN)), seen);
}

families!(port_of_a_reset_connection_is_served = a_port_that_was_reset());
