//! Which cluster addresses live: at a port that no Service has, clients are refused there, while packets to
//! addresses that nobody has are dropped (kube-proxy's nftables mode).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use proxy_common::service::{KIND_ADDRESS, SCOPE_INTERNAL, ServiceEntry};

use super::job::{Job, Steps};
use super::reconcile::{Failure, Reconciler, pause};
use super::trouble::Trouble;
use crate::maps::{FrontendKey, Store, Write};
use crate::model::ServiceName;
use crate::plan::{Problem, ServicePlan};

/// The addresses and whose they are.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    live: BTreeMap<IpAddr, BTreeSet<ServiceName>>,
    /// Those whose entries may have to change.
    dirty: BTreeSet<IpAddr>,
    failure: Option<Failure>,
}

impl Addresses {
    /// Replaces the addresses of one Service.
    pub(super) fn replace(
        &mut self,
        name: &ServiceName,
        old: Option<&ServicePlan>,
        new: Option<&ServicePlan>,
    ) {
        for address in old.into_iter().flat_map(|plan| &plan.addresses) {
            self.dirty.insert(*address);
            if let Some(owners) = self.live.get_mut(address) {
                owners.remove(name);
                if owners.is_empty() {
                    self.live.remove(address);
                }
            }
        }
        for address in new.into_iter().flat_map(|plan| &plan.addresses) {
            self.dirty.insert(*address);
            self.live.entry(*address).or_default().insert(name.clone());
        }
    }

    /// What failed, if anything did.
    pub(super) fn problem(&self) -> Option<Problem> {
        self.failure.as_ref().map(|failure| failure.problem.clone())
    }

    /// When to try again what failed.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.failure.as_ref().map(|failure| failure.retry)
    }

    fn wanted(&self, address: IpAddr) -> Option<ServiceEntry> {
        self.live.contains_key(&address).then(|| entry(address))
    }
}

/// The key that stands for an address.
const fn key(addr: IpAddr) -> FrontendKey {
    FrontendKey { addr, port: 0, proto: 0, scope: SCOPE_INTERNAL }
}

fn entry(address: IpAddr) -> ServiceEntry {
    ServiceEntry { tag: key(address).tag(), kind: KIND_ADDRESS, ..ServiceEntry::default() }
}

/// Whether the key stands for an address, and not for a port of it.
pub(super) const fn is_address(key: &FrontendKey) -> bool {
    key.port == 0 && key.proto == 0 && key.scope == SCOPE_INTERNAL
}

impl<S: Store> Reconciler<S> {
    /// Makes the entries say which addresses live.
    pub(super) fn bring_addresses(&mut self, now: Instant, freed: bool) {
        if self.full {
            let known = self.applied.services.keys().filter(|key| is_address(key)).map(|key| key.addr);
            self.addresses.dirty.extend(known);
            self.addresses.dirty.extend(self.addresses.live.keys());
        }
        if self.addresses.retry().is_some_and(|retry| now < retry) && !freed && !self.full {
            return;
        }
        let (mut steps, mut jobs, mut asked) = (Steps::default(), Vec::new(), Vec::new());
        for address in std::mem::take(&mut self.addresses.dirty) {
            let wanted = self.addresses.wanted(address);
            if self.applied.services.get(&key(address)) == wanted.as_ref() {
                continue;
            }
            let write =
                wanted.map_or(Write::NoService(key(address)), |entry| Write::Service(key(address), entry));
            steps.push(jobs.len(), write);
            jobs.push(Job::cleanup());
            asked.push(address);
        }
        self.execute(&steps, &mut jobs, true, now);
        let attempts = self.addresses.failure.take().map_or(0, |failure| failure.attempts);
        for (address, job) in asked.into_iter().zip(jobs) {
            let Some(trouble) = job.trouble else { continue };
            self.addresses.dirty.insert(address);
            let problem = self.address_problem(address, &trouble);
            self.addresses.failure.get_or_insert(Failure {
                attempts: attempts + 1,
                retry: now + pause(attempts),
                problem,
            });
        }
    }

    /// Takes entries of addresses away where the frontends of these jobs would find no room: an address that is
    /// dropped at unknown ports, where it should be refused, is better than a Service that nobody reaches.
    pub(super) fn make_room(&mut self, jobs: &[Job], now: Instant) {
        for v6 in [false, true] {
            let wanted = jobs.iter().filter(|job| !job.stopped).flat_map(|job| job.wanted.iter());
            let keys = wanted.flat_map(|wanted| wanted.frontends.iter().map(|(key, ..)| key));
            let is_new =
                |key: &&FrontendKey| key.addr.is_ipv6() == v6 && !self.applied.services.contains_key(*key);
            let new = keys.filter(is_new).collect::<BTreeSet<_>>().len();
            let six = self.applied.services6;
            let used = if v6 { six } else { self.applied.services.len() - six };
            let excess = (used + new).saturating_sub(self.store.capacity().frontends as usize);
            let has = self.applied.services.keys().rev();
            let victims = has.filter(|key| is_address(key) && key.addr.is_ipv6() == v6).take(excess);
            let victims: Vec<_> = victims.copied().collect();
            if victims.is_empty() {
                continue;
            }
            let mut steps = Steps::default();
            for key in &victims {
                steps.push(0, Write::NoService(*key));
            }
            self.execute(&steps, &mut [Job::cleanup()], true, now);
            let problem = self.address_problem(victims[0].addr, &Trouble::Addresses);
            let attempts = self.addresses.failure.take().map_or(0, |failure| failure.attempts);
            self.addresses.dirty.extend(victims.iter().map(|key| key.addr));
            let retry = now + pause(attempts);
            self.addresses.failure = Some(Failure { attempts: attempts + 1, retry, problem });
        }
    }

    fn address_problem(&self, address: IpAddr, trouble: &Trouble) -> Problem {
        let owner = self.addresses.live.get(&address).and_then(BTreeSet::first);
        Problem {
            object: owner.map_or_else(|| format!("address {address}"), |name| format!("Service {name}")),
            field: "spec.clusterIPs".to_owned(),
            message: format!("ports of {address} that no Service has are not refused: {}", trouble.text()),
        }
    }
}
