//! The IPsec policies of the kernel, as far as the maps have room.

use std::collections::BTreeMap;

use ipnet::IpNet;
use proxy_common::node::IPSEC_POLICIES;

use crate::model::IpsecPolicy;
use crate::model::net::IpFamily;

/// Returns policies by family that include all of `policies`, at most [`IPSEC_POLICIES`] of each family. If there are more,
/// neighbours are combined: for packets that no policy concerns, the kernel's route is slower, and as right.
pub(super) fn combine<'a>(
    policies: impl Iterator<Item = &'a IpsecPolicy>,
) -> BTreeMap<IpFamily, Vec<IpsecPolicy>> {
    let mut families: BTreeMap<_, Vec<IpsecPolicy>> = BTreeMap::new();
    for policy in policies {
        families.entry(IpFamily::of(policy.dst.addr())).or_default().push(*policy);
    }
    for found in families.values_mut() {
        found.sort_unstable_by_key(|policy| (policy.dst, policy.src));
        found.dedup_by(|one, other| includes(other, one));
        while found.len() > IPSEC_POLICIES {
            let both = |at: usize| both(&found[at], &found[at + 1]);
            let width = |policy: &IpsecPolicy| {
                u16::from(policy.src.prefix_len()) + u16::from(policy.dst.prefix_len())
            };
            let narrowest = (0..found.len() - 1).max_by_key(|at| width(&both(*at)));
            let Some(at) = narrowest else { break };
            found[at] = both(at);
            found.remove(at + 1);
            let combined = found[at];
            found.retain(|policy| *policy == combined || !includes(&combined, policy));
        }
    }
    families
}

fn includes(outer: &IpsecPolicy, inner: &IpsecPolicy) -> bool {
    outer.src.contains(&inner.src) && outer.dst.contains(&inner.dst)
}

/// Returns the narrowest policy that includes both.
fn both(one: &IpsecPolicy, other: &IpsecPolicy) -> IpsecPolicy {
    let net = |one: IpNet, other: IpNet| {
        let mut outer = one;
        while !outer.contains(&other) {
            match outer.supernet() {
                Some(wider) => outer = wider,
                None => break,
            }
        }
        outer
    };
    IpsecPolicy { src: net(one.src, other.src), dst: net(one.dst, other.dst) }
}

#[cfg(test)]
mod tests {
    use ipnet::{Ipv4Net, Ipv6Net};
    use proptest::prelude::*;

    use super::*;

    fn net() -> impl Strategy<Value = Ipv4Net> {
        (any::<u32>(), 0u8..=32).prop_map(|(bits, length)| Ipv4Net::new(bits.into(), length).unwrap().trunc())
    }

    proptest! {
        #[test]
        fn every_policy_is_included(pairs in prop::collection::vec((net(), net()), 0..60)) {
            let all: Vec<_> =
                pairs.into_iter().map(|(src, dst)| IpsecPolicy { src: src.into(), dst: dst.into() }).collect();
            let six: IpNet = Ipv6Net::default().into();
            let six = IpsecPolicy { src: six, dst: six };
            let combined = combine(all.iter().chain([&six]));
            prop_assert_eq!(&combined[&IpFamily::V6], &vec![six]);
            let four = combined.get(&IpFamily::V4).cloned().unwrap_or_default();
            prop_assert!(four.len() <= IPSEC_POLICIES);
            for policy in &all {
                prop_assert!(four.iter().any(|outer| includes(outer, policy)), "{policy:?}");
            }
        }
    }

    #[test]
    fn a_mesh_of_nodes_stays_within_its_ranges() {
        let node: IpNet = "172.30.0.11/32".parse().unwrap();
        let others = (0..200u8).flat_map(|other| {
            [format!("172.30.0.{other}/32"), format!("10.244.{other}.0/24")].map(|dst| dst.parse().unwrap())
        });
        let all: Vec<_> = others.map(|dst| IpsecPolicy { src: node, dst }).collect();
        let ranges: [IpNet; 2] = ["172.30.0.0/24", "10.244.0.0/16"].map(|range| range.parse().unwrap());
        for IpsecPolicy { src, dst } in &combine(all.iter())[&IpFamily::V4] {
            assert!(*src == node && ranges.iter().any(|range| range.contains(dst)), "{src} {dst}");
        }
    }
}
