//! Model checking of connection tracking: loom runs the source of the programs on its own atomics, in all orders in which
//! several CPUs may execute it, up to a bound on preemptions.

mod cpu;
mod memory;
mod words;

use cpu::{Connection, Left, Size, data, explore, found, lose_reply_key, remove, syn, touch};
use memory::Model;
use proxy_common::conntrack::{RST_CLIENT, SEEN_REPLY, SEQ_CLIENT, is_closed, tcp};
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY, STATE_COUNTS, STATE_SYN, STATE_USED};

use crate::context::Tuple;
use crate::env::Node as _;

const X: Connection = Connection::new(100, 96, 2);
/// The same client port as X, to another frontend with the same backend: the same reply key.
const Y: Connection = Connection::new(100, 97, 2);
/// Like X, but another backend was selected.
const X_ELSEWHERE: Connection = Connection::new(100, 96, 3);
/// Shares no key with the other flows.
const Z: Connection = Connection::new(200, 96, 3);
const BUCKETS: u32 = 2;
const SMALL: Size = Size { entries: 3, buckets: BUCKETS };
/// Jiffies at which flows of jiffies 1 have expired.
const LATE: u32 = 1_000_000;
/// Jiffies at which flows of jiffies 1 may be evicted, but have not expired.
const SOON: u32 = 300;

fn to(flow: &Left) -> Tuple<[u32; 1]> {
    Tuple::to_backend(&flow.reply)
}

#[test]
fn two_cpus_that_begin_one_flow_end_up_with_one() {
    explore::<_, 4, 2>(
        SMALL,
        2,
        2,
        |_| (),
        [|m| syn(m, X), |m| syn(m, X)],
        |outcomes, left| {
            assert_eq!(left.len(), 1);
            assert_eq!(outcomes, [Some(to(&left[0])); 2]);
        },
    );
}

#[test]
fn two_cpus_that_begin_one_flow_with_different_backends_end_up_with_one() {
    explore::<_, 4, 2>(
        SMALL,
        2,
        2,
        |_| (),
        [|m| syn(m, X), |m| syn(m, X_ELSEWHERE)],
        |outcomes, left| {
            assert_eq!(left.len(), 1);
            assert_eq!(outcomes, [Some(to(&left[0])); 2]);
        },
    );
}

#[test]
fn two_flows_with_one_reply_key_get_different_source_ports() {
    explore::<_, 4, 2>(
        SMALL,
        2,
        2,
        |_| (),
        [|m| syn(m, X), |m| syn(m, Y)],
        |outcomes, left| {
            assert_eq!(left.len(), 2);
            for (outcome, wanted) in outcomes.into_iter().zip([X, Y]) {
                let own = left.iter().find(|flow| flow.forward == wanted.key()).unwrap();
                assert_eq!(outcome, Some(to(own)));
            }
        },
    );
}

#[test]
fn a_flow_that_begins_in_the_entry_of_another_has_its_own_keys() {
    const ONE: Size = Size { entries: 1, buckets: BUCKETS };
    let before = |m| assert!(syn(m, X).is_some());
    explore::<_, 4, 2>(ONE, 2, LATE, before, [|m| syn(m, Z), |m| data(m, X)], |outcomes, left| {
        // The new flow finds no free entry while the reader removes the expired flow.
        assert_eq!(outcomes, [left.first().map(to), None]);
    });
    explore::<_, 4, 2>(ONE, 2, LATE, before, [|m| syn(m, Z), |m| syn(m, X)], |outcomes, left| {
        let [flow] = left else { panic!("one of the two finds room: {left:?}") };
        assert!(outcomes.contains(&Some(to(flow))));
    });
}

fn begin_z(maps: Model<4>) {
    syn(maps, Z);
}

#[test]
fn a_change_of_state_never_lands_on_the_next_flow() {
    const ONE: Size = Size { entries: 1, buckets: BUCKETS };
    let before = |m| assert!(syn(m, X).is_some());
    let check = |_, left: &[Left]| {
        let [flow] = left else { panic!("{left:?}") };
        if flow.forward == Z.key() {
            assert_eq!(flow.bits, STATE_USED | STATE_COUNTS | STATE_SYN | SEQ_CLIENT);
        } else {
            assert_ne!(flow.bits & (RST_CLIENT | SEEN_REPLY), 0, "it was not evicted, and the change counts");
        }
    };
    explore::<(), 4, 2>(ONE, 2, SOON, before, [begin_z, |m| touch(m, X, tcp::RST, DIRECTION_FORWARD)], check);
    explore::<(), 4, 2>(
        ONE,
        2,
        SOON,
        before,
        [begin_z, |m| touch(m, X, tcp::SYN | tcp::ACK, DIRECTION_REPLY)],
        check,
    );
}

#[test]
fn a_reader_gets_its_own_flow_or_none() {
    const ONE: Size = Size { entries: 1, buckets: BUCKETS };
    let before = |m| assert!(syn(m, X).is_some());
    explore::<_, 4, 2>(ONE, 2, SOON, before, [|m| syn(m, X_ELSEWHERE), |m| data(m, X)], |outcomes, _| {
        let flows = [X, X_ELSEWHERE].map(|flow| Tuple::to_backend(&flow.reply()));
        assert!(outcomes[1].is_none_or(|to| flows.contains(&to)));
    });
    explore::<_, 4, 2>(ONE, 2, SOON, before, [|m| syn(m, Z), |m| data(m, X)], |outcomes, _| {
        assert!(outcomes[1].is_none_or(|to| to == Tuple::to_backend(&X.reply())));
    });
    explore::<_, 4, 2>(ONE, 2, SOON, before, [|m| syn(m, Z), |m| data(m, Z)], |outcomes, _| {
        assert!(outcomes[1].is_none_or(|to| to == Tuple::to_backend(&Z.reply())));
    });
}

#[test]
fn a_flow_that_is_removed_twice_leaves_the_new_one_alone() {
    let before = |m| assert!(syn(m, X).is_some());
    explore::<_, 4, 3>(
        SMALL,
        1,
        2,
        before,
        [
            |m| {
                remove(m, X);
                None
            },
            |m| {
                remove(m, X);
                None
            },
            |m| syn(m, X_ELSEWHERE),
        ],
        |outcomes, left| {
            assert!(left.len() <= 1);
            assert!(outcomes[2].is_some());
        },
    );
}

#[test]
fn a_lost_key_is_repaired_for_its_own_flow_only() {
    const ONE: Size = Size { entries: 1, buckets: BUCKETS };
    let before = |m| assert!(syn(m, X).is_some());
    let repair = |m: Model<4>| {
        if let Some(flow) = found(m, &X.key()) {
            flow.repair_reply_key(crate::env::Node::time(m).unwrap());
        }
    };
    explore::<(), 4, 2>(ONE, 2, SOON, before, [begin_z, repair], |_, left| {
        assert!(left.len() <= 1);
    });
}

/// Like X, with SNAT.
const W: Connection = Connection { snat: true, ..X };

#[test]
fn flow_whose_ends_close_at_the_same_moment_is_closed() {
    let before = |m| {
        assert!(syn(m, X).is_some());
        touch(m, X, tcp::SYN | tcp::ACK, DIRECTION_REPLY);
        touch(m, X, tcp::ACK, DIRECTION_FORWARD);
    };
    let actions: [fn(Model<4>); 2] = [
        |m| touch(m, X, tcp::FIN | tcp::ACK, DIRECTION_FORWARD),
        |m| touch(m, X, tcp::FIN | tcp::ACK, DIRECTION_REPLY),
    ];
    explore::<(), 4, 2>(SMALL, 3, SOON, before, actions, |_, left| {
        let [flow] = left else { panic!("{left:?}") };
        assert!(is_closed(flow.bits), "{:#x}", flow.bits);
    });
}

fn begin_x(maps: Model<4>) {
    assert!(syn(maps, X).is_some());
}

fn end_x(maps: Model<4>) {
    remove(maps, X);
}

fn answer_x(maps: Model<4>) {
    touch(maps, X, tcp::SYN | tcp::ACK, DIRECTION_REPLY);
}

fn reset_x(maps: Model<4>) {
    touch(maps, X, tcp::RST, DIRECTION_FORWARD);
}

/// Adds the reply key again; the second time if another CPU has just updated the flow.
fn repair_x(maps: Model<4>) {
    for _ in 0..2 {
        if let Some(flow) = found(maps, &X.key()) {
            flow.repair_reply_key(maps.time().unwrap());
        }
    }
}

fn expire(maps: Model<4>, wanted: Connection) {
    if let Some(flow) = found(maps, &wanted.key()) {
        flow.expire();
    }
}

/// The entry does not stay claimed if another CPU updates the flow at the same time: see [`explore`].
#[test]
fn a_flow_is_removed_beside_an_update() {
    explore::<(), 4, 2>(SMALL, 3, 2, begin_x, [end_x, answer_x], |_, left| assert!(left.len() <= 1));
    explore::<(), 4, 3>(SMALL, 2, 2, begin_x, [end_x, answer_x, begin_x], |_, left| {
        assert!(left.len() <= 1, "{left:?}");
    });
}

#[test]
fn a_key_is_repaired_beside_an_update() {
    let before = |maps| {
        begin_x(maps);
        lose_reply_key(maps, X);
    };
    explore::<(), 4, 2>(SMALL, 3, SOON, before, [repair_x, repair_x], |_, left| assert_eq!(left.len(), 1));
    explore::<(), 4, 2>(SMALL, 3, SOON, before, [repair_x, reset_x], |_, left| assert_eq!(left.len(), 1));
}

#[test]
fn a_flow_expires_beside_an_update() {
    explore::<(), 4, 2>(SMALL, 3, 2, begin_x, [|m| expire(m, X), answer_x], |_, left| {
        assert!(left.len() <= 1);
    });
    let close = |maps: Model<4>| {
        assert!(syn(maps, W).is_some());
        touch(maps, W, tcp::SYN | tcp::ACK, DIRECTION_REPLY);
        touch(maps, W, tcp::FIN | tcp::ACK, DIRECTION_FORWARD);
        touch(maps, W, tcp::FIN | tcp::ACK, DIRECTION_REPLY);
    };
    let late = |maps| touch(maps, W, tcp::RST, DIRECTION_REPLY);
    explore::<(), 4, 2>(SMALL, 3, 2, close, [|m| expire(m, W), late], |_, left| assert!(left.len() <= 1));
}
