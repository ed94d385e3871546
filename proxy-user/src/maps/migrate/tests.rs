use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

use proptest::collection::vec;
use proptest::prelude::*;
use proxy_common::abi::Plain;
use proxy_common::config::{NodeConfig, PortRange};
use proxy_common::conntrack::{ASSURED, FIN_BACKEND, FIN_CLIENT, RST_BACKEND, SEEN_REPLY, timeout};
use proxy_common::flow::{
    BUCKET_SLOTS, Bucket, FlowEntry, NO_POSITION, STATE_CLAIMED, STATE_DIRECT, STATE_SNAT, STATE_USED,
    buckets_for, buckets_of,
};
use proxy_common::{PROTO_TCP, PROTO_UDP};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::copy::{Copied, copy};
use super::layout::{Current, Layout, Second};
use super::table::{Put, Scope, Sizes, Table};
use super::v2::{self, FlowV2};
use crate::maps::mapping::Mapping;

const HZ: u32 = 250;
const ENTRIES: u32 = 128;
type A4 = [u8; 4];

fn memory<V>(len: u32) -> Mapping {
    let fd = memfd_create("table", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, (size_of::<V>() * len as usize) as u64).unwrap();
    Mapping::new(fd.as_fd(), size_of::<V>(), len as usize).unwrap()
}

fn table<V, L: Layout<A4>>(entries: u32, buckets: u32, seed: u32) -> Table<A4, L> {
    Table::new(memory::<V>(entries), memory::<Bucket>(buckets), Sizes { entries, buckets, seed, hz: HZ })
}

fn second(entries: u32, buckets: u32, seed: u32) -> Table<A4, Second> {
    table::<FlowV2<A4>, _>(entries, buckets, seed)
}

fn current(entries: u32, buckets: u32, seed: u32) -> Table<A4, Current> {
    table::<FlowEntry<A4>, _>(entries, buckets, seed)
}

fn config() -> NodeConfig {
    NodeConfig::new(HZ, 64, 32, 1)
}

fn flow(number: u16, bits: u32) -> FlowEntry<A4> {
    let [high, low] = number.to_be_bytes();
    FlowEntry {
        state: u64::from(STATE_USED | bits),
        client: [10, 0, high, low],
        frontend: [10, 96, 0, 1],
        backend: [10, 1, 0, 1],
        source: [10, 0, high, low],
        client_port: 40_000,
        frontend_port: 80,
        backend_port: 8080,
        source_port: 40_000,
        proto: PROTO_TCP,
        service: 7,
        backend_id: 9,
        created: 1000,
        last_seen: 1000,
        positions: [NO_POSITION; 2],
        ..FlowEntry::default()
    }
}

/// Copies all flows, as if programs had written them.
fn all<F: Layout<A4>, T: Layout<A4>>(from: &mut Table<A4, F>, to: &mut Table<A4, T>) -> Copied {
    from.forget();
    copy(from, to, &config(), Scope::All)
}

/// Returns a flow without what depends on its table: generation, positions, tags and sequence numbers.
fn essence(flow: &FlowEntry<A4>) -> FlowEntry<A4> {
    FlowEntry {
        state: u64::from(flow.bits()),
        positions: [NO_POSITION; 2],
        tags: [0; 2],
        seq: [0; 2],
        ..*flow
    }
}

fn is_found<L: Layout<A4>>(table: &Table<A4, L>, flow: &FlowEntry<A4>) {
    for direction in 0..2 {
        let (index, _) = table.find(&flow.key(direction)).expect("a flow that is not found");
        assert_eq!(essence(&table.flow(index).unwrap()), essence(flow));
    }
}

proptest! {
    #[test]
    fn a_state_of_layout_2_survives_both_ways(state: u8, proto in prop_oneof![Just(PROTO_TCP), Just(PROTO_UDP)], times: [u32; 2]) {
        let [created, last_seen] = times;
        let old = FlowV2::<A4> { proto, state, created, last_seen, ..FlowV2::default() };
        prop_assert_eq!(v2::state_of(v2::to_current(&old, HZ).bits()), state);
    }

    /// Uses as many buckets as programs do for this number of entries: with fewer, both buckets of a key may be full.
    #[test]
    fn every_flow_is_found_in_the_other_table_and_again_in_the_first(
        numbers in vec(any::<u16>(), 0..120), seeds: [u32; 2],
    ) {
        go_there_and_back(&numbers, seeds, buckets_for(ENTRIES))?;
    }
}

/// Uses half of the buckets, with seeds that leave room for all flows: some keys are in their second buckets.
#[test]
fn keys_in_second_buckets_are_found() {
    let numbers: Vec<_> = (0..120).collect();
    let seeds = [3, 7];
    let full = |seed: u32| {
        let mut keys = [0; 32];
        for flow in numbers.iter().map(|number| flow(*number, SEEN_REPLY | ASSURED)) {
            for direction in 0..2 {
                keys[buckets_of(flow.key(direction).hash(seed), 32)[0] as usize] += 1;
            }
        }
        keys.into_iter().any(|keys| keys > BUCKET_SLOTS)
    };
    assert!(seeds.into_iter().any(full), "no key stands in its second bucket");
    go_there_and_back(&numbers, seeds, 32).unwrap();
}

fn go_there_and_back(numbers: &[u16], seeds: [u32; 2], buckets: u32) -> Result<(), TestCaseError> {
    let (mut old, mut new) = (second(ENTRIES, buckets, seeds[0]), current(ENTRIES, buckets, seeds[1]));
    let mut again = second(ENTRIES, buckets, seeds[1]);
    let mut flows = BTreeMap::new();
    for number in numbers {
        let flow = flow(*number, SEEN_REPLY | ASSURED);
        let put = old.put(&flow);
        prop_assert!(matches!(put, Put::Added | Put::Updated), "{:?}", put);
        flows.insert(number, flow);
    }
    let expected = Copied { added: flows.len(), updated: 0, lost: 0 };
    prop_assert_eq!(all(&mut old, &mut new), expected);
    prop_assert_eq!(all(&mut new, &mut again), expected);
    for flow in flows.values() {
        is_found(&old, flow);
        is_found(&new, flow);
        is_found(&again, flow);
    }
    prop_assert_eq!(copy(&mut old, &mut new, &config(), Scope::All), Copied::default());
    Ok(())
}

#[test]
fn flows_keep_the_timeouts_that_they_had() {
    let config = config();
    let bits = |state: u8, proto: u8, lasted: u32| {
        let old =
            FlowV2::<A4> { state: state | v2::FLOW_USED, proto, last_seen: lasted, ..FlowV2::default() };
        v2::to_current(&old, HZ).bits()
    };
    let of = |state: u8| timeout(PROTO_TCP, bits(state, PROTO_TCP, 0), &config);
    assert_eq!(of(0), config.tcp_syn_sent);
    assert_eq!(of(v2::FLOW_REPLIED), config.tcp_established);
    assert_eq!(of(v2::FLOW_REPLIED | v2::FLOW_FIN_CLIENT), config.tcp_close_wait);
    assert_eq!(of(v2::FLOW_REPLIED | v2::FLOW_FIN_CLIENT | v2::FLOW_FIN_BACKEND), config.tcp_time_wait);
    assert_eq!(of(v2::FLOW_REPLIED | v2::FLOW_RESET), config.tcp_close);
    let udp = |state: u8, lasted: u32| timeout(PROTO_UDP, bits(state, PROTO_UDP, lasted), &config);
    assert_eq!(udp(0, 10 * HZ), config.udp);
    assert_eq!(udp(v2::FLOW_REPLIED, HZ), config.udp);
    assert_eq!(udp(v2::FLOW_REPLIED, 10 * HZ), config.udp_stream);
}

#[test]
fn what_changes_is_copied_and_what_is_newer_stays() {
    let (mut old, mut new) = (second(64, 32, 1), current(64, 32, 2));
    let first = flow(1, SEEN_REPLY | ASSURED | STATE_SNAT);
    old.put(&first);
    all(&mut old, &mut new);
    // The client closes, and programs of this layout see it: both tables know it after the next pass.
    let closing = FlowEntry { last_seen: 1010, state: first.state | u64::from(FIN_CLIENT), ..first };
    assert_eq!(new.put(&closing), Put::Updated);
    // A table knows the changes that it made itself; it notices changes by programs by state and time.
    let mut fresh = second(64, 32, 3);
    assert_eq!(copy(&mut old, &mut new, &config(), Scope::All), Copied::default());
    fresh.put(&first);
    assert_eq!(fresh.put(&closing), Put::Updated);
    is_found(&fresh, &closing);
    // A later connection with the same ports.
    let next = FlowEntry { created: 5000, last_seen: 5000, backend_id: 4, ..first };
    assert_eq!(fresh.put(&next), Put::Added);
    is_found(&fresh, &next);
    assert_eq!(fresh.put(&closing), Put::Newer);
    is_found(&fresh, &next);
}

/// Programs take consecutive entries. Between two passes they may take many, if this process has to wait for a CPU.
#[test]
fn one_pass_finds_all_flows_that_have_begun() {
    let (mut from, mut to) =
        (current(ENTRIES, buckets_for(ENTRIES), 1), second(ENTRIES, buckets_for(ENTRIES), 2));
    from.begin_at(0, &flow(0, SEEN_REPLY | ASSURED));
    copy(&mut from, &mut to, &config(), Scope::All);
    (1..100).for_each(|index| from.begin_at(index, &flow(index as u16, SEEN_REPLY | ASSURED)));
    assert_eq!(copy(&mut from, &mut to, &config(), Scope::Hot).added, 99);
    (0..100).for_each(|number| is_found(&to, &flow(number, SEEN_REPLY | ASSURED)));
}

#[test]
fn a_flow_from_the_middle_of_a_connection_gives_way_to_its_beginning() {
    let mut table = current(64, 32, 1);
    let from_its_start = flow(1, SEEN_REPLY);
    let from_the_middle = FlowEntry { created: 1001, backend: [10, 1, 0, 2], ..flow(1, 0) };
    table.put(&from_the_middle);
    assert_eq!(table.put(&from_its_start), Put::Added);
    is_found(&table, &from_its_start);
    assert_eq!(table.put(&from_the_middle), Put::Newer);
    is_found(&table, &from_its_start);
}

#[test]
fn flows_that_are_over_or_have_no_word_are_left_out() {
    let (mut old, mut new) = (current(64, 32, 1), second(64, 32, 2));
    old.put(&flow(1, STATE_DIRECT | SEEN_REPLY));
    old.put(&flow(2, 0));
    // Two minutes later.
    let late = FlowEntry { last_seen: 1000 + 120 * HZ, ..flow(3, SEEN_REPLY | ASSURED) };
    old.put(&late);
    assert_eq!(all(&mut old, &mut new).added, 1);
    is_found(&new, &late);
    assert_eq!(new.find(&flow(1, 0).forward_key()), None);
    assert_eq!(new.find(&flow(2, 0).forward_key()), None);
}

/// The bits of a flow that both ends have closed.
const CLOSED: u32 = STATE_SNAT | SEEN_REPLY | ASSURED | FIN_CLIENT | FIN_BACKEND;

/// Returns a closed flow that has been silent for `silent` seconds when flow 99 of the same table has its last packet.
fn closed(number: u16, silent: u32) -> FlowEntry<A4> {
    FlowEntry { last_seen: 1000 + (100 - silent) * HZ, source_port: 1000 + number, ..flow(number, CLOSED) }
}

fn last() -> FlowEntry<A4> {
    FlowEntry { last_seen: 1000 + 100 * HZ, ..flow(99, SEEN_REPLY | ASSURED) }
}

fn closed_flows_are_copied<F: Layout<A4>, T: Layout<A4>>(mut from: Table<A4, F>, mut to: Table<A4, T>) {
    let (waits, rests) = (closed(1, 5), closed(2, 70));
    let reset = FlowEntry { state: closed(3, 1).state | u64::from(RST_BACKEND), ..closed(3, 1) };
    // Written as by programs: `put` adds no closed flow that is out of quarantine.
    [waits, rests, reset, last()].iter().zip(0..).for_each(|(flow, index)| from.begin_at(index, flow));
    assert_eq!(all(&mut from, &mut to), Copied { added: 2, updated: 0, lost: 0 });
    let index = to.find(&waits.reply_key()).expect("the source port is free").0;
    assert_eq!(
        to.flow(index).unwrap().bits() & (FIN_CLIENT | FIN_BACKEND | STATE_SNAT),
        waits.bits() & !(SEEN_REPLY | ASSURED | STATE_USED)
    );
    assert_eq!(to.find(&waits.forward_key()).map(|(index, _)| index), Some(index));
    for other in [rests, reset] {
        assert_eq!(to.find(&other.reply_key()), None, "{other:?}");
    }
}

/// Programs of the other version must not use a source port whose backend is in `TIME_WAIT`.
#[test]
fn source_ports_in_quarantine_are_so_in_the_other_table() {
    closed_flows_are_copied(
        current(ENTRIES, buckets_for(ENTRIES), 1),
        second(ENTRIES, buckets_for(ENTRIES), 2),
    );
    closed_flows_are_copied(
        second(ENTRIES, buckets_for(ENTRIES), 1),
        current(ENTRIES, buckets_for(ENTRIES), 2),
    );
}

/// The client has opened another connection with the same ports, which has another SNAT port.
#[test]
fn a_closed_flow_is_copied_beside_the_next_one_of_its_client() {
    let (mut from, mut to) = (current(64, 32, 1), second(64, 32, 2));
    let before = closed(1, 5);
    let next = FlowEntry {
        created: 1000 + 99 * HZ,
        source_port: 7,
        last_seen: last().last_seen,
        ..flow(1, STATE_SNAT | SEEN_REPLY | ASSURED)
    };
    // Programs have removed the forward key of the closed flow.
    from.begin_at(0, &before);
    from.begin_at(1, &next);
    assert_eq!(all(&mut from, &mut to).added, 2);
    is_found(&to, &next);
    let (index, _) = to.find(&before.reply_key()).expect("the source port is free");
    assert_eq!(to.flow(index).unwrap().source_port, before.source_port);
}

/// The client has used the same ports several times: the source port of each connection stays in quarantine, whether the
/// flows are copied together or one by one.
#[test]
fn closed_flows_of_one_client_port_all_stay_in_quarantine() {
    let again = |number: u16| FlowEntry {
        created: 1000 + (90 + u32::from(number)) * HZ,
        source_port: 2000 + number,
        ..closed(1, 5 - u32::from(number))
    };
    let flows = [again(1), again(2), again(3)];
    for at_once in [true, false] {
        let (mut from, mut to) = (current(64, 32, 1), second(64, 32, 2));
        for (flow, index) in flows.iter().zip(0..) {
            from.begin_at(index, flow);
            if !at_once {
                all(&mut from, &mut to);
            }
        }
        all(&mut from, &mut to);
        for flow in &flows {
            let found = to.find(&flow.reply_key());
            let (index, _) =
                found.unwrap_or_else(|| panic!("{} is free, at once: {at_once}", flow.source_port));
            assert_eq!(to.flow(index).unwrap().source_port, flow.source_port);
        }
        // The client's next packet belongs to the newest flow.
        let (index, _) = to.find(&flows[2].forward_key()).expect("the newest flow is not found");
        assert_eq!(to.flow(index).unwrap().source_port, flows[2].source_port);
    }
}

#[test]
fn a_closed_flow_takes_nothing_from_others() {
    let mut table = second(8, 8, 1);
    table.begin_pass(last().last_seen);
    for number in 0..7 {
        assert_eq!(table.put(&closed(number, 3)), Put::Added);
    }
    assert_eq!(table.put(&flow(7, 0)), Put::Added);
    assert_eq!(table.put(&closed(8, 3)), Put::Over);
    // Ten seconds before the source ports of the first seven may be used again, and after that.
    table.begin_pass(last().last_seen + 50 * HZ);
    assert_eq!(table.put(&closed(9, 0)), Put::Over);
    table.begin_pass(last().last_seen + 65 * HZ);
    assert_eq!(table.put(&closed(9, 0)), Put::Added);
    // An open connection takes any of these entries.
    assert_eq!(table.put(&flow(10, SEEN_REPLY)), Put::Added);
    is_found(&table, &flow(7, 0));
}

#[test]
fn a_table_that_is_full_gives_way_to_connections_alone() {
    let mut table = current(8, 8, 1);
    for number in 0..8 {
        assert_eq!(table.put(&flow(number, SEEN_REPLY)), Put::Added);
    }
    assert_eq!(table.put(&flow(100, SEEN_REPLY)), Put::NoRoom);
    let mut other = current(8, 8, 1);
    other.put(&flow(101, SEEN_REPLY | ASSURED));
    assert_eq!(all(&mut other, &mut table).added, 1);
    is_found(&table, &flow(101, SEEN_REPLY | ASSURED));
}

#[test]
fn a_claimed_entry_is_nobodys_flow() {
    let flows = memory::<FlowEntry<A4>>(1);
    assert!(<Current as Layout<A4>>::claim(&flows, 0, 0));
    let state = <Current as Layout<A4>>::state(&flows, 0).unwrap();
    assert!(<Current as Layout<A4>>::is_used(state) && <Current as Layout<A4>>::is_claimed(state));
    assert_eq!(state >> 32, 1);
    let flows = memory::<FlowV2<A4>>(1);
    assert!(<Second as Layout<A4>>::claim(&flows, 0, 0));
    let state = <Second as Layout<A4>>::state(&flows, 0).unwrap();
    assert!(<Second as Layout<A4>>::is_used(state) && <Second as Layout<A4>>::is_claimed(state));
    assert_eq!(state >> 32, 1);
    assert!(!<Second as Layout<A4>>::claim(&flows, 0, 0));
    assert_eq!(v2::state_of(STATE_USED | STATE_CLAIMED), v2::FLOW_USED | v2::FLOW_CLAIMED);
}

#[test]
fn the_previous_settings_have_the_upper_source_ports_alone() {
    let settings = v2::config(&config());
    assert_eq!((settings.abi, settings.snat_first, settings.snat_last), (2, 61_000, 65_535));
    let one = NodeConfig { snat: [PortRange::new(5000, 6000), PortRange::default()], ..config() };
    assert_eq!((v2::config(&one).snat_first, v2::config(&one).snat_last), (5000, 6000));
}

/// Both entries can be read from a map.
const fn plain<V: Plain>() {}
const _: () = {
    plain::<FlowV2<[u8; 16]>>();
    plain::<FlowEntry<[u8; 16]>>();
};
