//! Whose a packet is: frames for other machines, and packets that only look like those of this node.

use proxy_common::config::{CONFIG_DSR, CONFIG_LAN_PORTS, CONFIG_MASQUERADE_ALL};
use proxy_common::node::{DEVICE_LAN_PORT, DEVICE_UPLINK, NODE_ADDR_INTERNAL};

use super::*;
use crate::frame::{PACKET_HOST, PACKET_OTHERHOST};

const BROADCAST: u32 = 1;
const MULTICAST: u32 = 2;
/// A port of a bridge with an uplink, behind which a guest is.
const GUEST: u32 = 6;

/// Runs the ingress hook over a frame whose destination the kernel has compared with the device's own MAC address. Returns
/// whether the packet passed untouched.
fn is_left<F: Net>(maps: HostMaps<F>, device: u32, bytes: &[u8], packet_type: u32) -> bool {
    let (verdict, skb) = run_edited(Hook::Ingress, maps, device, bytes, |skb| skb.packet_type = packet_type);
    assert_eq!(verdict == NEXT, skb.redirect.is_none());
    verdict == NEXT && skb.wire() == bytes
}

/// Returns the frame with another destination MAC address.
fn to_mac(frame: &[u8], last: u8) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[5] = last;
    frame
}

fn frames_for_other_machines<F: Net>(backend_flags: u32) {
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    for shape in [SYN, UDP] {
        let maps = maps::<F>(backend_flags);
        let to_us = packet::<F>(client, frontend, shape);
        let flooded = to_mac(&to_us, 0x77);
        for _ in 0..2 {
            assert!(is_left(maps, UPLINK, &flooded, PACKET_OTHERHOST));
            for packet_type in [BROADCAST, MULTICAST] {
                assert!(is_left(maps, UPLINK, &to_us, packet_type));
                assert!(is_left(maps, POD, &to_us, packet_type));
            }
            let (verdict, skb) = early::run_at(maps, UPLINK, &flooded, |_| {});
            assert_eq!((verdict, skb.wire()), (NEXT, flooded.clone()));
            assert!(live(maps).is_empty());
        }
        assert!(!is_left(maps, UPLINK, &to_us, PACKET_HOST));
        let flow = live(maps).pop().unwrap();
        // A packet of a flow, and its reply.
        assert!(is_left(maps, UPLINK, &to_mac(&packet::<F>(client, frontend, DATA), 0x77), PACKET_OTHERHOST));
        let reply = packet::<F>(backend, (flow.source, flow.source_port), shape);
        assert!(is_left(maps, UPLINK, &to_mac(&reply, 0x77), PACKET_OTHERHOST));
        // An address that no Service has, a fragment without its first one, a packet that cannot be read.
        let mut broken = flooded.clone();
        broken.truncate(build::ETHERNET + F::HEADER + 4);
        assert!(is_left(maps, UPLINK, &broken, PACKET_OTHERHOST));
        assert_eq!(maps.count_of(Reason::Malformed), 0);
    }
}

#[test]
fn frames_for_other_machines_pass_untouched() {
    for flags in [0, BACKEND_LOCAL] {
        frames_for_other_machines::<V4>(flags);
        frames_for_other_machines::<V6>(flags);
    }
}

/// The uplink is a port of a bridge, which has a MAC address of its own; so is a guest's device.
fn ports_of_a_bridge<F: Net>() {
    let sent = packet::<F>(client::<F>(), frontend::<F>(), UDP);
    let with = |edit: fn(&mut NodeConfig)| {
        let maps = maps::<F>(BACKEND_LOCAL);
        maps.edit_config(edit);
        maps.add_device(GUEST, DEVICE_LAN_PORT | mac(build::MACS[0]));
        maps
    };
    // The port's own address is another one, so the kernel takes all of its frames for those of other machines.
    let maps = with(|config| config.flags |= CONFIG_LAN_PORTS);
    for device in [UPLINK, GUEST] {
        assert!(!is_left(maps, device, &sent, PACKET_OTHERHOST), "{device}");
        assert!(is_left(maps, device, &to_mac(&sent, 0x77), PACKET_OTHERHOST), "{device}");
    }
    // A pod's bridge has no uplink: whatever the pod's neighbour table says.
    assert!(!is_left(maps, POD, &to_mac(&sent, 0x77), PACKET_OTHERHOST));
    // The fourth uplink is only in the map.
    let maps = with(|config| config.uplinks = [10, 11, 12]);
    maps.add_device(GUEST, DEVICE_UPLINK | mac(build::MACS[0]));
    assert!(is_left(maps, GUEST, &to_mac(&sent, 0x77), PACKET_OTHERHOST));
    assert!(!is_left(maps, GUEST, &sent, PACKET_OTHERHOST));
}

families!(a_bridges_own_frames_are_received_on_its_ports = ports_of_a_bridge());

#[test]
fn xdp_processes_only_frames_to_its_own_mac() {
    let maps = maps::<V4>(0);
    let sent = packet::<V4>(client::<V4>(), frontend::<V4>(), UDP);
    assert_eq!(early::run_at(maps, UPLINK, &sent, |_| {}).0, REDIRECT);
    maps.edit_config(|config| config.macs[0] = 0);
    assert_eq!(early::run_at(maps, UPLINK, &sent, |_| {}).0, NEXT, "the address is not known yet");
}

/// A container on the LAN (macvlan) sends to a frontend: its frames leave by the uplink, and did not arrive on any device.
fn a_container_on_the_lan<F: Net>() {
    for shape in [SYN, UDP, DATA] {
        let maps = maps::<F>(0);
        let sent = packet::<F>(client::<F>(), frontend::<F>(), shape);
        let (verdict, skb) = run_over(Hook::Egress, maps, 0, &sent);
        assert_eq!((verdict, skb.wire()), (NEXT, sent));
        assert!(live(maps).is_empty());
        let own = packet::<F>((node::<F>(), 4000), frontend::<F>(), shape);
        let (verdict, _) = run_over(Hook::Egress, maps, 0, &own);
        assert_eq!((verdict, live(maps).len()), (REDIRECT, 1), "a process of the node");
    }
}

families!(a_container_on_the_lan_is_not_the_node = a_container_on_the_lan());

/// A pod sends a packet whose source is the node's address and a frontend's port, through the node to a client.
#[test]
fn a_forged_source_of_the_node_begins_no_flow() {
    let maps = maps::<V6>(BACKEND_LOCAL);
    let (own, client) = ((node::<V6>(), 3000), client::<V6>());
    let entry =
        ServiceEntry { id: 1, slot_base: 8, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(own.0, own.1, PROTO_UDP), entry);
    let forged = packet::<V6>(own, client, UDP);
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &forged);
    assert_eq!((verdict, skb.wire()), (NEXT, forged.clone()));
    let mark = skb.is_translated;
    let (verdict, skb) = run_edited(Hook::Egress, maps, POD, &forged, |skb| skb.is_translated = mark);
    assert_eq!((verdict, skb.wire(), live(maps).len()), (NEXT, forged, 0));
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<V6>(client, own, UDP));
    assert_eq!(skb.wire(), packet::<V6>(client, backend::<V6>(), UDP), "the client reaches the Service");
}

/// A pod forges an encapsulated packet to this node or, through its masquerading, to another node.
#[test]
fn encapsulated_packets_of_pods_are_dropped_with_dsr() {
    let other_node = V4::addr(8);
    let (v4, v6) = (maps::<V4>(BACKEND_LOCAL), maps::<V6>(BACKEND_LOCAL));
    v4.add_node_addr(node::<V4>(), NODE_ADDR_OWN | NODE_ADDR_INTERNAL);
    v4.add_node_addr(other_node, NODE_ADDR_INTERNAL);
    let entry = ServiceEntry {
        id: 1,
        slot_base: 8,
        slot_count: 1,
        kind: proxy_common::service::KIND_LOAD_BALANCER,
        ..ServiceEntry::NONE
    };
    let (addr, port) = frontend::<V4>();
    v4.add_service(ServiceKey::internal(addr, port, PROTO_UDP), entry);
    let tag = proxy_common::select::tunnel_tag(&backend::<V4>().0, backend::<V4>().1);
    let inner = ip_packet::<V4>(client::<V4>(), frontend::<V4>(), UDP);
    let sent = |device, src, dst| {
        let frame = build::ethernet::<V4>(&tunnel::around(src, dst, tag, &inner));
        let frame = HostPacket::new(&frame).edit(|skb| (skb.ifindex, skb.ingress_ifindex) = (device, device));
        run_any(Hook::Ingress, v4, v6, frame.frame())
    };
    let (pod, far) = (client::<V4>().0, V4::addr(77));
    assert_eq!(sent(POD, pod, node::<V4>()), NEXT, "without DSR");
    v4.edit_config(|config| config.flags |= CONFIG_DSR);
    for (dropped, (src, dst)) in
        (1..).zip([(pod, node::<V4>()), (pod, other_node), (other_node, node::<V4>())])
    {
        assert_eq!(sent(POD, src, dst), DROP);
        assert_eq!(v4.count_of(Reason::LocalTunnel), dropped);
    }
    assert_eq!(sent(POD, pod, far), NEXT, "a tunnel of the pod's own");
    assert_eq!((sent(UPLINK, other_node, node::<V4>()), live(v4).len()), (NEXT, 1));
}

/// The kernel removes the fragment header of a packet that is its only fragment (`nf_conntrack_reasm.c`).
#[test]
fn pods_tunnel_behind_extension_header_is_dropped() {
    const FRAGMENT: u8 = 44;
    const DESTINATION_OPTIONS: u8 = 60;
    let (v4, v6) = (maps::<V4>(BACKEND_LOCAL), maps::<V6>(BACKEND_LOCAL));
    let other_node = V6::addr(8);
    v6.add_node_addr(other_node, NODE_ADDR_INTERNAL);
    v6.add_node_addr(node::<V6>(), NODE_ADDR_OWN | NODE_ADDR_INTERNAL);
    v6.edit_config(|config| config.flags |= CONFIG_DSR);
    let inner = ip_packet::<V6>(client::<V6>(), frontend::<V6>(), UDP);
    let sent = |device, (src, dst): ([u32; 4], [u32; 4]), number: u8| {
        let [high, low] = (inner.len() as u16 + 8).to_be_bytes();
        let addresses = [src, dst].concat().into_iter().flat_map(u32::to_ne_bytes);
        let extension = [41, 0, 0, 0, 0, 0, 0, 1];
        let mut ip = std::vec![0x60, 0, 0, 0, high, low, number, 64];
        ip.extend(addresses.chain(extension).chain(inner.iter().copied()));
        let frame = build::ethernet::<V6>(&ip);
        let frame = HostPacket::new(&frame).edit(|skb| (skb.ifindex, skb.ingress_ifindex) = (device, device));
        run_any(Hook::Ingress, v4, v6, frame.frame())
    };
    let pod = client::<V6>().0;
    for (dropped, number) in (1..).zip([FRAGMENT, DESTINATION_OPTIONS]) {
        assert_eq!(sent(POD, (pod, other_node), number), DROP);
        assert_eq!(v6.count_of(Reason::LocalTunnel), dropped);
        assert_eq!(sent(UPLINK, (other_node, node::<V6>()), number), NEXT, "no node sends it");
    }
    assert_eq!(live(v6).len(), 0);
}

/// The endpoint is on this node, so that the FORWARD chain with the policies of both pods can see the packet.
fn masquerade_all_leaves_local_endpoints_to_the_stack<F: Net>() {
    for (flags, verdict) in [(BACKEND_LOCAL, NEXT), (0, REDIRECT)] {
        let maps = maps::<F>(flags);
        maps.edit_config(|config| config.flags |= CONFIG_MASQUERADE_ALL);
        let sent = packet::<F>(client::<F>(), frontend::<F>(), SYN);
        let (seen, skb) = run_over(Hook::Ingress, maps, POD, &sent);
        assert_eq!(seen, verdict);
        if verdict == NEXT {
            assert_eq!(skb.wire(), packet::<F>(client::<F>(), backend::<F>(), SYN));
        }
    }
}

families!(
    masquerade_all_keeps_clients_of_local_endpoints = masquerade_all_leaves_local_endpoints_to_the_stack()
);
