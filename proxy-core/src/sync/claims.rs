//! The owner of a frontend that more than one Service port asks for.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Problem, SortedMap, pack};
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
    contested: BTreeSet<Frontend>,
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

    /// Replaces the claims of one Service; adds the Service ports that won or lost a frontend to `touched`.
    pub fn replace(
        &mut self,
        old: Option<&ServicePlan>,
        new: Option<&ServicePlan>,
        touched: &mut BTreeSet<ServicePortName>,
    ) {
        let (old, new) = (claims(old), claims(new));
        for (frontend, claim) in old.difference(&new) {
            self.change(frontend, touched, |claims| {
                claims.remove(claim);
            });
        }
        for (frontend, claim) in new.difference(&old) {
            self.change(frontend, touched, |claims| {
                claims.insert(claim.clone(), ());
            });
        }
    }

    fn change(
        &mut self,
        frontend: &Frontend,
        touched: &mut BTreeSet<ServicePortName>,
        change: impl FnOnce(&mut SortedMap<Claim, ()>),
    ) {
        let claims = self.claims.entry(*frontend).or_default();
        touched.extend(claims.keys().next().map(|claim| claim.port.clone()));
        change(claims);
        touched.extend(claims.keys().next().map(|claim| claim.port.clone()));
        if claims.len() > 1 {
            self.contested.insert(*frontend);
        } else {
            self.contested.remove(frontend);
        }
        if claims.is_empty() {
            self.claims.remove(frontend);
        }
    }

    /// Returns a problem for every claim that lost.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        self.contested.iter().filter_map(|frontend| self.claims.get_key_value(frontend)).flat_map(
            |(frontend, claims)| {
                let owner = claims.keys().next().map(|claim| claim.port.text()).unwrap_or_default();
                claims.keys().skip(1).map(move |Claim { port, .. }| Problem {
                    object: format!("Service {}/{}", port.namespace, port.name),
                    field: "spec".to_owned(),
                    message: format!(
                        "{} port {} ({}) is already used by {owner}; {} gets it when that Service port releases it",
                        frontend.address,
                        frontend.port,
                        frontend.protocol,
                        port.text()
                    ),
                })
            },
        )
    }
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
