//! Which idle connections move to endpoints that have joined a Service (annotation `ballast.io/rebalance`).
//!
//! A connection moves by a reset: its client connects again, and the algorithm of the Service selects the endpoint, mostly at
//! random. So about half of the connections that left the old endpoints return to them, and further ones follow, until the
//! shares are even. While an endpoint that joined is on trial, nearly all of them return, so those that are open once it has
//! answered may move again. Otherwise, each connection is reset at most once: an endpoint that refuses connections, or a
//! client that opens more of them, causes no further resets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proxy_common::select::Algorithm;

use crate::model::Service;

/// The most connections of a Service port that are reset in a second, as a part of all.
const PER_SECOND: f64 = 0.05;
/// The same while an endpoint still gets only a small share of new connections: most of them would return to the old ones.
const PER_SECOND_ON_TRIAL: f64 = 0.01;
/// An endpoint keeps its connections if it has at most this part more than its share.
const TOLERANCE: f64 = 0.05;

/// Whether a client that connects again may get another endpoint: not with session affinity, nor if its address, or that of the
/// Service, alone selects the endpoint.
pub fn may_move(service: &Service) -> bool {
    let algorithm = service.algorithm.unwrap_or_default();
    service.affinity_secs == 0 && !matches!(algorithm, Algorithm::SourceHash | Algorithm::DestinationHash)
}

/// The connections of one Service port, as one process sees them, that may still move. `I` identifies a connection.
#[derive(Debug)]
pub struct Moves<I> {
    /// Those that were open when the endpoints had joined, without those that were reset.
    open: BTreeSet<I>,
    has_begun: bool,
    /// Whether each endpoint that joined gets its share of new connections, or did at an earlier round.
    have_joined: bool,
    /// How many may be reset now.
    tokens: f64,
    /// How many may leave each endpoint in this round.
    surplus: BTreeMap<u32, u64>,
    random: u64,
}

impl<I: Copy + Ord> Moves<I> {
    /// Creates a state without connections. `seed` makes rounding differ between nodes.
    pub fn new(seed: u64) -> Self {
        let mut new = Self {
            open: BTreeSet::new(),
            has_begun: false,
            have_joined: false,
            tokens: 0.0,
            surplus: BTreeMap::new(),
            random: seed,
        };
        // Nodes with few connections would all reset one in the same second.
        new.tokens = new.next_random();
        new
    }

    /// Begins a round. `shares`: the endpoints that get new connections, each with its share; `connections`: the
    /// open ones, each with its endpoint; `elapsed`: time since the last round; `on_trial`: one of the endpoints gets only a small
    /// share of new connections until it has answered. Returns whether any connection may move.
    pub fn begin_round(
        &mut self,
        shares: &BTreeMap<u32, u32>,
        connections: &[(I, u32)],
        elapsed: Duration,
        on_trial: bool,
    ) -> bool {
        if !self.has_begun || !self.have_joined && !on_trial {
            self.open = connections.iter().map(|(connection, _)| *connection).collect();
        }
        self.has_begun = true;
        self.have_joined |= !on_trial;
        let mut counts = BTreeMap::new();
        connections.iter().for_each(|(_, endpoint)| *counts.entry(*endpoint).or_default() += 1);
        let rate = if on_trial { PER_SECOND_ON_TRIAL } else { PER_SECOND };
        let count = |id: &u32| exact(counts.get(id).copied().unwrap_or(0));
        let total: f64 = shares.keys().map(count).sum();
        let whole: f64 = shares.values().map(|share| f64::from(*share)).sum();
        self.tokens = (self.tokens + total * rate * elapsed.as_secs_f64()).min((total * rate).max(1.0));
        self.surplus.clear();
        for (id, share) in shares {
            let expected = total * f64::from(*share) / whole.max(1.0);
            let more = count(id) - expected;
            if more > TOLERANCE * expected {
                // A node with few connections must not round its part of the cluster's surplus away.
                let rounded = more.floor() + f64::from(u8::from(self.next_random() < more.fract()));
                #[expect(clippy::cast_sign_loss, reason = "it is above a number that is not negative")]
                self.surplus.insert(*id, rounded as u64);
            }
        }
        self.tokens >= 1.0 && !self.open.is_empty() && self.surplus.values().any(|count| *count > 0)
    }

    /// Whether a connection may move in this round, if it is idle.
    pub fn is_candidate(&self, connection: &I, endpoint: u32) -> bool {
        self.tokens >= 1.0
            && self.surplus.get(&endpoint).is_some_and(|count| *count > 0)
            && self.open.contains(connection)
    }

    /// Takes an idle connection; returns whether it is to be reset.
    pub fn take(&mut self, connection: &I, endpoint: u32) -> bool {
        if !self.is_candidate(connection, endpoint) {
            return false;
        }
        self.open.remove(connection);
        self.tokens -= 1.0;
        if let Some(count) = self.surplus.get_mut(&endpoint) {
            *count -= 1;
        }
        true
    }

    /// Returns a random number from 0 to 1 (splitmix64).
    fn next_random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        exact(mixed >> 32) / exact(u64::from(u32::MAX))
    }
}

/// Returns a count as a number that no rounding changes. No node has more connections.
fn exact(count: u64) -> f64 {
    u32::try_from(count).unwrap_or(u32::MAX).into()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Clients with one connection each, on several nodes, whose endpoints are selected at random by weight.
    struct Simulation {
        /// The connections of each node: number and endpoint.
        nodes: Vec<BTreeMap<u64, u32>>,
        shares: BTreeMap<u32, u32>,
        random: Moves<u64>,
        last: u64,
        resets: BTreeMap<u64, u32>,
    }

    impl Simulation {
        fn new(nodes: usize, clients: usize, endpoints: &[u32]) -> Self {
            let shares = (1..).zip(endpoints.iter().copied()).collect();
            let mut new = Self {
                nodes: vec![BTreeMap::new(); nodes],
                shares,
                random: Moves::new(7),
                last: 0,
                resets: BTreeMap::new(),
            };
            for client in 0..clients {
                new.connect(client % nodes);
            }
            new
        }

        fn connect(&mut self, node: usize) {
            let whole: u32 = self.shares.values().sum();
            #[expect(clippy::cast_sign_loss, reason = "it is not negative")]
            let mut at = (self.random.next_random() * f64::from(whole)) as u32;
            let mut chosen = 1;
            for (id, share) in &self.shares {
                chosen = *id;
                if at < *share {
                    break;
                }
                at -= share;
            }
            self.last += 1;
            self.nodes[node].insert(self.last, chosen);
        }

        fn connections(&self, node: usize) -> Vec<(u64, u32)> {
            self.nodes[node].iter().map(|(connection, endpoint)| (*connection, *endpoint)).collect()
        }

        fn counts(node: &BTreeMap<u64, u32>) -> BTreeMap<u32, u64> {
            let mut counts = BTreeMap::new();
            node.values().for_each(|id| *counts.entry(*id).or_default() += 1);
            counts
        }

        /// Runs this many rounds of a second, in each of which one of three connections is busy; returns the most resets of a
        /// round.
        fn run(&mut self, seconds: u32) -> usize {
            let seeds = (0..self.nodes.len() as u64).map(|node| node * 1_000);
            let mut moves: Vec<_> = seeds.map(Moves::new).collect();
            let mut most = 0;
            for _ in 0..seconds {
                let mut resets = 0;
                for (node, moves) in moves.iter_mut().enumerate() {
                    let connections = self.connections(node);
                    moves.begin_round(&self.shares, &connections, Duration::from_secs(1), false);
                    for (connection, endpoint) in connections {
                        let is_idle = self.random.next_random() > 0.33;
                        if is_idle && moves.take(&connection, endpoint) {
                            self.nodes[node].remove(&connection);
                            *self.resets.entry(connection).or_default() += 1;
                            self.connect(node);
                            resets += 1;
                        }
                    }
                }
                most = most.max(resets);
            }
            most
        }

        /// Returns the highest number of connections in relation to the endpoint's share.
        fn imbalance(&self) -> f64 {
            let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
            for (id, count) in self.nodes.iter().flat_map(Self::counts) {
                *counts.entry(id).or_default() += count;
            }
            let (total, whole) =
                (exact(counts.values().sum::<u64>()), f64::from(self.shares.values().sum::<u32>()));
            let of = |(id, share): (&u32, &u32)| {
                exact(counts.get(id).copied().unwrap_or(0)) * whole / (total * f64::from(*share))
            };
            self.shares.iter().map(of).fold(0.0, f64::max)
        }
    }

    #[rstest]
    #[case::one_node(1, &[1; 3], &[1; 6])]
    #[case::ten_nodes(10, &[1; 3], &[1; 6])]
    #[case::three_connections_on_each_node(1000, &[1; 3], &[1; 6])]
    #[case::weights(4, &[1, 2, 1], &[1, 2, 1, 2, 1, 1])]
    #[case::one_joins_five(4, &[1; 5], &[1; 6])]
    fn shares_are_even_a_minute_after_a_scale_out(
        #[case] nodes: usize,
        #[case] before: &[u32],
        #[case] after: &[u32],
    ) {
        let mut simulation = Simulation::new(nodes, 3_000, before);
        simulation.shares = (1..).zip(after.iter().copied()).collect();
        assert!(simulation.imbalance() > 1.15, "{}", simulation.imbalance());
        // Of a minute, some seconds pass until the endpoints have joined.
        let most = simulation.run(50);
        assert!(simulation.imbalance() <= 1.15, "{}", simulation.imbalance());
        assert!(simulation.resets.values().all(|count| *count == 1), "a connection was reset twice");
        assert!(most <= 150.max(nodes), "{most} resets in a second");
    }

    #[test]
    fn endpoint_on_trial_slows_moves() {
        for (on_trial, most) in [(true, 10), (false, 50)] {
            let mut moves = Moves::new(1);
            let connections: Vec<_> = (0..1000).map(|connection| (connection, 1)).collect();
            let shares = BTreeMap::from([(1, 1), (2, 1)]);
            moves.begin_round(&shares, &connections, Duration::from_secs(10), on_trial);
            assert_eq!((0..1000).filter(|connection| moves.take(connection, 1)).count(), most);
        }
    }

    #[test]
    fn even_shares_move_no_connection() {
        let mut simulation = Simulation::new(1, 3_000, &[1; 6]);
        let before = simulation.imbalance();
        simulation.run(120);
        assert!(simulation.resets.len() < 100, "{before}: {} resets", simulation.resets.len());
    }

    #[test]
    fn connections_opened_later_or_to_removed_endpoints_stay() {
        let mut moves = Moves::new(1);
        let shares = [(7, 1), (8, 1)].into();
        let mut connections = vec![(1, 7), (2, 9)];
        moves.begin_round(&shares, &connections, Duration::from_secs(1), false);
        connections.extend((3..103).map(|connection| (connection, 7)));
        assert!(moves.begin_round(&shares, &connections, Duration::from_secs(1), false));
        assert!(!moves.take(&3, 7), "it was opened later");
        assert!(!moves.take(&2, 9), "its endpoint was removed");
        assert!(moves.take(&1, 7) && !moves.take(&1, 7));
        assert!(moves.take(&2, 7));
        assert!(!moves.begin_round(&shares, &connections, Duration::from_secs(1), false), "none is left");
    }

    #[test]
    fn connection_reset_during_trial_moves_once_more() {
        let mut moves = Moves::new(1);
        let shares = [(7, 1), (8, 1)].into();
        let mut is_reset_at = |round: std::ops::Range<u64>, on_trial| {
            let connections: Vec<_> = round.map(|connection| (connection, 7)).collect();
            moves.begin_round(&shares, &connections, Duration::from_secs(20), on_trial);
            connections.iter().any(|(connection, endpoint)| moves.take(connection, *endpoint))
        };
        assert!(is_reset_at(0..100, true));
        assert!(!is_reset_at(100..200, true), "their clients have connected again");
        assert!(is_reset_at(100..200, false));
        assert!(!is_reset_at(200..300, false));
        assert!(!is_reset_at(200..300, true));
        assert!(!is_reset_at(200..300, false), "a second trial does not count");
    }

    #[test]
    fn clients_that_keep_their_endpoint_do_not_move() {
        let of = |affinity_secs, algorithm| {
            let name = crate::model::ServiceName::new("default", "web");
            may_move(&Service { affinity_secs, algorithm, ..Service::new(name) })
        };
        assert!(of(0, None) && of(0, Some(Algorithm::Maglev)) && of(0, Some(Algorithm::LeastConnections)));
        assert!(
            !of(10, None) && !of(0, Some(Algorithm::SourceHash)) && !of(0, Some(Algorithm::DestinationHash))
        );
    }
}
