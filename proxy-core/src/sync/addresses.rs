//! The entries of cluster addresses as such. At an undefined port of an address with a Service, clients are refused;
//! packets to addresses without a Service are dropped (as in kube-proxy's nftables mode). Unmanaged addresses are left
//! alone, because another proxy serves them or the node itself has them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use proxy_common::service::{KIND_ADDRESS, KIND_UNMANAGED, SCOPE_INTERNAL, ServiceEntry};

use super::applied::is_address;
use super::job::{Failure, Job, Owner, Steps, SyncError};
use super::writer::Writer;
use crate::model::Problem;
use crate::model::problem::chain;
use crate::model::{ServiceName, SortedSet, pack};
use crate::plan::{ServicePlan, Unmanaged};
use crate::store::{FrontendKey, Store, Write};

/// The Services that have each address.
type Owners = BTreeMap<IpAddr, SortedSet<ServiceName>>;

/// The cluster addresses and their Services.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    live: Owners,
    /// Unmanaged addresses.
    unmanaged: Owners,
    /// Services that another proxy serves.
    foreign: BTreeSet<ServiceName>,
    /// Addresses whose entries may have to change.
    dirty: BTreeSet<IpAddr>,
    failure: Option<Failure>,
    /// The failure of the sync before this one.
    before: Option<Failure>,
    /// Whether this sync writes entries; it does not before the retry of a failure.
    is_due: bool,
}

/// When entries of addresses are written, in relation to the frontends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Entries are removed, and addresses become unmanaged.
    BeforePorts,
    /// All entries: one that refuses clients at undefined ports is written after the frontends of its address.
    AfterPorts,
}

impl Addresses {
    /// Rebuilds the tree compactly, after many addresses were added.
    pub(super) fn pack(&mut self) {
        pack(&mut self.live);
    }

    /// Replaces the addresses of one Service.
    pub(super) fn replace(
        &mut self,
        name: &ServiceName,
        old: Option<&ServicePlan>,
        new: Option<&ServicePlan>,
    ) {
        let is_foreign = |plan: &ServicePlan| plan.unmanaged.values().any(|why| *why == Unmanaged::Foreign);
        if let Some(plan) = old {
            plan.addresses.iter().for_each(|address| leave(&mut self.live, address, name));
            plan.unmanaged.keys().for_each(|address| leave(&mut self.unmanaged, address, name));
            self.dirty.extend(plan.addresses.iter().chain(plan.unmanaged.keys()));
            self.foreign.remove(name);
        }
        if let Some(plan) = new {
            let join = |owners: &mut Owners, address: &IpAddr| {
                owners.entry(*address).or_default().insert(name.clone());
            };
            plan.addresses.iter().for_each(|address| join(&mut self.live, address));
            plan.unmanaged.keys().for_each(|address| join(&mut self.unmanaged, address));
            self.dirty.extend(plan.addresses.iter().chain(plan.unmanaged.keys()));
            if is_foreign(plan) {
                self.foreign.insert(name.clone());
            }
        }
        let known = old.map(|plan| &plan.unmanaged);
        for (address, why) in new.into_iter().flat_map(|plan| &plan.unmanaged) {
            if known.and_then(|known| known.get(address)) != Some(why) && *why == Unmanaged::Own {
                tracing::info!(service = %name, %address, "unmanaged address: this node has it");
            }
        }
    }

    /// Returns the number of Services that other proxies serve.
    pub(super) fn foreign(&self) -> usize {
        self.foreign.len()
    }

    /// Returns the problem of the last failure, if there is one.
    pub(super) fn problem(&self) -> Option<Problem> {
        self.failure.as_ref().map(|failure| failure.problem.clone())
    }

    /// Returns the time of the retry after a failure.
    pub(super) fn retry(&self) -> Option<Instant> {
        self.failure.as_ref().map(|failure| failure.retry)
    }

    fn wanted(&self, address: IpAddr) -> Option<ServiceEntry> {
        // An address with a served Service is managed, even if it is also unmanaged for another Service.
        let kinds = [(&self.live, KIND_ADDRESS), (&self.unmanaged, KIND_UNMANAGED)];
        let found = kinds.into_iter().find(|(owners, _)| owners.contains_key(&address));
        found.map(|(_, kind)| entry(address, kind))
    }

    fn owner(&self, address: IpAddr) -> Option<&ServiceName> {
        self.live.get(&address).or_else(|| self.unmanaged.get(&address)).and_then(SortedSet::first)
    }
}

/// Removes a Service from the owners of an address.
fn leave(owners: &mut Owners, address: &IpAddr, name: &ServiceName) {
    if let Some(names) = owners.get_mut(address) {
        names.remove(name);
        if names.is_empty() {
            owners.remove(address);
        }
    }
}

/// Returns the key that stands for an address as such.
const fn key(addr: IpAddr) -> FrontendKey {
    FrontendKey { addr, port: 0, proto: 0, scope: SCOPE_INTERNAL }
}

fn entry(address: IpAddr, kind: u8) -> ServiceEntry {
    ServiceEntry { tag: key(address).tag(), kind, ..ServiceEntry::default() }
}

impl Addresses {
    /// Writes the entries of addresses that differ. `full`: checks all addresses. `freed`: space was freed, so a failure is
    /// retried at once.
    pub(super) fn reconcile<S: Store>(
        &mut self,
        writer: &mut Writer<S>,
        turn: Turn,
        now: Instant,
        full: bool,
        freed: bool,
    ) {
        if full && turn == Turn::BeforePorts {
            let known = writer.applied.services.keys().filter(|key| is_address(key)).map(|key| key.addr);
            self.dirty.extend(known);
            self.dirty.extend(self.live.keys());
            self.dirty.extend(self.unmanaged.keys());
        }
        if turn == Turn::BeforePorts {
            self.is_due = freed || full || self.retry().is_none_or(|retry| retry <= now);
            if self.is_due {
                self.before = self.failure.take();
            }
        }
        if !self.is_due {
            return;
        }
        let (mut steps, mut jobs, mut asked) = (Steps::default(), Vec::new(), Vec::new());
        for address in std::mem::take(&mut self.dirty) {
            let wanted = self.wanted(address);
            let refuses = wanted.as_ref().is_some_and(|entry| entry.kind == KIND_ADDRESS);
            if refuses && turn == Turn::BeforePorts {
                self.dirty.insert(address);
                continue;
            }
            if writer.applied.services.get(&key(address)) == wanted.as_ref() {
                continue;
            }
            let write =
                wanted.map_or(Write::NoService(key(address)), |entry| Write::Service(key(address), entry));
            steps.push(jobs.len(), write);
            jobs.push(Job::new(Owner::NoPort));
            asked.push(address);
        }
        writer.execute(&steps, &mut jobs, true, now);
        for (address, job) in asked.into_iter().zip(jobs) {
            let Some(cause) = job.cause else { continue };
            self.dirty.insert(address);
            if self.failure.is_none() {
                let problem = self.problem_of(address, &cause);
                self.failure = Some(Failure::after(self.before.as_ref(), problem, now));
            }
        }
        // The entries that made room may be back.
        if turn == Turn::AfterPorts && self.dirty.is_empty() {
            self.failure = None;
        }
    }

    /// Removes entries of addresses if the frontends of these jobs would not fit: dropping packets to undefined ports of an
    /// address, instead of refusing them, is better than a Service that no client reaches.
    pub(super) fn make_room<S: Store>(&mut self, writer: &mut Writer<S>, jobs: &[Job], now: Instant) {
        for v6 in [false, true] {
            let applied = &writer.applied;
            let wanted = jobs.iter().filter(|job| !job.stopped).flat_map(|job| job.wanted.iter());
            let keys = wanted.flat_map(|wanted| wanted.frontends.iter().map(|(key, ..)| key));
            let is_new =
                |key: &&FrontendKey| key.addr.is_ipv6() == v6 && !applied.services.contains_key(*key);
            let new = keys.filter(is_new).collect::<BTreeSet<_>>().len();
            let six = applied.services6;
            let used = if v6 { six } else { applied.services.len() - six };
            let excess = (used + new).saturating_sub(writer.store.capacity().frontends as usize);
            // Keep the entries of unmanaged addresses: without them, the programs drop the packets to another proxy's
            // Service.
            let is_victim = |(key, entry): &(&FrontendKey, &ServiceEntry)| {
                is_address(key) && key.addr.is_ipv6() == v6 && entry.kind == KIND_ADDRESS
            };
            let has = applied.services.iter().rev();
            let victims: Vec<_> = has.filter(is_victim).map(|(key, _)| *key).take(excess).collect();
            let Some(first) = victims.first() else { continue };
            let mut steps = Steps::default();
            for key in &victims {
                steps.push(0, Write::NoService(*key));
            }
            writer.write_without_port(&steps, now);
            let problem = self.problem_of(first.addr, &SyncError::Addresses);
            self.dirty.extend(victims.iter().map(|key| key.addr));
            self.failure = Some(Failure::after(self.failure.as_ref().or(self.before.as_ref()), problem, now));
        }
    }

    fn problem_of(&self, address: IpAddr, cause: &SyncError) -> Problem {
        let effect = match self.wanted(address) {
            Some(entry) if entry.kind == KIND_UNMANAGED => {
                format!("packets to the unmanaged address {address} are dropped")
            }
            _ => format!("connections to undefined ports of {address} are not refused"),
        };
        let owner = self.owner(address);
        Problem {
            object: owner.map_or_else(|| format!("address {address}"), |name| format!("Service {name}")),
            field: "spec.clusterIPs".to_owned(),
            message: format!("{effect}: {}", chain(cause)),
        }
    }
}
