//! DSR by XDP: the first node encapsulates a packet, and the endpoint's node removes the outer header and passes the inner packet to
//! tc.

use proxy_common::backend::BACKEND_TUNNEL_SHIFT;
use proxy_common::flow::{STATE_DSR, STATE_SNAT, tunnel_of};
use proxy_common::node::NODE_ADDR_INTERNAL;

use super::early::run_at;
use super::tunnel::NUMBER;
use super::tunnel_families::{Both, Side, around, both, other_node};
use super::*;

/// What a test changes of a packet.
type Edit = fn(&mut Skb);

const ACK: Shape = Shape { flags: 0x10, ..SYN };

/// Returns the frame that the node sends for a packet of the client: encapsulated in the family `O`.
fn sent_to<O: Side, I: Side>(shape: Shape) -> Vec<u8> {
    let inner = ip_packet::<I>(client::<I>(), frontend::<I>(), Shape { ttl: shape.ttl - 1, ..shape });
    let macs = route().macs.map(u32::to_ne_bytes).concat();
    let outer = around::<O, I>(node::<O>(), other_node::<O>(), &inner);
    [&macs[..], &O::ETHERTYPE.to_ne_bytes(), &outer].concat()
}

fn a_connection<O: Side, I: Side>() {
    let maps = I::of(both::<O>(NUMBER << BACKEND_TUNNEL_SHIFT));
    let run =
        |shape, edit: Edit| run_at(maps, UPLINK, &packet::<I>(client::<I>(), frontend::<I>(), shape), edit);
    maps.advance(1);
    for (packets, shape) in [(1, SYN), (2, ACK), (3, DATA)] {
        let (verdict, skb) = run(shape, |_| {});
        assert_eq!((verdict, skb.as_slice()), (REDIRECT, &sent_to::<O, I>(shape)[..]));
        let stats = maps.stats_of(1);
        assert_eq!((stats.connections, stats.packets), (1, packets));
    }
    let flow = live(maps)[0];
    assert_eq!((tunnel_of(flow.bits()), flow.bits() & STATE_SNAT), (NUMBER, 0));
    assert_eq!((flow.source_port, flow.positions[1]), (client::<I>().1, u32::MAX), "no reply key");
    // What tc has to do: nothing is changed or counted before.
    let edits: [(&str, Edit); 5] = [
        ("no route", |skb| skb.routes.set_default(None)),
        ("an unknown neighbour", |skb| skb.routes.set_default(Some(Route { resolved: 0, ..route() }))),
        ("too long", |skb| skb.routes.set_default(Some(Route { mtu: 59, ..route() }))),
        ("no room", |skb| skb.headroom = 16),
        ("many segments", |skb| skb.gso_size = 1),
    ];
    let before = live(maps)[0];
    maps.advance(2);
    for (what, edit) in edits {
        let (verdict, skb) = run(DATA, edit);
        let came = packet::<I>(client::<I>(), frontend::<I>(), DATA);
        assert_eq!((verdict, skb.as_slice()), (NEXT, &came[..]), "{what}");
        maps.advance(1);
    }
    assert_eq!((live(maps)[0].last_seen, maps.stats_of(1).packets), (before.last_seen, 3));
    assert_eq!(run(Shape { ttl: 1, ..DATA }, |_| {}).0, NEXT, "an answer");
    // tc finds the same flow, and XDP one that tc has begun.
    let (verdict, skb) =
        run_over(Hook::Ingress, maps, UPLINK, &packet::<I>(client::<I>(), frontend::<I>(), DATA));
    assert_eq!((verdict, skb.as_slice()), (REDIRECT, &sent_to::<O, I>(DATA)[..]));
    maps.set_config(*maps.config().unwrap());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<I>(client::<I>(), frontend::<I>(), SYN));
    assert_eq!(run(DATA, |_| {}).1.as_slice(), sent_to::<O, I>(DATA));
    assert_eq!((live(maps).len(), maps.stats_of(1).connections), (1, 2));
}

mixed!(xdp_encapsulates_packets_to_other_nodes = a_connection());

/// A next hop is probed by the kernel only if the kernel sends to it now and then.
fn some_pass<O: Side, I: Side>() {
    let maps = I::of(both::<O>(NUMBER << BACKEND_TUNNEL_SHIFT));
    let bytes = packet::<I>(client::<I>(), frontend::<I>(), DATA);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<I>(client::<I>(), frontend::<I>(), SYN));
    let mut passed = 0;
    for _ in 0..1024 {
        maps.advance(1);
        if run_at(maps, UPLINK, &bytes, |_| {}).0 == NEXT {
            assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, REDIRECT);
            passed += 1;
        }
    }
    assert_eq!(passed, 4);
}

#[test]
fn mixed_family_route_on_probe_tick_passes() {
    some_pass::<V4, V6>();
    some_pass::<V6, V4>();
}

#[test]
fn packet_in_mid_connection_without_a_flow_passes_to_tc() {
    let maps = V4::of(both::<V4>(NUMBER << BACKEND_TUNNEL_SHIFT));
    for shape in [ACK, DATA] {
        let bytes = packet::<V4>(client::<V4>(), frontend::<V4>(), shape);
        let (verdict, skb) = run_at(maps, UPLINK, &bytes, |_| {});
        assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]));
    }
    assert!(live(maps).is_empty());
}

/// Returns a node with a local endpoint, and XDP on its uplink.
fn here<O: Side>() -> Both {
    let both = both::<O>(BACKEND_LOCAL);
    both.v4.set_early_device(UPLINK, true);
    both.v6.set_early_device(UPLINK, true);
    both
}

/// Returns a client's packet as the other node sends it to this one.
fn from_other<O: Side, I: Side>(shape: Shape) -> Vec<u8> {
    let inner = ip_packet::<I>(client::<I>(), frontend::<I>(), shape);
    build::ethernet::<O>(&around::<O, I>(other_node::<O>(), node::<O>(), &inner))
}

fn arriving(bytes: &[u8], edit: impl FnOnce(&mut Skb)) -> HostPacket {
    HostPacket::new(bytes).edit(|skb| {
        (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
        skb.routes.set_default(Some(route()));
        edit(skb);
    })
}

fn xdp(both: Both, packet: &HostPacket) -> i32 {
    run_any_early(both.v4, both.v6, packet.early_frame())
}

fn tc(both: Both, packet: &HostPacket) -> i32 {
    run_any(Hook::Ingress, both.v4, both.v6, packet.frame())
}

fn arrives<O: Side, I: Side>() {
    let (client, frontend, backend) = (client::<I>(), frontend::<I>(), backend::<I>());
    let here = here::<O>();
    // The second packet is one in mid-connection, which no other node is looked for.
    for (number, shape) in [(1, SYN), (2, DATA), (3, UDP)] {
        let packet = arriving(&from_other::<O, I>(shape), |_| {});
        if shape.proto == PROTO_UDP {
            let entry = ServiceEntry { slot_base: 8, ..tunnel::dsr_service() };
            I::of(here).add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_UDP), entry);
        }
        assert_eq!(xdp(here, &packet), NEXT);
        let skb = packet.into_skb();
        let inner = build::packet::<I>(client, frontend, shape);
        assert_eq!((skb.as_slice(), skb.ethertype), (&inner[..], u32::from(I::ETHERTYPE)));
        assert_eq!(I::of(here).stats_of(1).packets, number - 1, "nothing is counted");
        let packet = arriving(skb.as_slice(), |new| new.note = skb.note);
        assert_eq!(tc(here, &packet), NEXT);
        let skb = packet.into_skb();
        assert_eq!(ip(&skb), ip_packet::<I>(client, backend, shape));
        assert_eq!(I::of(here).stats_of(1).packets, number);
        // Another device must not take the note for its own.
        assert_eq!(skb.note, Some([0; 2]));
    }
    for flow in live(I::of(here)) {
        assert_eq!((flow.bits() & (STATE_DSR | STATE_SNAT), tunnel_of(flow.bits())), (STATE_DSR, 0));
    }
}

mixed!(xdp_removes_the_outer_header_and_tc_delivers = arrives());

fn what_tc_has_to_take_out<O: Side, I: Side>() {
    let is_left = |both: Both, bytes: &[u8], edit: Edit| {
        let packet = arriving(bytes, edit);
        assert_eq!(xdp(both, &packet), NEXT);
        let skb = packet.into_skb();
        let is_unchanged = skb.as_slice() == bytes;
        assert!(
            !is_unchanged || skb.note.is_none_or(|note| note == [0; 2]),
            "an unchanged packet has no note"
        );
        is_unchanged
    };
    let bytes = from_other::<O, I>(SYN);
    assert!(!is_left(here::<O>(), &bytes, |_| {}));
    assert!(is_left(here::<O>(), &bytes, |skb| skb.takes_notes = false), "no room for a note");
    assert!(is_left(here::<O>(), &bytes, |skb| skb.ifindex = POD), "not on an uplink");
    assert!(is_left(both::<O>(BACKEND_LOCAL), &bytes, |_| {}), "the agent is about to detach the program");
    let off = here::<O>();
    off.v4.edit_config(|config| config.flags = 0);
    off.v6.edit_config(|config| config.flags = 0);
    assert!(is_left(off, &bytes, |_| {}), "DSR is not used");
    // From a machine that is no node; tc counts it.
    let inner = ip_packet::<I>(client::<I>(), frontend::<I>(), SYN);
    let here = here::<O>();
    let foreign = build::ethernet::<O>(&around::<O, I>(O::addr(66), node::<O>(), &inner));
    assert!(is_left(here, &foreign, |_| {}));
    assert_eq!(O::of(here).count_of(Reason::ForeignTunnel), 0);
    // To another machine, and to another address of this node.
    for dst in [O::addr(77), O::addr(31)] {
        O::of(here).add_node_addr(O::addr(31), NODE_ADDR_OWN | NODE_ADDR_PORTS);
        let other = build::ethernet::<O>(&around::<O, I>(other_node::<O>(), dst, &inner));
        assert!(is_left(here, &other, |_| {}));
    }
    // No packet to a Service, and one for another MAC address.
    let inner = ip_packet::<I>(client::<I>(), (frontend::<I>().0, 81), SYN);
    let other = build::ethernet::<O>(&around::<O, I>(other_node::<O>(), node::<O>(), &inner));
    assert!(is_left(here, &other, |_| {}));
    let mut other = bytes;
    other[5] ^= 1;
    assert!(is_left(here, &other, |_| {}));
}

mixed!(undecapsulated_packet_passes_unchanged = what_tc_has_to_take_out());

#[test]
fn note_of_another_program_is_not_believed() {
    let here = here::<V4>();
    let packet = arriving(&from_other::<V4, V4>(SYN), |_| {});
    assert_eq!(xdp(here, &packet), NEXT);
    let (noted, bytes) = {
        let skb = packet.into_skb();
        (skb.note.unwrap(), skb.as_slice().to_vec())
    };
    // The inner packet is for a node port of the other node, which only a packet from there reaches here.
    let is_believed = |edit: &dyn Fn(&mut Skb)| {
        let inner = build::packet::<V4>(client::<V4>(), (other_node::<V4>(), 30_080), SYN);
        let packet = arriving(&inner, |skb| edit(skb));
        assert_eq!(tc(here, &packet), NEXT);
        packet.into_skb().as_slice() != inner
    };
    let entry = ServiceEntry { kind: proxy_common::service::KIND_NODE_PORT, ..tunnel::dsr_service() };
    here.v4.add_service(ServiceKey::internal([0], 30_080, PROTO_TCP), entry);
    here.v4.add_frontend_bit(&other_node::<V4>(), 30_080, PROTO_TCP);
    here.v4.add_node_addr(other_node::<V4>(), NODE_ADDR_INTERNAL);
    assert!(is_believed(&|skb| skb.note = Some(noted)));
    assert!(!is_believed(&|skb| skb.note = None));
    assert!(!is_believed(&|skb| skb.note = Some([noted[0] ^ 2, noted[1]])));
    assert!(!is_believed(&|skb| skb.note = Some([0, noted[1]])));
    assert!(!is_believed(&|skb| (skb.note, skb.vlan_tag) = (Some(noted), Some(5))));
    assert!(!is_believed(&|skb| (skb.note, skb.ifindex) = (Some(noted), POD)));
    here.v4.set_early_device(UPLINK, false);
    assert!(!is_believed(&|skb| skb.note = Some(noted)), "XDP is detached");
    assert_eq!(bytes, build::packet::<V4>(client::<V4>(), frontend::<V4>(), SYN));
}

/// A packet that arrives encapsulated, after a SYN whose refusal was hidden.
#[test]
fn packet_before_an_encapsulated_one_leaves_nothing_behind() {
    let here = here::<V4>();
    here.v4.with_scratch(|ctx| ctx.retried = 1);
    let packet = arriving(&from_other::<V4, V4>(SYN), |_| {});
    assert_eq!(tc(here, &packet), NEXT);
    assert_eq!(here.v4.with_scratch(|ctx| ctx.retried), 0);
}
