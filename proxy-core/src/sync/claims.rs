//! The owner of a frontend that more than one Service port asks for.

use std::collections::{BTreeMap, BTreeSet};

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
    claims: BTreeMap<Frontend, SortedMap<Claim, ()>>,
    /// The frontends that each Service port asks for and another claim has, and whether they are no cluster addresses.
    lost: BTreeMap<ServicePortName, BTreeSet<(Frontend, bool)>>,
}

impl Claims {
    /// Rebuilds the tree compactly, after many claims were added.
    pub fn pack(&mut self) {
        pack(&mut self.claims);
    }

    /// Returns the Service port that owns the frontend.
    pub fn owner(&self, frontend: &Frontend) -> Option<&ServicePortName> {
        self.claims.get(&any_scope(frontend))?.keys().next().map(|claim| &claim.port)
    }

    /// Replaces the claims of one Service; adds the Service ports that won or lost a frontend to `touched`. Returns whether
    /// problems may have changed.
    pub fn replace(
        &mut self,
        old: Option<&ServicePlan>,
        new: Option<&ServicePlan>,
        touched: &mut BTreeSet<ServicePortName>,
    ) -> bool {
        let (old, new) = (claims(old), claims(new));
        let mut was_contested = false;
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
        self.claims.get(frontend).is_some_and(|claims| claims.len() > 1)
    }

    fn insert(&mut self, frontend: &Frontend, claim: &Claim, touched: &mut BTreeSet<ServicePortName>) {
        let claims = self.claims.entry(*frontend).or_default();
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
        let Some(claims) = self.claims.get_mut(frontend) else { return };
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
            self.claims.remove(frontend);
        }
        touched.extend([before, owner].into_iter().flatten().map(|claim| claim.port));
    }

    /// Returns the problems of the claims that lost: the first ones of each Service, and how many more it has.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        let mut services: BTreeMap<(&Name, &Name), (usize, Vec<Problem>)> = BTreeMap::new();
        for (port, lost) in &self.lost {
            let (count, listed) = services.entry((&port.namespace, &port.name)).or_default();
            *count += lost.len();
            let left = MOST_PROBLEMS - listed.len();
            listed.extend(lost.iter().take(left).map(|(frontend, _)| self.problem(port, frontend)));
        }
        services.into_iter().flat_map(|((namespace, name), (count, mut listed))| {
            let more = count - listed.len();
            if more > 0 {
                let message = format!("{more} more frontends are already used by other Services");
                listed.push(problem(namespace, name, message));
            }
            listed
        })
    }

    fn problem(&self, port: &ServicePortName, frontend: &Frontend) -> Problem {
        let owner = self.owner(frontend).map(ServicePortName::text).unwrap_or_default();
        let message = format!(
            "{} port {} ({}) is already used by {owner}; {} gets it when that Service port releases it",
            frontend.address,
            frontend.port,
            frontend.protocol,
            port.text()
        );
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
            assert_eq!(listed[MOST_PROBLEMS], "984 more frontends are already used by other Services");
        }
        claims.replace(Some(&old), None, &mut BTreeSet::new());
        assert_eq!(
            (messages(&claims, "new").len(), messages(&claims, "newest").len()),
            (0, MOST_PROBLEMS + 1)
        );
        claims.replace(Some(&newest), None, &mut BTreeSet::new());
        assert_eq!(claims.problems().count(), 0);
    }
}
