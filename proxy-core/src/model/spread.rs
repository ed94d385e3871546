//! How a Service selects endpoints, from its objects and the settings: algorithms and weights.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proxy_common::select::Algorithm;

use super::{Endpoint, Name};

/// The highest weight of an endpoint.
pub const MOST_WEIGHT: u16 = 100;

/// The endpoints to which an entry of a weight annotation applies. Earlier variants take precedence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightOf {
    /// The endpoint with this address.
    Address(IpAddr),
    /// The endpoints whose `nodeName` is this name.
    Node(Name),
    /// The endpoints in the zone of this name.
    Zone(Name),
    /// All other endpoints.
    All,
}

/// Weights by address, node and zone, from 0 to [`MOST_WEIGHT`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights(pub BTreeMap<WeightOf, u16>);

impl Weights {
    /// Returns the weight of an endpoint; `None` if no entry applies to it.
    pub fn of(&self, endpoint: &Endpoint) -> Option<u16> {
        if self.0.is_empty() {
            return None;
        }
        let by_node = endpoint.node.clone().map(WeightOf::Node);
        let by_zone = endpoint.zone.clone().map(WeightOf::Zone);
        let keys = [Some(WeightOf::Address(endpoint.address)), by_node, by_zone, Some(WeightOf::All)];
        keys.into_iter().flatten().find_map(|key| self.0.get(&key).copied())
    }
}

/// Returns the algorithm of a name: that of IPVS, `random`, or `maglev`.
pub fn algorithm(name: &str) -> Option<Algorithm> {
    match name {
        "maglev" => Some(Algorithm::Maglev),
        _ => Algorithm::ALL.iter().copied().find(|algorithm| algorithm.label() == name),
    }
}

/// Returns the names of all algorithms: `random, rr, ...`.
pub fn algorithm_names() -> String {
    let name = |algorithm: &Algorithm| match algorithm {
        Algorithm::Maglev => format!("{} (or maglev)", algorithm.label()),
        _ => algorithm.label().to_owned(),
    };
    Algorithm::ALL.iter().map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_has_a_name_that_finds_it() {
        for (number, one) in Algorithm::ALL.iter().enumerate() {
            assert_eq!(
                (algorithm(one.label()), Algorithm::from_number(number as u8)),
                (Some(*one), Some(*one))
            );
        }
        assert_eq!(algorithm("maglev"), Some(Algorithm::Maglev));
        assert_eq!([algorithm("lblc"), algorithm("")], [None, None]);
    }

    #[test]
    fn the_narrowest_entry_counts() {
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let mut endpoint = Endpoint::new(address);
        assert_eq!(Weights::default().of(&endpoint), None);
        let mut weights = Weights([(WeightOf::Zone("a".into()), 3)].into());
        assert_eq!(weights.of(&endpoint), None);
        endpoint.zone = Some("a".into());
        endpoint.node = Some("n1".into());
        assert_eq!(weights.of(&endpoint), Some(3));
        for (key, weight) in
            [(WeightOf::All, 3), (WeightOf::Node("n1".into()), 5), (WeightOf::Address(address), 7)]
        {
            weights.0.insert(key, if weight == 3 { 9 } else { weight });
            assert_eq!(weights.of(&endpoint), Some(weight));
        }
        assert_eq!(weights.of(&Endpoint::new("10.0.0.2".parse().unwrap())), Some(9));
    }
}
