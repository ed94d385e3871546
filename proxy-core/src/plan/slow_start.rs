//! Slow start: the share of an endpoint that joins a Service grows, so that it can warm up.

use super::{BackendAddress, PortPlan};

/// Number of steps in which a share grows: the first step is a tenth of it, the last one is the whole share.
pub const STEPS: u16 = 10;

/// Sets the current shares of the endpoints of a port. `step_of` returns the step of an endpoint in slow start.
///
/// During slow start, an algorithm without weights is replaced by its weighted form, with equal weights. Algorithms with a
/// Maglev table have no slow start: all nodes have the same table, whenever each node learned of the endpoint.
pub fn apply(port: &mut PortPlan, step_of: impl Fn(&BackendAddress) -> Option<u16>) {
    if port.algorithm.is_hash() || !port.backends.keys().any(|at| step_of(at).is_some()) {
        return;
    }
    let weighted = port.algorithm.weighted();
    let is_even = weighted != port.algorithm;
    port.algorithm = weighted;
    let steps: Vec<u16> = port.backends.keys().map(|at| step_of(at).unwrap_or(STEPS)).collect();
    for (facts, step) in port.backends.values_mut().zip(steps) {
        facts.step = step;
        if is_even {
            facts.weight = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::select::Algorithm;
    use rstest::rstest;

    use super::*;
    use crate::model::SortedMap;
    use crate::plan::{BackendFacts, Changing};

    fn port(algorithm: Algorithm, weights: [u16; 3]) -> PortPlan {
        let backend = |(number, weight): (u8, u16)| {
            let at = BackendAddress { address: [10, 0, 0, number].into(), port: 80 };
            (at, BackendFacts { weight, ..BackendFacts::default() })
        };
        PortPlan {
            frontends: SortedMap::default(),
            backends: (1..).zip(weights).map(backend).collect(),
            tunnels: SortedMap::default(),
            affinity_secs: 0,
            algorithm,
            maglev_outside: false,
            ejects: false,
            no_sockets: false,
            changing: Changing::No,
            rebalances: false,
            reset_after: None,
            source_ranges: [].into(),
        }
    }

    #[rstest]
    #[case::random(Algorithm::Random, Algorithm::Random, [40, 10, 10])]
    #[case::turns(Algorithm::RoundRobin, Algorithm::WeightedRoundRobin, [10, 10, 2])]
    #[case::least_connections(Algorithm::LeastConnections, Algorithm::WeightedLeastConnections, [10, 10, 2])]
    #[case::never_queue(Algorithm::NeverQueue, Algorithm::NeverQueue, [40, 10, 10])]
    #[case::tables_are_the_same_on_all_nodes(Algorithm::Maglev, Algorithm::Maglev, [4, 1, 5])]
    fn a_newcomer_has_a_part_of_its_share(
        #[case] algorithm: Algorithm,
        #[case] expected: Algorithm,
        #[case] shares: [u16; 3],
    ) {
        let mut port = port(algorithm, [4, 1, 5]);
        apply(&mut port, |at| (at.address == std::net::IpAddr::from([10, 0, 0, 3])).then_some(2));
        let found: Vec<u16> = port.backends.values().map(BackendFacts::share).collect();
        assert_eq!((port.algorithm, found.as_slice()), (expected, shares.as_slice()));
    }

    #[test]
    fn without_a_new_endpoint_nothing_changes() {
        let before = port(Algorithm::LeastConnections, [4, 1, 5]);
        let mut after = before.clone();
        apply(&mut after, |_| None);
        assert_eq!(after, before);
    }
}
