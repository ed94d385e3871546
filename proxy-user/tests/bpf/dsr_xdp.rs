//! Packets between nodes (DSR) by XDP, and more new ones than a CPU keeps entries for.

use aya::maps::HashMap;
use proxy_common::backend::{BACKEND_LOCAL, BACKEND_TUNNEL_SHIFT};
use proxy_common::flow::tunnel_of;
use proxy_common::map_names as names;
use proxy_common::reason::Reason;
use proxy_common::select::Algorithm;
use proxy_common::service::SERVICE_DSR;

use crate::Scenario;
use crate::dsr::{ID, NUMBER, begin, comes_in, end, other, serve, tag, wrapped};
use crate::snat::by_gateway;
use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Hook, REDIRECT, Service, context_of};
use proxy_testbed::node::{node_addr, uplink};
use proxy_testbed::packet::{ACK, Packet, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 3] = [
    Scenario { name: "XDP encapsulates packets to other nodes", flows: 256, test: encapsulated },
    Scenario { name: "XDP removes outer headers, and notes them", flows: 256, test: taken_out },
    Scenario { name: "a flood of new flows to other nodes keeps no entries", flows: 256, test: flood },
];

/// `XDP_PASS`, `XDP_TX`.
const PASS: u32 = 2;
const TX: u32 = 3;

/// Bytes of a note in front of a packet.
const NOTE: usize = 8;

fn encapsulated(family: Family, harness: &mut Harness) {
    for outer in Family::BOTH {
        begin(family, outer, harness);
        for proto in [TCP, UDP] {
            let (orig_dst, pod) = serve(family, harness, proto, NUMBER << BACKEND_TUNNEL_SHIFT);
            let client = family.client(1, 40_000);
            let (before, mut sent, mut taken) = (harness.stats(ID), 0, 0);
            // The first packet of a tick is tc's: on a busy machine, this may be each of several in turn.
            while sent < 4 || taken < 2 && sent < 1000 {
                let flags = if proto == TCP { [SYN, ACK][usize::from(sent > 0)] } else { 0 };
                let packet = Packet { flags, ..Packet::new(proto, client, orig_dst) };
                sent += 1;
                let inner = by_gateway(packet.bytes());
                let expected = wrapped(&inner, node_addr(outer), other(outer), tag(pod));
                match harness.run_xdp(&packet.bytes(), uplink()) {
                    // tc probes the next hop now and then.
                    (PASS, bytes) => {
                        assert_eq!(bytes, packet.bytes());
                        let context = context_of(Hook::Ingress, uplink());
                        let seen = harness.run_with(Hook::Ingress, &bytes, &context);
                        assert_eq!((seen.verdict, seen.packet), (REDIRECT, expected));
                    }
                    seen => {
                        assert_eq!(seen, (TX, expected));
                        taken += 1;
                    }
                }
            }
            assert!(taken >= 2, "{taken} of {sent}");
            let after = harness.stats(ID);
            let seen = (after.connections - before.connections, after.packets - before.packets);
            assert_eq!((seen, harness.reasons()), ((1, sent), vec![]));
            let flow = harness.flow(family);
            assert_eq!((flow.backend, flow.source, tunnel_of(flow.state)), (pod, client, NUMBER));
            assert_eq!(harness.key_count(family), 1, "replies do not pass this node");
            harness.forget_flows();
        }
        end(harness);
    }
}

fn taken_out(family: Family, harness: &mut Harness) {
    for outer in Family::BOTH {
        begin(family, outer, harness);
        let (orig_dst, pod) = serve(family, harness, TCP, BACKEND_LOCAL);
        let packet = Packet::tcp(SYN, family.client(1, 40_000), orig_dst);
        let bytes = wrapped(&packet.bytes(), other(outer), node_addr(outer), tag(pod));
        // tc believes notes only of devices with the program.
        assert_eq!(harness.run_xdp(&bytes, uplink()), (PASS, bytes.clone()));
        let map = harness.ebpf.map_mut(names::XDP_DEVICES).unwrap();
        let mut devices: HashMap<_, u32, u32> = map.try_into().unwrap();
        devices.insert(uplink(), 1, 0).unwrap();
        let (verdict, after) = harness.run_xdp(&bytes, uplink());
        let (note, inner) = after.split_at(NOTE);
        assert_eq!(verdict, PASS);
        assert_eq!(inner[..12], bytes[..12], "both MAC addresses");
        assert_eq!(inner[12..], packet.bytes()[12..]);
        assert_ne!(note[..4], [0; 4]);
        assert_eq!(note[4..6], u16::from_be_bytes(tag(pod)).to_ne_bytes());
        assert_eq!(harness.flows(family).len(), 0);
        // From a machine that is no node: tc counts it.
        let foreign = wrapped(&packet.bytes(), outer.client(9, 1).ip(), node_addr(outer), tag(pod));
        assert_eq!(harness.run_xdp(&foreign, uplink()), (PASS, foreign));
        let map = harness.ebpf.map_mut(names::XDP_DEVICES).unwrap();
        let mut devices: HashMap<_, u32, u32> = map.try_into().unwrap();
        devices.remove(&uplink()).unwrap();
        assert_eq!(harness.reasons(), []);
        end(harness);
    }
}

fn flood(family: Family, harness: &mut Harness) {
    begin(family, family, harness);
    let (orig_dst, pod) = serve(family, harness, TCP, NUMBER << BACKEND_TUNNEL_SHIFT);
    let service = Service { flags: SERVICE_DSR, ..Service::new(ID, TCP, orig_dst, &[pod]) };
    harness.write(&service.writes_with_table(Algorithm::Maglev as u8, 8));
    let packets = harness.stats(ID).packets;
    let before = harness.configure(|config| config.dsr_flow_rate = 1).dsr_flow_rate;
    for port in 40_000..40_020 {
        let packet = Packet::tcp(SYN, family.client(1, port), orig_dst);
        let seen = comes_in(harness, &packet.bytes());
        let inner = by_gateway(packet.bytes());
        let expected = wrapped(&inner, node_addr(family), other(family), tag(pod));
        assert_eq!((seen.verdict, seen.packet), (REDIRECT, expected));
    }
    let reasons = harness.reasons();
    let [(Reason::FlowBypassed, bypassed)] = reasons[..] else { panic!("{reasons:?}") };
    assert_eq!(harness.flows(family).len() as u64 + bypassed, 20);
    assert_eq!(harness.stats(ID).packets - packets, 20);
    harness.configure(|config| config.dsr_flow_rate = before);
    harness.forget_flows();
    harness.zero_reasons();
    end(harness);
}
