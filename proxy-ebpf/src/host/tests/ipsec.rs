//! Packets to which an IPsec policy of the kernel applies: the stack routes them, and a redirect would send them in clear
//! text.

use proxy_common::Address as _;
use proxy_common::config::CONFIG_IPSEC;
use proxy_common::node::{Cidr, IpsecPolicy};

use super::*;

/// The stack gets the packet on the loopback device.
const STACK: Option<Redirect> = Some(Redirect::In(1));

/// Lets a policy apply to packets between two addresses.
fn encrypt<F: Net>(maps: HostMaps<F>, src: F::Words, dst: F::Words) {
    maps.edit_config(|config| config.flags |= CONFIG_IPSEC);
    let mut entry = NodeEntry { source: node::<F>(), ..NodeEntry::UNKNOWN };
    let of = |addr| Cidr { addr, mask: F::Words::ONES };
    entry.ipsec[0] = IpsecPolicy { src: of(F::addr(77)), dst: of(F::addr(78)) };
    entry.ipsec[1] = IpsecPolicy { src: of(src), dst: of(dst) };
    entry.ipsec_count = 2;
    maps.set_node(entry);
}

fn to_stack(verdict: i32, skb: &Skb) {
    assert_eq!((verdict, skb.redirect), (REDIRECT, STACK));
    assert_eq!(skb.as_slice()[..12], [0; 12], "the address of the loopback device");
}

fn forwarded<F: Net>() {
    for (to_backend, to_client) in [(true, false), (false, true), (false, false)] {
        let maps = maps::<F>(0);
        let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
        let request = packet::<F>(client, frontend, UDP);
        // The flow may be older than the policy.
        run_over(Hook::Ingress, maps, UPLINK, &request);
        let source = (node::<F>(), live(maps)[0].source_port);
        maps.advance(1);
        if to_backend {
            encrypt(maps, node::<F>(), backend.0);
        } else if to_client {
            encrypt(maps, frontend.0, client.0);
        } else {
            encrypt(maps, backend.0, node::<F>());
        }
        for has_cached_route in [false, true] {
            let early = HostPacket::new(&request).edit(|skb| {
                (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
                skb.routes.set_default(Some(route()));
            });
            // XDP compares no addresses with the policies: it uses the routes that tc has found.
            let is_forwarded = run_early(maps, early.early_frame()) != NEXT;
            assert_eq!(is_forwarded, has_cached_route && !to_backend);
            let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &request);
            assert_eq!(ip(&skb), ip_packet::<F>(source, backend, Shape { ttl: UDP.ttl - 1, ..UDP }));
            if to_backend {
                to_stack(verdict, &skb);
                assert!(skb.is_translated, "the hook of the next device would not know");
            } else {
                assert_ne!(skb.redirect, STACK);
            }
            let reply = packet::<F>(backend, source, UDP);
            let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &reply);
            assert_eq!(ip(&skb), ip_packet::<F>(frontend, client, Shape { ttl: UDP.ttl - 1, ..UDP }));
            if to_client {
                to_stack(verdict, &skb);
            } else {
                assert_ne!(skb.redirect, STACK);
            }
        }
    }
}

families!(a_forwarded_packet_obeys_a_policy_of_its_new_addresses = forwarded());

fn answers<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    // A policy for the endpoint's own address is the stack's, which has routed the packet.
    encrypt(maps, backend.0, client.0);
    let reply = packet::<F>(backend, client, SYN_ACK);
    let (verdict, skb) = run_over(Hook::Egress, maps, UPLINK, &reply);
    assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(frontend, client, SYN_ACK)));
    encrypt(maps, frontend.0, client.0);
    let (verdict, skb) = run_over(Hook::Egress, maps, UPLINK, &reply);
    to_stack(verdict, &skb);
    assert_eq!(ip(&skb), ip_packet::<F>(frontend, client, SYN_ACK));
    // The stack sends it out of the same device.
    let (verdict, after) =
        run_edited(Hook::Egress, maps, UPLINK, &packet::<F>(frontend, client, SYN_ACK), |skb| {
            skb.is_translated = true;
        });
    assert_eq!((verdict, after.redirect), (NEXT, None));
    // So does the endpoint's ICMP error; a router's keeps its source.
    let error = |src: F::Words, as_seen: End<F>| {
        let quote = ip_packet::<F>(client, as_seen, SYN);
        build::icmp::<F>((F::UNREACHABLE, 0), src, client.0, (64, 0), &quote)
    };
    for (from, becomes) in [(backend.0, frontend.0), (F::addr(5), F::addr(5))] {
        let came = build::ethernet::<F>(&error(from, backend));
        let (verdict, skb) = run_over(Hook::Egress, maps, UPLINK, &came);
        assert_eq!(ip(&skb), error(becomes, frontend));
        assert_eq!((verdict, skb.redirect) == (REDIRECT, STACK), from == backend.0);
    }
    // A refusal quotes what may have arrived encrypted.
    let empty = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), empty);
    let other = (client.0, client.1 + 1);
    let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(other, frontend, SYN));
    to_stack(verdict, &skb);
    assert_eq!(maps.count_of(Reason::NoEndpoint), 1);
}

families!(an_answer_of_a_local_endpoint_obeys_a_policy_of_the_frontend = answers());
