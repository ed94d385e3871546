//! More new connections to other nodes (DSR) than a CPU keeps entries for.

use proxy_common::backend::BACKEND_TUNNEL_SHIFT;
use proxy_common::health::Failure;
use proxy_common::maglev;
use proxy_common::select::{Algorithm, tunnel_tag};
use proxy_common::service::SERVICE_EJECTS;

use super::early::run_at;
use super::tunnel::{NUMBER, dsr_service, write_table};
use super::tunnel_families::{Side, around, both, other_node};
use super::*;
use crate::env::{Health as _, Services as _};

const FIN: Shape = Shape { flags: 0x11, ..SYN };
const RST: Shape = Shape { flags: 0x04, ..SYN };

/// New flows in a second.
const RATE: u32 = 2;

/// Returns the maps of a node that keeps an entry for two new connections a second; `O`: the family of the outer header.
fn limited<O: Side, I: Side>(entry: ServiceEntry) -> HostMaps<I> {
    let maps = I::of(both::<O>(NUMBER << BACKEND_TUNNEL_SHIFT));
    maps.edit_config(|config| config.dsr_flow_rate = RATE);
    let (addr, port) = frontend::<I>();
    for (proto, slot_base) in [(PROTO_TCP, 7), (PROTO_UDP, 8)] {
        maps.add_service(ServiceKey::internal(addr, port, proto), ServiceEntry { slot_base, ..entry });
    }
    maps.advance(1);
    maps
}

fn by_table() -> ServiceEntry {
    ServiceEntry { algorithm: Algorithm::Maglev as u8, ..dsr_service() }
}

/// Returns the frame that the node sends for a client's packet; `hops`: the outer time to live.
fn sent<O: Side, I: Side>(client: End<I>, shape: Shape, hops: u8) -> Vec<u8> {
    let inner = ip_packet::<I>(client, frontend::<I>(), Shape { ttl: shape.ttl - 1, ..shape });
    let mut outer = around::<O, I>(node::<O>(), other_node::<O>(), &inner);
    outer[if O::HEADER == 20 { 8 } else { 7 }] = hops;
    let (addr, port) = backend::<I>();
    O::mark(&mut outer[..O::HEADER], tunnel_tag(&addr, port));
    let macs = route().macs.map(u32::to_ne_bytes).concat();
    [&macs[..], &O::ETHERTYPE.to_ne_bytes(), &outer].concat()
}

/// Runs XDP, and tc if XDP passes the packet. Returns whether XDP has sent it.
fn leaves<O: Side, I: Side>(maps: HostMaps<I>, port: u16, shape: Shape, hops: u8) -> bool {
    let client = (client::<I>().0, port);
    let bytes = packet::<I>(client, frontend::<I>(), shape);
    let (verdict, skb) = run_at(maps, UPLINK, &bytes, |_| {});
    let (by_xdp, (verdict, skb)) = match verdict {
        NEXT => (false, run_over(Hook::Ingress, maps, UPLINK, &bytes)),
        _ => (true, (verdict, skb)),
    };
    assert_eq!((verdict, skb.as_slice()), (REDIRECT, &sent::<O, I>(client, shape, hops)[..]));
    by_xdp
}

fn a_flood<O: Side, I: Side>(shape: Shape) {
    let maps = limited::<O, I>(by_table());
    let bypassed = || maps.refusals_of(1, Reason::FlowBypassed);
    for port in 1..=10 {
        assert!(leaves::<O, I>(maps, port, shape, 64));
    }
    assert_eq!((live(maps).len(), bypassed(), maps.count_of(Reason::FlowBypassed)), (2, 8, 8));
    assert_eq!((maps.stats_of(1).connections, maps.stats_of(1).packets), (2, 10));
    // tc does the same.
    for port in 11..=12 {
        let client = (client::<I>().0, port);
        let bytes = packet::<I>(client, frontend::<I>(), shape);
        let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &bytes);
        assert_eq!((verdict, skb.as_slice()), (REDIRECT, &sent::<O, I>(client, shape, 64)[..]));
    }
    assert_eq!((live(maps).len(), bypassed()), (2, 10));
    // Each half of a second brings one more token.
    maps.advance(HZ / 2);
    leaves::<O, I>(maps, 13, shape, 64);
    leaves::<O, I>(maps, 14, shape, 64);
    assert_eq!((live(maps).len(), bypassed()), (3, 11));
}

#[test]
fn new_flow_beyond_the_rate_keeps_no_entry() {
    a_flood::<V4, V4>(SYN);
    a_flood::<V6, V4>(SYN);
    a_flood::<V4, V6>(UDP);
    a_flood::<V6, V6>(UDP);
}

#[test]
fn connection_without_an_entry_goes_on_and_gets_one_after_the_flood() {
    let maps = limited::<V4, V4>(by_table());
    let bypassed = || maps.count_of(Reason::FlowBypassed);
    for port in 1..=3 {
        leaves::<V4, V4>(maps, port, SYN, 64);
    }
    // Another node may know the connection: the second node is not sure.
    leaves::<V4, V4>(maps, 3, DATA, 128);
    assert_eq!((live(maps).len(), bypassed()), (2, 2));
    // Established flows are not affected.
    assert!(leaves::<V4, V4>(maps, 1, DATA, 64));
    leaves::<V4, V4>(maps, 1, SYN, 64);
    assert_eq!((live(maps).len(), bypassed()), (2, 2));
    maps.advance(HZ);
    leaves::<V4, V4>(maps, 3, DATA, 128);
    assert_eq!((live(maps).len(), bypassed()), (3, 2));
    assert!(leaves::<V4, V4>(maps, 3, DATA, 128));
}

/// The client's next segments lead to the endpoint of the table.
#[test]
fn connection_past_an_ejected_endpoint_keeps_an_entry() {
    const OTHER: u32 = 20;
    let maps = limited::<V4, V4>(by_table());
    let (addr, port) = frontend::<V4>();
    let flags = by_table().flags | SERVICE_EJECTS;
    let entry = ServiceEntry { flags, slot_base: 30, slot_count: 2, ..by_table() };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    let other = BackendEntry { addr: V4::addr(3), ..*maps.backend(7).unwrap() };
    maps.set_backend(OTHER, other);
    maps.set_slots(30, &[7, OTHER]);
    write_table(maps, 8, 7);
    maps.set_maglev_index(maglev::index(1, false), &[8]);
    let refused = |client| maps.note_failure(7, client, Failure::Refusal as u32);
    assert_eq!((refused(5), refused(6)), (0, 1));
    for port in 1..=5 {
        let bytes = packet::<V4>((client::<V4>().0, port), frontend::<V4>(), SYN);
        assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, REDIRECT);
    }
    assert_eq!((live(maps).len(), maps.count_of(Reason::FlowBypassed)), (5, 0));
}

#[test]
fn fin_and_rst_without_an_entry_reach_the_endpoints_node() {
    let maps = limited::<V4, V4>(by_table());
    for (count, shape) in [(1, FIN), (2, RST)] {
        leaves::<V4, V4>(maps, 1, shape, 128);
        assert_eq!((live(maps).len(), maps.count_of(Reason::FlowBypassed)), (0, count));
    }
    // They take no token.
    leaves::<V4, V4>(maps, 1, SYN, 64);
    leaves::<V4, V4>(maps, 2, SYN, 64);
    assert_eq!(live(maps).len(), 2);
    // What has no meaning in a connection, and without a limit also these, is dropped.
    let bytes = |shape| packet::<V4>(client::<V4>(), frontend::<V4>(), shape);
    assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes(SYN_ACK)).0, DROP);
    maps.edit_config(|config| config.dsr_flow_rate = 0);
    assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes(FIN)).0, DROP);
    assert_eq!(maps.count_of(Reason::InvalidState), 2);
}

#[test]
fn flow_that_no_table_leads_to_its_endpoint_always_keeps_an_entry() {
    let affinity = ServiceEntry { affinity_secs: 60, ..by_table() };
    for (rate, entry) in [(RATE, dsr_service()), (RATE, affinity), (0, by_table())] {
        let maps = limited::<V4, V4>(entry);
        maps.edit_config(|config| config.dsr_flow_rate = rate);
        for port in 1..=5 {
            leaves::<V4, V4>(maps, port, SYN, 64);
        }
        assert_eq!((live(maps).len(), maps.count_of(Reason::FlowBypassed)), (5, 0));
    }
}
