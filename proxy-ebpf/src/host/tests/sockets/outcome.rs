//! Results of TCP connections: what they show about an endpoint, and how long it took to answer.

use proxy_common::Address as _;
use proxy_common::connections::of_micros;
use proxy_common::health::{
    Failure, HEALTH_ANSWERED, HEALTH_NEWCOMER, HEALTH_REACHED, HEALTH_SINCE, HEALTH_SKIPPED, NO_CLIENT,
    has_answered, socket_client,
};
use proxy_common::latency::SocketExample;
use proxy_common::select::Algorithm;
use proxy_common::service::SERVICE_NO_SOCKETS;

use super::*;
use crate::env::{ConnectOutcome, Health as _};
use crate::host::sock::{HostEvent, TOOK};
use crate::select::health;
use crate::shared::Shared as _;
use crate::sock::{SYN_SENT, TcpEventKind};
use crate::socket::outcome;

fn ejecting<F: Net>() -> HostMaps<F> {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_TCP, ServiceEntry { flags: SERVICE_EJECTS, ..CLUSTER });
    maps
}

/// Lets an endpoint answer a connection of a client that no test uses otherwise.
pub(super) fn works<F: Net>(maps: HostMaps<F>, endpoint: u32) {
    let word = maps.health(endpoint).unwrap();
    word.store(word.load() | HEALTH_ANSWERED);
    health::answered(maps, endpoint, NO_CLIENT);
}

/// connect(2), and the SYN that the kernel sends. Returns the id of the endpoint.
fn dial<F: Net>(maps: HostMaps<F>, socket: &HostSock) -> u32 {
    let to = connect(maps, socket, frontend::<F>()).unwrap();
    socket.state.set(SYN_SENT);
    run(maps, &socket.event(TcpEventKind::Connect));
    id_of::<F>(to)
}

fn run<F: Net>(maps: HostMaps<F>, event: &HostEvent<'_>) {
    assert_eq!(outcome::handle_event(maps, event), 1);
}

/// The socket's state changes, after this number of received segments.
fn change<F: Net>(maps: HostMaps<F>, socket: &HostSock, to: u32, segments_in: u32) {
    let from = socket.state.replace(to);
    let event = HostEvent { states: [from, to], segments_in, ..socket.event(TcpEventKind::StateChange) };
    run(maps, &event);
}

fn refuses<F: Net>(maps: HostMaps<F>, endpoint: u32, netns: u64) -> bool {
    health::refuses(maps, endpoint, socket_client(netns, maps.config().unwrap().flow_seed))
}

fn refused<F: Net>() {
    for netns in [NODE, POD_A] {
        let maps = ejecting::<F>();
        let mut socket = socket(maps, netns, PROTO_TCP);
        let first = dial(maps, &socket);
        assert!(socket.is_watched.get());
        change(maps, &socket, CLOSE, 1);
        assert!(refuses(maps, first, netns) && !refuses(maps, first, POD_B));
        assert_eq!(maps.count_of(Reason::EndpointEjected), 0, "failures of one client eject no endpoint");
        for _ in 0..50 {
            socket = self::socket(maps, netns, PROTO_TCP);
            assert_ne!(dial(maps, &socket), first);
        }
        let gets_it = |_| dial(maps, &self::socket(maps, POD_B, PROTO_TCP)) == first;
        assert!((0..100).any(gets_it), "other clients do not skip the endpoint");
    }
}

families!(client_skips_an_endpoint_that_has_refused_its_connection = refused());

fn ejected<F: Net>() {
    for (netns, ejects) in [(NODE, true), (POD_A, false)] {
        let maps = ejecting::<F>();
        let socket = socket(maps, netns, PROTO_TCP);
        let first = dial(maps, &socket);
        maps.note_failure(first, 1000, Failure::Refusal as u32);
        change(maps, &socket, CLOSE, 1);
        assert_eq!(maps.refusals_of(1, Reason::EndpointEjected), u64::from(ejects), "{netns}");
        assert_eq!(refuses(maps, first, POD_B), ejects);
        let dials_it = |_| dial(maps, &self::socket(maps, POD_B, PROTO_TCP)) == first;
        assert_eq!((0..100).any(dials_it), !ejects);
    }
}

families!(
    endpoint_that_refuses_a_packet_client_and_the_node_is_ejected_and_a_pods_refusal_does_not_count =
        ejected()
);

fn closed_by_the_application<F: Net>() {
    let maps = ejecting::<F>();
    let socket = socket(maps, POD_A, PROTO_TCP);
    let first = dial(maps, &socket);
    change(maps, &socket, CLOSE, 0);
    assert!(!refuses(maps, first, POD_A));
    assert_eq!(maps.health(first).unwrap().load(), 0);
}

families!(close_without_a_received_segment_is_no_failure = closed_by_the_application());

fn silent<F: Net>() {
    let maps = ejecting::<F>();
    let lost = socket(maps, POD_A, PROTO_TCP);
    let first = dial(maps, &lost);
    run(maps, &lost.event(TcpEventKind::Timeout));
    assert!(!refuses(maps, first, POD_A), "silence is no refusal");
    let dials_it = |netns| (0..100).any(|_| dial(maps, &socket(maps, netns, PROTO_TCP)) == first);
    assert_eq!((dials_it(POD_A), dials_it(POD_B)), (false, true));
    // A retransmission of an established connection shows nothing.
    let maps = ejecting::<F>();
    let working = socket(maps, POD_A, PROTO_TCP);
    let first = dial(maps, &working);
    change(maps, &working, ESTABLISHED, 1);
    run(maps, &working.event(TcpEventKind::Timeout));
    change(maps, &working, CLOSE, 9);
    assert_eq!(maps.health(first).unwrap().load() & (HEALTH_SINCE | HEALTH_SKIPPED), 0);
}

families!(client_skips_an_endpoint_that_does_not_answer_its_syn = silent());

fn answered<F: Net>() {
    for netns in [NODE, POD_A] {
        let maps = ejecting::<F>();
        let socket = socket(maps, netns, PROTO_TCP);
        let first = dial(maps, &socket);
        let word = maps.health(first).unwrap();
        word.store(HEALTH_NEWCOMER);
        change(maps, &socket, ESTABLISHED, 1);
        assert_eq!(has_answered(word.load(), maps.now(), HZ), netns == NODE);
        assert_eq!(word.load() & HEALTH_NEWCOMER, 0, "it is no newcomer any more");
        assert_eq!(word.load() & HEALTH_REACHED != 0, netns == POD_A);
    }
}

families!(
    answer_to_the_node_counts_for_all_clients_and_answer_to_a_pod_only_ends_the_time_of_a_newcomer =
        answered()
);

fn unwatched<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_TCP, CLUSTER);
    let socket = socket(maps, POD_A, PROTO_TCP);
    let first = dial(maps, &socket);
    assert!(!socket.is_watched.get());
    change(maps, &socket, CLOSE, 1);
    assert_eq!(maps.health(first).unwrap().load(), 0);
    let other = HostSock::new(POD_A, 9, PROTO_TCP);
    assert_eq!(connect(maps, &other, (F::addr(200), 80)), Ok((F::addr(200), 80)));
    run(maps, &other.event(TcpEventKind::Connect));
    run(maps, &other.event(TcpEventKind::Other));
    assert!(!other.is_watched.get());
}

families!(connection_of_a_service_without_ejection_or_of_no_service_is_not_watched = unwatched());

fn again_elsewhere<F: Net>() {
    // Not a frontend; a frontend whose Service leaves pods to the packets; an endpoint.
    for to in [(F::addr(200), 80), (F::addr(97), 80), endpoint::<F>(20)] {
        let maps = ejecting::<F>();
        let left = ServiceEntry { id: 2, flags: SERVICE_NO_SOCKETS, ..CLUSTER };
        add_frontend(maps, (F::addr(97), 80), PROTO_TCP, (7, &[7]), left);
        let socket = socket(maps, POD_A, PROTO_TCP);
        let first = dial(maps, &socket);
        change(maps, &socket, CLOSE, 1);
        let word = maps.health(first).unwrap().load();
        for (state, segments_in) in [(ESTABLISHED, 1), (CLOSE, 1)] {
            assert_eq!(connect(maps, &socket, to), Ok(to));
            socket.state.set(SYN_SENT);
            run(maps, &socket.event(TcpEventKind::Connect));
            run(maps, &socket.event(TcpEventKind::Timeout));
            change(maps, &socket, state, segments_in);
        }
        assert_eq!(maps.health(first).unwrap().load(), word);
    }
}

families!(
    result_of_a_later_connect_to_another_address_does_not_count_for_the_earlier_endpoint = again_elsewhere()
);

fn measured<F: Net>() {
    for flags in [0, SERVICE_EJECTS] {
        let maps = socket_maps::<F>();
        three_endpoints(maps, PROTO_TCP, ServiceEntry { flags, ..CLUSTER });
        maps.set_measures_latency(true);
        let socket = socket(maps, POD_A, PROTO_TCP);
        let first = dial(maps, &socket);
        assert!(socket.is_watched.get());
        run(maps, &socket.event(TcpEventKind::Timeout));
        let (addr, words) = (F::addr(1), F::addr(1).words());
        let event = HostEvent {
            states: [SYN_SENT, ESTABLISHED],
            local4: [words[0]],
            local6: words,
            port: 4000,
            ..socket.event(TcpEventKind::StateChange)
        };
        run(maps, &event);
        let expected = [ConnectOutcome::Retransmitted, ConnectOutcome::Answered(TOOK)];
        assert_eq!(maps.take_connect_outcomes(), expected.map(|outcome| (1, first, outcome)));
        let example = SocketExample {
            begun: 1,
            took: TOOK,
            client: addr.words(),
            backend: endpoint::<F>(first as u8).0.words(),
            client_port: 4000,
            backend_port: 8080,
            family: if F::INDEX == 0 { 4 } else { 6 },
        };
        assert_eq!(maps.take_socket_examples(), [(1, example)]);
        let refused = self::socket(maps, POD_A, PROTO_TCP);
        let second = dial(maps, &refused);
        change(maps, &refused, CLOSE, 1);
        assert_eq!(maps.take_connect_outcomes(), [(1, second, ConnectOutcome::Refused)]);
        assert_eq!(refuses(maps, second, POD_A), flags != 0, "only with ejection, the client skips it");
    }
}

families!(outcome_of_each_connection_is_noted_if_latency_is_measured = measured());

fn timed<F: Net>() {
    for (algorithm, is_noted) in [(Algorithm::Latency, true), (Algorithm::LeastConnections, false)] {
        let maps = socket_maps::<F>();
        three_endpoints(maps, PROTO_TCP, ServiceEntry { algorithm: algorithm as u8, ..CLUSTER });
        let socket = socket(maps, NODE, PROTO_TCP);
        let to = dial(maps, &socket);
        assert_eq!(socket.is_watched.get(), is_noted, "the kernel reports events of others for nothing");
        let states = [socket.state.replace(ESTABLISHED), ESTABLISHED];
        let event = HostEvent { states, rtt: 40_000, ..socket.event(TcpEventKind::StateChange) };
        run(maps, &event);
        let noted = |id| maps.answer_time_of(id);
        let took = of_micros(40_000, HZ) / 8;
        assert_eq!(noted(to), if is_noted { took } else { 0 }, "an eighth of the difference");
        // A SYN that was sent again does not tell the time.
        run(maps, &HostEvent { rtt: 0, ..event });
        assert_eq!((noted(to) > 0, maps.open_connections_of(to)), (is_noted, 1));
    }
}

families!(socket_notes_the_round_trip_time_of_its_syn_for_latency = timed());
