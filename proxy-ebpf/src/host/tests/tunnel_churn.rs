//! Many connections by DSR, while the Service's address moves, endpoints join and leave, and nodes lose their flows: counts the
//! connections that reach another endpoint although their own one still serves.

use std::env;

use super::tunnel_chain::{Cluster, ENTRIES, NODES, Table};
use super::*;
use crate::context::MAX_HOPS;

/// Connections that exist at the same time; each node has room for more flows.
const AT_ONCE: usize = 24;
/// Changes, moves and losses of flows during the life of a connection.
const EVENTS: usize = 16;
/// Fewer endpoints never serve.
const FEWEST: usize = 3;

/// A random number generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Packets after a number of changes, and how many of them reached another endpoint.
#[derive(Clone, Copy, Default)]
struct Row {
    packets: u64,
    /// The endpoint's node has the flow, and at most three other endpoints come before it.
    within: u64,
    /// The endpoint's node has the flow, but no kept table leads there, or more endpoints come before it than a packet may visit.
    beyond: u64,
    /// The endpoint's node has lost the flow, too.
    lost: u64,
}

struct Connection {
    client: End<V4>,
    endpoint: usize,
    /// Whether the endpoint's node has lost the flow.
    is_lost: bool,
    /// Whether a packet would not have reached the endpoint's node at some time, if no node on the way had a flow.
    is_beyond: bool,
}

/// Returns the table of the nodes whose endpoints serve: each entry has the first of them in a random order of its own (rendezvous
/// hashing), so that a table changes only where it has to, and depends on nothing else.
fn table_of(serving: &[usize], seed: u64) -> Table {
    std::array::from_fn(|entry| {
        let rank = |node: &&usize| Random(seed ^ ((entry as u64) << 8 | **node as u64) << 20).next();
        serving.iter().max_by_key(rank).map_or(0, |node| *node as u8)
    })
}

/// An endpoint joins, or leaves unless too few would be left. Returns its node, and whether it serves.
fn changed(random: &mut Random, serving: &mut Vec<usize>) -> (usize, bool) {
    let node = random.below(NODES);
    let leaves = serving.contains(&node) && serving.len() > FEWEST;
    serving.retain(|other| *other != node);
    if !leaves {
        serving.push(node);
        serving.sort_unstable();
    }
    (node, !leaves)
}

/// Runs connections from their SYN through [`EVENTS`] events. `loses`: whether nodes lose their flows.
fn lives(mut cluster: Cluster, random: &mut Random, loses: bool, rows: &mut [Row; EVENTS + 1]) -> Cluster {
    let mut serving: Vec<usize> = (0..NODES).collect();
    let seed = random.next();
    cluster = cluster.begin(table_of(&serving, seed));
    let mut first = random.below(NODES);
    let mut connections: Vec<Connection> = (0..AT_ONCE)
        .map(|number| {
            let client = (client::<V4>().0, 4000 + (number * 2048 + random.below(2048)) as u16);
            let (endpoint, _) = cluster.send(first, client, SYN);
            Connection {
                client,
                endpoint: endpoint.expect("a SYN reaches an endpoint"),
                is_lost: false,
                is_beyond: false,
            }
        })
        .collect();
    let mut changes = 0;
    for _ in 0..EVENTS {
        match random.below(if loses { 5 } else { 4 }) {
            0 | 1 => {
                let (node, serves) = changed(random, &mut serving);
                cluster.set_serving(node, serves);
                cluster = cluster.changed_to(table_of(&serving, seed));
                changes += 1;
            }
            2 | 3 => first = random.below(NODES),
            _ => {
                let node = random.below(NODES);
                cluster.wipe(node);
                connections.iter_mut().for_each(|one| one.is_lost |= one.endpoint == node);
            }
        }
        // Connections of an endpoint that has left are not counted any more.
        connections.retain(|one| serving.contains(&one.endpoint));
        connections.retain_mut(|one| {
            let order = cluster.order(one.client);
            one.is_beyond |= !order.iter().take(MAX_HOPS as usize).any(|node| *node == one.endpoint);
            // Some connections are idle meanwhile.
            if random.below(2) == 0 {
                return true;
            }
            let row = &mut rows[changes];
            row.packets += 1;
            let (got, hops) = cluster.send(first, one.client, DATA);
            assert!(hops <= MAX_HOPS);
            if got == Some(one.endpoint) {
                return true;
            }
            let broken = if one.is_lost {
                &mut row.lost
            } else if one.is_beyond {
                &mut row.beyond
            } else {
                &mut row.within
            };
            *broken += 1;
            false
        });
    }
    cluster
}

/// The number of connections: `BALLAST_CONNECTIONS`.
#[test]
fn connections_survive_moves_and_changes() {
    let count = env::var("BALLAST_CONNECTIONS").map_or(20_000, |text| text.parse().expect("a number"));
    for loses in [false, true] {
        let mut rows = [Row::default(); EVENTS + 1];
        let mut random = Random(7);
        let mut cluster = Cluster::new([0; ENTRIES]);
        for _ in 0..count / AT_ONCE / 2 {
            cluster = lives(cluster, &mut random, loses, &mut rows);
        }
        std::println!("nodes lose flows: {loses}");
        for (changes, Row { packets, within, beyond, lost }) in rows.iter().enumerate() {
            std::println!("{changes:2} changes: {packets:9} packets, broken {within} {beyond} {lost}");
        }
        let sum = |of: fn(&Row) -> u64| rows.iter().map(of).sum::<u64>();
        assert!(sum(|row| row.packets) > 0);
        assert_eq!(sum(|row| row.within), 0);
    }
}
