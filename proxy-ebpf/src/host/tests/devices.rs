//! Packets with a VLAN tag, and packets of devices without a link-layer header.

use proxy_common::Address as _;
use proxy_common::node::Cidr;

use super::*;

/// A packet with a VLAN tag passes unchanged, since the programs of the VLAN device get it next.
fn a_tag<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let sent = |to| ip_packet::<F>(client, to, UDP);
    let about = unreachable::<F>(client.0, backend.0, (64, 0), &ip_packet::<F>(backend, client, UDP));
    let came = [
        packet::<F>(client, frontend, SYN),
        packet::<F>(client, frontend, UDP),
        packet::<F>(client, frontend, DATA),
        packet::<F>(client, backend, SYN),
        unreachable::<F>(F::addr(5), frontend.0, (64, 0), &sent(frontend)),
        about,
    ];
    for round in 0..2 {
        for bytes in &came {
            let (verdict, skb) =
                run_edited(Hook::Ingress, maps, UPLINK, bytes, |skb| skb.vlan_tag = Some(0x2005));
            assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]), "{round}");
        }
        assert_eq!(maps.stats_of(1).connections, 2 * round);
        // A priority tag (VLAN 0) is no VLAN.
        for shape in [SYN, UDP] {
            let bytes = packet::<F>(client, frontend, shape);
            let (_, skb) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| skb.vlan_tag = Some(0x2000));
            assert_eq!(skb.as_slice(), packet::<F>(client, backend, shape));
        }
    }
}

/// The same for the other stages that may be the first of a packet.
fn a_tag_of_a_reply_and_of_what_no_service_has<F: Net>() {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let mut config = NodeEntry { source: node::<F>(), ..NodeEntry::UNKNOWN };
    config.service_cidrs[0] = Cidr { addr: F::addr(200), mask: F::Words::ONES };
    config.service_cidr_count = 1;
    maps.set_node(config);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let port = maps.flows().iter().find(|flow| flow.bits() != 0).unwrap().source_port;
    let reply = packet::<F>(backend, (node::<F>(), port), SYN_ACK);
    let unallocated = packet::<F>(client, (F::addr(200), 80), SYN);
    for (bytes, without) in [(reply, REDIRECT), (unallocated, DROP)] {
        let (verdict, skb) =
            run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| skb.vlan_tag = Some(0x2005));
        assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]));
        assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, without);
    }
}

families!(
    packet_of_a_vlan_passes_to_the_vlans_device = a_tag(),
    a_tag_of_a_reply_and_of_what_no_service_has()
);

/// The kernel's helpers need an Ethernet header, and remove it again if the next device has none.
fn no_header<F: Net>(resolved: u32) {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let route = Route { resolved, ..route() };
    for _ in 0..2 {
        let bytes = ip_packet::<F>(client, frontend, SYN);
        let came = HostPacket::without_link_header(&bytes, u32::from(F::ETHERTYPE)).edit(|skb| {
            (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
            skb.routes.set_default(Some(route));
        });
        let verdict = run(Hook::Ingress, maps, came.frame());
        let skb = came.into_skb();
        let port = maps.flows().iter().find(|flow| flow.bits() != 0).unwrap().source_port;
        let expected = ip_packet::<F>((node::<F>(), port), backend, Shape { ttl: 63, ..SYN });
        assert_eq!((verdict, &skb.as_slice()[build::ETHERNET..]), (REDIRECT, &expected[..]));
        match skb.redirect {
            Some(Redirect::Neighbour(by)) => assert_eq!(by.ifindex, route.ifindex),
            redirect => assert_eq!((redirect, resolved), (Some(Redirect::Out(route.ifindex)), 1)),
        }
        let macs = if resolved == 0 { std::vec![0; 12] } else { route.macs.map(u32::to_ne_bytes).concat() };
        assert_eq!(skb.as_slice()[..12], macs, "the neighbour's are the kernel's to find");
        maps.advance(1);
    }
}

#[test]
fn packet_without_a_link_header_gets_one() {
    for resolved in [0, 1] {
        no_header::<V4>(resolved);
        no_header::<V6>(resolved);
    }
}
