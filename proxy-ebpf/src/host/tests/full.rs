//! Full tables, and keys that are missing in the index.

use proxy_common::config::{FlowSize, PortRange};
use proxy_common::conntrack::{ASSURED, is_closed};
use proxy_common::flow::{
    BUCKET_SLOTS, BUCKET_WORDS, DIRECTION_FORWARD, NO_POSITION, SLOT_PENDING, STATE_SNAT, buckets_of,
};

use super::*;
use crate::host::maps::at;

/// Sends data in both directions, and checks its translation.
fn goes_on<F: Net>(maps: HostMaps<F>, client: End<F>) {
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, DATA));
    assert_eq!(skb.wire(), packet::<F>(client, backend, DATA));
    let (_, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, DATA));
    assert_eq!(skb.wire(), packet::<F>(frontend, client, DATA));
}

/// Whether a client can connect.
fn connects<F: Net>(maps: HostMaps<F>, client: End<F>) -> bool {
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    if verdict == DROP {
        return false;
    }
    assert_eq!(skb.wire(), packet::<F>(client, backend, SYN));
    run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
    goes_on(maps, client);
    let flows = maps.flows();
    assert!(flows.iter().any(|flow| flow.client_port == client.1 && flow.bits() & ASSURED != 0));
    true
}

fn an_index_without_room<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let config = *maps.config().unwrap();
    maps.set_config(NodeConfig { flows: [FlowSize::new(config.flows[0].entries, 2); 2], ..config });
    let client = |port| (client::<F>().0, port);
    let known: Vec<u16> = (4000..4040).filter(|port| connects(maps, client(*port))).collect();
    assert_eq!(known.len() as u32, BUCKET_SLOTS, "two buckets, and two keys for each flow");
    assert_eq!(maps.count_of(Reason::FlowCollision), 40 - u64::from(BUCKET_SLOTS));
    for port in &known {
        goes_on(maps, client(*port));
    }
    // A killed agent may leave slots of a removed flow.
    let gone = at!(maps, flows).iter_mut().find(|flow| flow.client_port == known[3]).unwrap();
    gone.state = 0;
    assert!(connects(maps, client(5000)), "stale slots are room");
    assert!(!connects(maps, client(5001)));
    for port in known.iter().filter(|port| **port != known[3]) {
        goes_on(maps, client(*port));
    }
    // A slot that another CPU is adding is not stale.
    at!(maps, buckets)[0].slots[0] |= SLOT_PENDING;
    assert!(!connects(maps, client(5002)));
}

/// The agent gives the index more buckets, step by step; no key has moved yet.
fn an_index_that_grows<F: Net>() {
    let (maps, few, many) = (maps::<F>(BACKEND_LOCAL), 8, 256);
    let client = |port| (client::<F>().0, port);
    let size = |buckets, searched| FlowSize { entries: 64, buckets, searched };
    let config = *maps.config().unwrap();
    maps.set_config(NodeConfig { flows: [FlowSize::new(64, many); 2], ..config });
    let steps =
        [size(few, [few, 0]), size(few, [few, many]), size(many, [few, many]), size(many, [many, few])];
    let mut known = Vec::new();
    for (step, size) in (0..).zip(steps) {
        maps.edit_config(|config| config.flows = [size; 2]);
        let more = 4000 + 100 * step..4008 + 100 * step;
        assert!(more.clone().all(|port| connects(maps, client(port))), "{size:?}");
        known.extend(more);
        for port in &known {
            goes_on(maps, client(*port));
        }
        let used = maps.flows().iter().filter(|flow| flow.bits() != 0).count();
        assert_eq!(used, known.len(), "no connection has two flows: {size:?}");
    }
    // If keys had not moved, those of the first steps would be lost now.
    maps.edit_config(|config| config.flows = [size(many, [many, 0]); 2]);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let last = client(*known.last().unwrap());
    let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(last, frontend, DATA));
    assert_eq!(skb.wire(), packet::<F>(last, backend, DATA));
}

families!(every_flow_is_found_while_the_index_grows = an_index_that_grows());

/// Sends a packet of the client at an uplink.
fn forwards<F: Net>(maps: HostMaps<F>, shape: Shape) {
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client::<F>(), frontend::<F>(), shape));
}

/// Opens and closes a connection with SNAT. Returns its flow, the only one.
fn ends_a_connection<F: Net>(maps: HostMaps<F>) -> FlowEntry<F::Words> {
    const FIN: Shape = Shape { flags: 0x11, ..SYN };
    forwards(maps, SYN);
    let [begun] = live(maps)[..] else { panic!("no flow") };
    let source = (begun.source, begun.source_port);
    let replies = |shape| {
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend::<F>(), source, shape));
    };
    replies(SYN_ACK);
    for shape in [DATA, FIN] {
        forwards(maps, shape);
        replies(shape);
    }
    let [ended] = live(maps)[..] else { panic!("one flow") };
    assert!(is_closed(ended.bits()) && ended.bits() & STATE_SNAT != 0, "{:#x}", ended.bits());
    ended
}

fn a_removed_forward_key<F: Net>() {
    let maps = maps::<F>(0);
    let ended = ends_a_connection(maps);
    forwards(maps, SYN);
    let flows = live(maps);
    let waits = flows.iter().find(|flow| is_closed(flow.bits())).unwrap();
    assert_eq!((flows.len(), waits.source_port, waits.positions[0]), (2, ended.source_port, NO_POSITION));
}

families!(flow_whose_port_is_in_quarantine_stores_no_position_of_its_forward_key = a_removed_forward_key());

/// A connection with SNAT has ended, and its source port is in quarantine. The index grows, and the flow's forward key has two
/// places when the client connects from the same port again.
fn a_port_in_quarantine<F: Net>() {
    let (maps, few, many) = (maps::<F>(0), 8, 256);
    let config = *maps.config().unwrap();
    maps.set_config(NodeConfig { flows: [FlowSize::new(64, many); 2], ..config });
    maps.edit_config(|config| config.flows = [FlowSize::new(64, few); 2]);
    let ended = ends_a_connection(maps);
    // The agent has moved the key, and has not removed its old place yet.
    maps.edit_config(|config| {
        config.flows = [FlowSize { entries: 64, buckets: many, searched: [few, many] }; 2];
    });
    let old = ended.positions[0];
    let slot = at!(maps, buckets)[(old / BUCKET_WORDS) as usize].slots[(old % BUCKET_WORDS) as usize];
    let [first, _] = buckets_of(ended.key(DIRECTION_FORWARD).hash(config.flow_seed), many);
    assert_ne!(first, old / BUCKET_WORDS);
    at!(maps, buckets)[first as usize].slots[0] = slot;
    at!(maps, flows).iter_mut().find(|flow| flow.bits() != 0).unwrap().positions[0] = first * BUCKET_WORDS;
    forwards(maps, SYN);
    assert_eq!(maps.count_of(Reason::FlowCollision), 0);
    let [begun] = live(maps)[..] else { panic!("one flow") };
    assert!(!is_closed(begun.bits()), "{:#x}", begun.bits());
}

families!(port_in_quarantine_is_reused_during_index_growth = a_port_in_quarantine());

families!(keys_use_either_bucket_until_both_are_full = an_index_without_room());

fn a_table_of_assured_flows<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let client = |port| (client::<F>().0, port);
    let known: Vec<u16> = (4000..4200).filter(|port| connects(maps, client(*port))).collect();
    assert!((56..=64).contains(&known.len()), "{}", known.len());
    assert_eq!(maps.count_of(Reason::FlowTableFull), 200 - known.len() as u64);
    // A retransmitted SYN begins no flow, and is not refused.
    let again = client(known[5]);
    let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(again, frontend::<F>(), SYN));
    assert_eq!(skb.wire(), packet::<F>(again, backend::<F>(), SYN));
    let reset = Shape { flags: 4, ..SYN };
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client(known[3]), frontend::<F>(), reset));
    assert!((5000..5010).any(|port| connects(maps, client(port))), "a closed flow yields");
    for port in known.iter().filter(|port| **port != known[3]) {
        goes_on(maps, client(*port));
    }
}

families!(assured_flows_keep_their_entries = a_table_of_assured_flows());

/// A client completes handshakes, and ignores the FIN of the backend.
fn a_table_of_half_closed_flows<F: Net>() {
    const ENTRIES: u32 = 4096;
    let maps = maps::<F>(BACKEND_LOCAL);
    maps.edit_config(|config| {
        config.flows = [FlowSize::new(ENTRIES, buckets_for(ENTRIES)); 2];
    });
    maps.set_config(*maps.config().unwrap());
    let client = |port| (client::<F>().0, port);
    let tried = 1024..1024 + 2 * ENTRIES as u16;
    let known: Vec<u16> = tried.filter(|port| connects(maps, client(*port))).collect();
    assert!(known.len() as u32 > ENTRIES - 64, "{}", known.len());
    let (established, half_closed) = known.split_at(8);
    let fin = Shape { flags: 0x11, ..SYN };
    for port in half_closed {
        run_over(Hook::Egress, maps, POD, &packet::<F>(backend::<F>(), client(*port), fin));
    }
    maps.advance(59 * HZ);
    let finds_room =
        |ports: core::ops::Range<u16>| ports.filter(|port| connects(maps, client(*port))).count();
    assert!(finds_room(30_000..30_200) < 64, "they were seen in the last minute");
    maps.advance(2 * HZ);
    assert_eq!(finds_room(40_000..41_000), 1000);
    for port in established {
        goes_on(maps, client(*port));
    }
}

families!(half_closed_flows_yield_after_a_minute = a_table_of_half_closed_flows());

/// Half-closed flows have all source ports of SNAT.
fn source_ports_of_half_closed_flows<F: Net>() {
    let maps = maps::<F>(0);
    maps.edit_config(|config| config.snat = [PortRange::new(2000, 2001), PortRange::default()]);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let opens = |number: u16| {
        let client = (client::<F>().0, 4000 + number);
        let (verdict, _) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
        let flow = live(maps).into_iter().find(|flow| flow.client_port == client.1);
        assert_eq!(verdict, if flow.is_some() { REDIRECT } else { DROP });
        let Some(flow) = flow else { return false };
        let source = (node::<F>(), flow.source_port);
        let fin = Shape { flags: 0x11, ..DATA };
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, source, SYN_ACK));
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, DATA));
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, source, fin));
        true
    };
    assert_eq!([0, 1, 2].map(opens), [true, true, false]);
    maps.advance(61 * HZ);
    assert_eq!([3, 4, 5].map(opens), [true, true, false]);
}

families!(half_closed_flows_give_up_their_source_ports = source_ports_of_half_closed_flows());

/// Flows that are not assured have all source ports of SNAT. One of them has been silent for two seconds; the other one was seen
/// now, or by another CPU one tick later.
fn source_ports_of_half_open_flows<F: Net>(seed: u64, ahead: u32) {
    let maps = maps::<F>(0);
    maps.edit_config(|config| config.snat = [PortRange::new(2000, 2001), PortRange::default()]);
    *at!(maps, random) = seed;
    let opens = move |port| {
        let bytes = packet::<F>((client::<F>().0, port), frontend::<F>(), SYN);
        assert_eq!(run_over(Hook::Ingress, maps, UPLINK, &bytes).0, REDIRECT);
    };
    opens(4000);
    maps.advance(2 * HZ);
    opens(4001);
    let fresh = at!(maps, flows).iter_mut().find(|flow| flow.client_port == 4001).unwrap();
    fresh.last_seen = maps.now().wrapping_add(ahead);
    opens(4002);
    let mut ports: Vec<u16> = live(maps).iter().map(|flow| flow.client_port).collect();
    ports.sort_unstable();
    assert_eq!(ports, [4001, 4002]);
}

#[test]
fn half_open_flow_that_is_silent_gives_up_its_source_port_first() {
    for seed in 1..=20 {
        for ahead in [0, 1] {
            source_ports_of_half_open_flows::<V4>(seed << 32, ahead);
            source_ports_of_half_open_flows::<V6>(seed << 32, ahead);
        }
    }
}

fn few_source_ports<F: Net>() {
    let maps = maps::<F>(0);
    maps.edit_config(|config| config.snat = [PortRange::new(2000, 2001), PortRange::new(3000, 3000)]);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let mut ports = Vec::new();
    for number in 0..5 {
        let client = (client::<F>().0, 4000 + number);
        let (verdict, _) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
        let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0 && flow.client_port == client.1);
        assert_eq!(verdict, if flow.is_some() { REDIRECT } else { DROP });
        let Some(flow) = flow else { continue };
        ports.push(flow.source_port);
        let source = (node::<F>(), flow.source_port);
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, source, SYN_ACK));
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, DATA));
    }
    ports.sort_unstable();
    assert_eq!(ports, [2000, 2001, 3000]);
    assert_eq!(maps.count_of(Reason::SnatPortsExhausted), 2);
}

families!(each_source_port_is_found_and_none_is_given_twice = few_source_ports());

/// Removes the reply key of the only flow, as if a CPU had stopped between adding both keys.
fn lose_reply_key<F: Net>(maps: HostMaps<F>) {
    let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0).unwrap();
    let (bucket, slot) = (flow.positions[1] / (BUCKET_SLOTS + 1), flow.positions[1] % (BUCKET_SLOTS + 1));
    let slot = &mut at!(maps, buckets)[bucket as usize].slots[slot as usize];
    assert_ne!(core::mem::take(slot), 0);
}

fn a_reply_key_that_is_lost<F: Net>() {
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let maps = maps::<F>(BACKEND_LOCAL);
    assert!(connects(maps, client));
    lose_reply_key(maps);
    let reply = packet::<F>(backend, client, DATA);
    let (_, skb) = run_over(Hook::Egress, maps, POD, &reply);
    assert_eq!(skb.wire(), reply);
    // The missing key is noticed after a pause.
    maps.advance(2 * HZ);
    goes_on(maps, client);

    // Another stage looks up the SYN of a connection.
    let maps = super::maps::<F>(BACKEND_LOCAL);
    for _ in 0..2 {
        let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
        assert_eq!(skb.wire(), packet::<F>(client, backend, SYN));
        if maps.stats_of(1).packets == 1 {
            lose_reply_key(maps);
            maps.advance(2 * HZ);
        }
    }
    let (_, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
    assert_eq!(skb.wire(), packet::<F>(frontend, client, SYN_ACK));
    assert_eq!((maps.stats_of(1).connections, maps.connections_to(7)), (1, 1));
}

families!(a_flow_gets_the_key_of_its_replies_again = a_reply_key_that_is_lost());
