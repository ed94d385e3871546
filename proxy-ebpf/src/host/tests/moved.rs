//! Connections that move to other endpoints of their Service.

use super::*;

fn moves<F: Net>() {
    const ACK: Shape = Shape { flags: 0x10, ..SYN };
    const END: Shape = Shape { flags: 0x14, ..DATA };
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
    let sent = |shape| run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, shape));
    let becomes = |shape, expected| {
        let (verdict, skb) = sent(shape);
        assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(client, backend, expected)));
    };
    becomes(DATA, DATA);
    maps.move_flows();
    // An answer that is still owed arrives, and the client acknowledges it.
    let (verdict, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, DATA));
    assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(frontend, client, DATA)));
    becomes(ACK, ACK);
    // The next request ends the connection at the endpoint, and its retransmission that at the client.
    becomes(DATA, END);
    assert_eq!(maps.count_of(Reason::Rebalanced), 0);
    for count in 1..=2 {
        let (verdict, skb) = sent(DATA);
        assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(POD))));
        let start = build::ETHERNET + F::HEADER;
        assert_eq!(skb.wire()[start + 12..start + 14], [0x50, 4], "a RST");
        assert_eq!(maps.count_of(Reason::Rebalanced), count);
    }
    assert_eq!(maps.count_of(Reason::EndpointLeft), 0);
    // The client connects again from the same port.
    becomes(SYN, SYN);
}

families!(request_on_a_moving_connection_resets_both_ends = moves());

fn again<F: Net>(flags: Option<u8>) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let becomes = |shape| {
        let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, shape));
        assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(client, backend, shape)));
    };
    let connect = || {
        becomes(SYN);
        run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
        becomes(DATA);
    };
    connect();
    maps.move_flows();
    if let Some(flags) = flags {
        becomes(Shape { flags, ..SYN });
    }
    connect();
    assert_eq!(maps.count_of(Reason::Rebalanced), 0);
}

#[test]
fn connection_with_the_ports_of_a_moving_one_does_not_move() {
    const RST: u8 = 0x14;
    for flags in [None, Some(RST)] {
        again::<V4>(flags);
        again::<V6>(flags);
    }
}

fn unfinished<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
    maps.move_flows();
    let data = packet::<F>(client, frontend, DATA);
    let start = build::ETHERNET + F::HEADER;
    let mut partial = data.clone();
    let pseudo = F::pseudo(&client.0, &frontend.0, PROTO_TCP, data.len() - start);
    partial[start + 16..start + 18].copy_from_slice(&(!build::checksum(&[&pseudo])).to_be_bytes());
    let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &partial, |skb| {
        skb.checksum = ChecksumState::Partial { start, offset: 16 };
    });
    assert_eq!(verdict, NEXT);
    assert_eq!(skb.wire(), packet::<F>(client, backend, Shape { flags: 0x14, ..DATA }));
}

families!(partial_checksum_of_a_moving_request_stays_partial = unfinished());
