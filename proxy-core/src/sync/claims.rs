//! The owner of a frontend that more than one Service port asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::model::net::Protocol;
use crate::model::plural::plural;
use crate::model::problem::MOST_PROBLEMS;
use crate::model::{Name, Problem, SortedMap, pack};
use crate::plan::{Frontend, FrontendKind, Scope, ServicePlan, ServicePortName};

/// The claim of a Service port to a frontend. The lowest claim wins: a cluster address before every other kind, then the
/// older Service, then the name that sorts first. So a Service cannot take over an address by asking for it later
/// (GHSA-q6h5-q3q6-f87x was such a bug elsewhere).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    not_cluster_ip: bool,
    created: i64,
    port: ServicePortName,
}

/// All claims of all Services. A Service port owns an address and port for clients of both scopes.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    /// Sorted claims of each frontend; most frontends have one.
    of_frontends: BTreeMap<Frontend, SortedMap<Claim, ()>>,
    /// The frontends that each Service port asks for and another claim has, and whether they are no cluster addresses.
    lost: BTreeMap<ServicePortName, BTreeSet<(Frontend, bool)>>,
    /// The number of Services with each unmanaged cluster address. Only a cluster address has frontends there: otherwise an
    /// external address of another Service would get the packets that this node or another proxy serves.
    unmanaged: BTreeMap<IpAddr, usize>,
}

impl Claims {
    /// Rebuilds the tree compactly, after many claims were added.
    pub fn pack(&mut self) {
        pack(&mut self.of_frontends);
    }

    /// Returns the Service port that owns the frontend.
    pub fn owner(&self, frontend: &Frontend) -> Option<&ServicePortName> {
        let first = self.of_frontends.get(&any_scope(frontend))?.keys().next()?;
        (!self.is_unmanaged(frontend, first)).then_some(&first.port)
    }

    fn is_unmanaged(&self, frontend: &Frontend, claim: &Claim) -> bool {
        claim.not_cluster_ip && self.unmanaged.contains_key(&frontend.address)
    }

    /// Returns the first claim to each frontend at this address.
    fn at(&self, address: IpAddr) -> impl Iterator<Item = (&Frontend, &Claim)> {
        let first = Frontend { address, port: 0, protocol: Protocol::Tcp, scope: Scope::Internal };
        let claims =
            self.of_frontends.range(first..).take_while(move |(frontend, _)| frontend.address == address);
        claims.filter_map(|(frontend, claims)| Some((frontend, claims.keys().next()?)))
    }

    /// Counts a change of the Services that have this unmanaged address.
    fn set_unmanaged(&mut self, address: IpAddr, is_new: bool, touched: &mut BTreeSet<ServicePortName>) {
        let count = self.unmanaged.entry(address).or_default();
        *count = if is_new { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            self.unmanaged.remove(&address);
        }
        touched.extend(self.at(address).map(|(_, claim)| claim.port.clone()));
    }

    /// Replaces the claims of one Service; adds the Service ports that won or lost a frontend to `touched`. Returns whether
    /// problems may have changed.
    pub fn replace(
        &mut self,
        old: Option<&ServicePlan>,
        new: Option<&ServicePlan>,
        touched: &mut BTreeSet<ServicePortName>,
    ) -> bool {
        let addresses = |plan: Option<&ServicePlan>| -> BTreeSet<IpAddr> {
            plan.into_iter().flat_map(|plan| plan.unmanaged.keys()).copied().collect()
        };
        let (were, are) = (addresses(old), addresses(new));
        were.difference(&are).for_each(|address| self.set_unmanaged(*address, false, touched));
        are.difference(&were).for_each(|address| self.set_unmanaged(*address, true, touched));
        let (old, new) = (claims(old), claims(new));
        let mut was_contested = were != are;
        for (frontend, claim) in old.difference(&new) {
            was_contested |= self.is_contested(frontend);
            self.remove(frontend, claim, touched);
        }
        for (frontend, claim) in new.difference(&old) {
            self.insert(frontend, claim, touched);
            was_contested |= self.is_contested(frontend);
        }
        was_contested
    }

    fn is_contested(&self, frontend: &Frontend) -> bool {
        let claims = self.of_frontends.get(frontend);
        claims.is_some_and(|claims| claims.len() > 1) || self.unmanaged.contains_key(&frontend.address)
    }

    fn insert(&mut self, frontend: &Frontend, claim: &Claim, touched: &mut BTreeSet<ServicePortName>) {
        let claims = self.of_frontends.entry(*frontend).or_default();
        let before = claims.keys().next().cloned();
        claims.insert(claim.clone(), ());
        let owner = claims.keys().next().cloned();
        let loser = if owner.as_ref() == Some(claim) { &before } else { &Some(claim.clone()) };
        if let Some(loser) = loser {
            self.lost.entry(loser.port.clone()).or_default().insert((*frontend, loser.not_cluster_ip));
        }
        touched.extend([before, owner].into_iter().flatten().map(|claim| claim.port));
    }

    fn remove(&mut self, frontend: &Frontend, claim: &Claim, touched: &mut BTreeSet<ServicePortName>) {
        let Some(claims) = self.of_frontends.get_mut(frontend) else { return };
        let before = claims.keys().next().cloned();
        claims.remove(claim);
        let owner = claims.keys().next().cloned();
        let loser = if before.as_ref() == Some(claim) { &owner } else { &Some(claim.clone()) };
        if let Some(loser) = loser
            && let Some(lost) = self.lost.get_mut(&loser.port)
        {
            lost.remove(&(*frontend, loser.not_cluster_ip));
            if lost.is_empty() {
                self.lost.remove(&loser.port);
            }
        }
        if claims.is_empty() {
            self.of_frontends.remove(frontend);
        }
        touched.extend([before, owner].into_iter().flatten().map(|claim| claim.port));
    }

    /// Returns the problems of the claims that lost: the first ones of each Service, and how many more it has.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        let mut services: BTreeMap<(&Name, &Name), (usize, Vec<Problem>)> = BTreeMap::new();
        let lost =
            self.lost.iter().flat_map(|(port, lost)| lost.iter().map(move |(frontend, _)| (port, frontend)));
        let first = self.unmanaged.keys().flat_map(|address| self.at(*address));
        let unmanaged =
            first.filter(|(_, claim)| claim.not_cluster_ip).map(|(frontend, claim)| (&claim.port, frontend));
        for (port, frontend) in lost.chain(unmanaged) {
            let (count, listed) = services.entry((&port.namespace, &port.name)).or_default();
            *count += 1;
            if listed.len() < MOST_PROBLEMS {
                listed.push(self.problem(port, frontend));
            }
        }
        services.into_iter().flat_map(|((namespace, name), (count, mut listed))| {
            let more = count - listed.len();
            if more > 0 {
                let message = format!("{} taken by other Services", plural(more, "more frontend"));
                listed.push(problem(namespace, name, message));
            }
            listed
        })
    }

    fn problem(&self, port: &ServicePortName, frontend: &Frontend) -> Problem {
        let Frontend { address, port: number, protocol, .. } = frontend;
        let message = match self.owner(frontend) {
            Some(owner) => format!(
                "{address} port {number} ({protocol}) is already used by {}; {} gets it when that Service port releases it",
                owner.text(),
                port.text()
            ),
            None => format!(
                "{address} port {number} ({protocol}) is not served for {}: the address is the ClusterIP of another Service, which \
                 this node itself or another proxy serves",
                port.text()
            ),
        };
        problem(&port.namespace, &port.name, message)
    }
}

fn problem(namespace: &Name, name: &Name, message: String) -> Problem {
    Problem { object: format!("Service {namespace}/{name}"), field: "spec".to_owned(), message }
}

const fn any_scope(frontend: &Frontend) -> Frontend {
    Frontend { scope: Scope::Internal, ..*frontend }
}

fn claims(plan: Option<&ServicePlan>) -> BTreeSet<(Frontend, Claim)> {
    let Some(plan) = plan else { return BTreeSet::new() };
    let of_port = |(port, port_plan): (&ServicePortName, &crate::plan::PortPlan)| {
        let claim = |(frontend, what): (&Frontend, &crate::plan::FrontendPlan)| {
            let not_cluster_ip = what.kind != FrontendKind::ClusterIp;
            (any_scope(frontend), Claim { not_cluster_ip, created: plan.created, port: port.clone() })
        };
        port_plan.frontends.iter().map(claim).collect::<Vec<_>>()
    };
    plan.ports.iter().flat_map(of_port).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Unmanaged;
    use crate::testing::generator::service;

    #[test]
    fn service_that_lost_many_frontends_has_few_problems() {
        let many = |of: &str, created| {
            let (_, plan) = service(of, 1, [1]);
            let mut plan = ServicePlan { created, ..plan.unwrap() };
            let port = plan.ports.values_mut().next().unwrap();
            let (first, what) = port.frontends.iter().next().map(|(at, what)| (*at, what.clone())).unwrap();
            for number in 0..1000 {
                port.frontends.insert(Frontend { port: number, ..first }, what.clone());
            }
            plan
        };
        let (old, new, newest) = (many("old", 1), many("new", 2), many("newest", 3));
        let mut claims = Claims::default();
        for plan in [&newest, &old, &new] {
            claims.replace(None, Some(plan), &mut BTreeSet::new());
        }
        let messages = |claims: &Claims, of: &str| -> Vec<String> {
            let problems =
                claims.problems().filter(|problem| problem.object == format!("Service default/{of}"));
            problems.map(|problem| problem.message).collect()
        };
        for of in ["new", "newest"] {
            let listed = messages(&claims, of);
            assert_eq!(listed.len(), MOST_PROBLEMS + 1);
            assert!(listed[0].contains("is already used by default/old:http"), "{}", listed[0]);
            assert_eq!(listed[MOST_PROBLEMS], "984 more frontends taken by other Services");
        }
        claims.replace(Some(&old), None, &mut BTreeSet::new());
        assert_eq!(
            (messages(&claims, "new").len(), messages(&claims, "newest").len()),
            (0, MOST_PROBLEMS + 1)
        );
        claims.replace(Some(&newest), None, &mut BTreeSet::new());
        assert_eq!(claims.problems().count(), 0);
    }

    #[test]
    fn external_ip_at_unmanaged_address_has_no_frontend() {
        let plan = |kind| {
            let (_, plan) = service("a", 1, [1]);
            let mut plan = plan.unwrap();
            plan.ports
                .values_mut()
                .flat_map(|port| port.frontends.values_mut())
                .for_each(|what| what.kind = kind);
            plan
        };
        let frontend =
            |plan: &ServicePlan| *plan.ports.values().next().unwrap().frontends.keys().next().unwrap();
        let external = plan(FrontendKind::ExternalIp);
        let at = frontend(&external);
        let dns = ServicePlan { unmanaged: [(at.address, Unmanaged::Own)].into(), ..ServicePlan::default() };
        let mut claims = Claims::default();
        claims.replace(None, Some(&external), &mut BTreeSet::new());
        assert!(claims.owner(&at).is_some());
        let mut touched = BTreeSet::new();
        assert!(claims.replace(None, Some(&dns), &mut touched));
        assert_eq!((claims.owner(&at), touched.len(), claims.problems().count()), (None, 1, 1));
        // A second Service with the address, as with another address family's copy, changes nothing.
        claims.replace(None, Some(&dns), &mut BTreeSet::new());
        claims.replace(Some(&dns), None, &mut BTreeSet::new());
        assert_eq!(claims.owner(&at), None);
        let mut touched = BTreeSet::new();
        assert!(claims.replace(Some(&dns), None, &mut touched));
        assert_eq!((claims.owner(&at).is_some(), touched.len(), claims.problems().count()), (true, 1, 0));
        claims.replace(None, Some(&dns), &mut BTreeSet::new());
        let cluster = plan(FrontendKind::ClusterIp);
        claims.replace(Some(&external), Some(&cluster), &mut BTreeSet::new());
        assert_eq!((claims.owner(&at).is_some(), claims.problems().count()), (true, 0));
    }
}
