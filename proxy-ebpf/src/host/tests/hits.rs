//! Foreign packets that share a bit of the prefilter with a frontend or an endpoint: they pass as if the bit were clear.

use proxy_common::prefilter::{Role, position};

use super::rewrite::fragments;
use super::*;

/// Returns an address and port that no table has, with the bit of another one.
fn sharer<F: Net>(role: Role, of: End<F>, proto: u8) -> End<F> {
    let bit = |end: End<F>| position(role, &end.0, end.1, proto);
    let ends = (100..=255).flat_map(|number| (1..=u16::MAX).map(move |port| (F::addr(number), port)));
    ends.into_iter().find(|end| bit(*end) == bit(of)).unwrap()
}

fn passes<F: Net>(maps: HostMaps<F>, hook: Hook, device: u32, ip_packet: &[u8]) {
    let bytes = build::ethernet::<F>(ip_packet);
    let (verdict, skb) = run_over(hook, maps, device, &bytes);
    assert_eq!((verdict, skb.wire()), (NEXT, bytes));
}

fn datagrams_in_fragments<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let shape = Shape { payload: b"more than eight bytes", ..UDP };
    let to_frontend = (client, sharer::<F>(Role::Frontend, frontend, PROTO_UDP));
    let to_backend = (client, sharer::<F>(Role::Backend, backend, PROTO_UDP));
    let from_backend = (to_backend.1, (node::<F>(), 2500));
    for (src, dst) in [to_frontend, to_backend, from_backend] {
        for part in fragments::<F>(src, dst, shape) {
            passes(maps, Hook::Ingress, UPLINK, &part);
        }
        for part in fragments::<F>(dst, src, shape) {
            passes(maps, Hook::Egress, UPLINK, &part);
        }
    }
    assert_eq!(maps.count_of(Reason::FragmentWithoutFirst), 0);
    // A later fragment to the frontend itself still needs its first one.
    let [first, later] = fragments::<F>(client, frontend, shape);
    run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&first));
    crate::host::maps::at!(maps, flows).iter_mut().for_each(|flow| flow.state = 0);
    assert_eq!(run_over(Hook::Ingress, maps, POD, &build::ethernet::<F>(&later)).0, DROP);
}

families!(fragments_that_share_a_bit_of_the_prefilter_pass = datagrams_in_fragments());

/// Every kind of whole packet, in both roles, at both hooks.
fn whole_packets<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let far = (F::addr(77), 2600);
    for shape in [SYN, SYN_ACK, DATA, Shape { flags: 4, ..SYN }, UDP, INIT] {
        let frontend = sharer::<F>(Role::Frontend, frontend::<F>(), shape.proto);
        let backend = sharer::<F>(Role::Backend, backend::<F>(), shape.proto);
        for other in [frontend, backend] {
            for end in [far, (node::<F>(), 2500), (node::<F>(), 4500)] {
                passes(maps, Hook::Ingress, UPLINK, &ip_packet::<F>(end, other, shape));
                passes(maps, Hook::Ingress, UPLINK, &ip_packet::<F>(other, end, shape));
                for device in [0, POD] {
                    passes(maps, Hook::Egress, device, &ip_packet::<F>(end, other, shape));
                    passes(maps, Hook::Egress, device, &ip_packet::<F>(other, end, shape));
                }
            }
        }
    }
    assert!(maps.refusals().is_empty());
    assert!(Reason::ALL.iter().all(|reason| maps.count_of(*reason) == 0));
}

families!(packets_that_share_a_bit_of_the_prefilter_pass = whole_packets());
