//! The difference between two readings of the counters.

use std::collections::{BTreeMap, BTreeSet};

use proxy_common::reason::{Reason, Verdict};
use proxy_common::stats::ServiceStats;

use super::{Counters, EndpointRates, Rates, ReasonRate, ServiceRates, Traffic};
use crate::maps::view::{BackendRow, BackendState, NameRow};

impl Rates {
    /// Computes the rates from `before` to `after`.
    ///
    /// A Service port or endpoint that is not in `before` has the rate 0, because its counter may have belonged to another
    /// one until then. A counter that decreased was created again in between, and counts from 0.
    pub fn between(before: Option<&Counters>, after: &Counters) -> Self {
        Self::of(&Step::new(before, after, false))
    }

    /// As [`Rates::between`], without frontends and endpoints, from two [`Counters::read_totals`]. A removed Service port
    /// is included, with the rate 0, until its name is removed.
    pub fn of_totals(before: Option<&Counters>, after: &Counters) -> Self {
        Self::of(&Step::new(before, after, true))
    }

    fn of(step: &Step<'_>) -> Self {
        let services = step.services();
        let sum = |of: fn(&Traffic) -> f64| services.iter().map(|service| of(&service.rates)).sum();
        let total = Traffic {
            connections: sum(|rates| rates.connections),
            packets: sum(|rates| rates.packets),
            bytes: sum(|rates| rates.bytes),
            // This includes refusals of packets that belong to no Service.
            failures: step
                .reasons()
                .filter(|row| row.verdict != Verdict::Pass.label())
                .map(|row| row.rate)
                .sum(),
        };
        let reasons = step.reasons().collect();
        Self { seconds: step.seconds, total, services, reasons, flows: step.after.flows.live() }
    }
}

fn seconds(before: &Counters, after: &Counters) -> f64 {
    after.at.saturating_sub(before.at).as_secs_f64()
}

struct Step<'a> {
    before: Option<&'a Counters>,
    after: &'a Counters,
    seconds: f64,
    /// Only names and their counters were read.
    only_totals: bool,
}

impl<'a> Step<'a> {
    fn new(before: Option<&'a Counters>, after: &'a Counters, only_totals: bool) -> Self {
        let seconds = before.map_or(0.0, |before| seconds(before, after));
        Self { before, after, seconds, only_totals }
    }
}

impl Step<'_> {
    /// Returns the rate per second; 0 without an earlier value or without elapsed time.
    fn rate(&self, before: Option<u64>, after: u64) -> f64 {
        match before {
            Some(before) if self.seconds > 0.0 => float(grown(before, after)) / self.seconds,
            _ => 0.0,
        }
    }

    fn services(&self) -> Vec<ServiceRates> {
        let mut endpoints: BTreeMap<u32, Vec<EndpointRates>> = BTreeMap::new();
        for (id, row) in &self.after.snapshot.backends {
            endpoints.entry(row.service).or_default().extend(self.endpoint(*id, row));
        }
        let mut refused = self.refused();
        let mut frontends: BTreeMap<u32, (BTreeSet<_>, &'static str)> = BTreeMap::new();
        for row in &self.after.snapshot.frontends {
            frontends.entry(row.service).or_insert((BTreeSet::new(), row.algorithm)).0.insert(row.socket());
        }
        let names = &self.after.snapshot.names;
        let mut services: Vec<_> = names
            .iter()
            .filter_map(|(id, name)| {
                let (addresses, endpoints) = (frontends.remove(id), endpoints.remove(id));
                let mut endpoints = endpoints.unwrap_or_default();
                if !self.only_totals && addresses.is_none() && endpoints.is_empty() {
                    // The Service port was removed; its name stays while its id is in quarantine.
                    return None;
                }
                let (addresses, algorithm) = addresses.unwrap_or_default();
                endpoints.sort_by_key(|row| row.address);
                share(&mut endpoints);
                let failures = refused.remove(id).unwrap_or_default();
                let service = ServiceRates {
                    id: *id,
                    service: name.to_string(),
                    protocol: name.protocol.to_string(),
                    family: name.family.to_string(),
                    frontends: addresses.into_iter().collect(),
                    algorithm,
                    rates: Traffic { failures: failures.values().sum(), ..self.traffic(*id, name) },
                    connections: Self::stats(self.after, *id).connections,
                    failures,
                    endpoints,
                };
                Some((name, service))
            })
            .collect();
        services.sort_by(|(one, a), (other, b)| (one, a.id).cmp(&(other, b.id)));
        services.into_iter().map(|(_, service)| service).collect()
    }

    fn stats(counters: &Counters, id: u32) -> ServiceStats {
        counters.snapshot.service_stats.get(&id).copied().unwrap_or_default()
    }

    /// Returns the earlier counters of the same Service port.
    fn stats_before(&self, id: u32, name: &NameRow) -> Option<ServiceStats> {
        let before = self.before.filter(|before| before.snapshot.names.get(&id) == Some(name))?;
        Some(Self::stats(before, id))
    }

    fn traffic(&self, id: u32, name: &NameRow) -> Traffic {
        let (before, after) = (self.stats_before(id, name), Self::stats(self.after, id));
        let rate = |of: fn(&ServiceStats) -> u64| self.rate(before.as_ref().map(of), of(&after));
        Traffic {
            connections: rate(|stats| stats.connections),
            packets: rate(|stats| stats.packets) + rate(|stats| stats.reply_packets),
            bytes: rate(|stats| stats.bytes) + rate(|stats| stats.reply_bytes),
            failures: 0.0,
        }
    }

    /// Returns refusals and drops per second, by Service port. A missing earlier entry counts as 0: the map has no entry
    /// before the first refusal.
    fn refused(&self) -> BTreeMap<u32, BTreeMap<&'static str, f64>> {
        let mut rates: BTreeMap<u32, BTreeMap<_, _>> = BTreeMap::new();
        let Some(before) = self.before else { return rates };
        let is_failure = |reason: &Reason| reason.verdict() != Verdict::Pass;
        for ((id, reason), count) in &self.after.snapshot.refusals {
            let same = before.snapshot.names.get(id) == self.after.snapshot.names.get(id);
            let known = before.snapshot.refusals.get(&(*id, *reason)).copied().unwrap_or_default();
            let rate = self.rate(Some(known), *count);
            if same && is_failure(reason) && rate > 0.0 {
                rates.entry(*id).or_default().insert(reason.label(), rate);
            }
        }
        rates
    }

    /// Returns the rates of an endpoint; `None` for a removed endpoint without open connections.
    fn endpoint(&self, id: u32, row: &BackendRow) -> Option<EndpointRates> {
        let after = &self.after.snapshot;
        let same = |before: &&Counters| {
            let known = before.snapshot.backends.get(&id);
            known.is_some_and(|known| (known.service, known.socket) == (row.service, row.socket))
        };
        let before = self.before.filter(same);
        let total = after.backend_stats.get(&id).copied().unwrap_or_default();
        let known = before.map(|before| before.snapshot.backend_stats.get(&id).copied().unwrap_or_default());
        let is_by_load = after.by_load.contains(&row.service);
        let open = after.open_connections.get(&id).copied().filter(|_| is_by_load);
        let is_gone = row.state != BackendState::Active;
        (!is_gone || open.is_some_and(|open| open > 0)).then(|| EndpointRates {
            id,
            address: row.socket,
            state: match row.state {
                BackendState::Active if row.terminating => "terminating",
                state => state.label(),
            },
            local: row.local,
            weight: row.weight,
            connections: self.rate(known, total),
            share: None,
            ejected_seconds: after.ejected.get(&id).copied(),
            on_trial: self.after.on_trial.contains(&id),
            total,
            open,
        })
    }

    fn reasons(&self) -> impl Iterator<Item = ReasonRate> {
        let met = self.after.reasons.iter().filter(|(_, count)| **count > 0);
        met.map(|(reason, count)| ReasonRate {
            reason: reason.label(),
            verdict: reason.verdict().label(),
            explanation: reason.explanation().trim_start(),
            advice: reason.advice(),
            rate: self.rate(self.before.map(|b| b.reasons.get(reason).copied().unwrap_or_default()), *count),
            total: *count,
        })
    }
}

/// Returns the increase of a counter. A counter that decreased was created again, unless it was so large that it may have
/// wrapped at 64 bits.
fn grown(before: u64, after: u64) -> u64 {
    if after >= before || before > u64::MAX / 2 { after.wrapping_sub(before) } else { after }
}

/// Sets each endpoint's share of the new connections.
fn share(endpoints: &mut [EndpointRates]) {
    let all: f64 = endpoints.iter().map(|row| row.connections).sum();
    for row in endpoints.iter_mut().filter(|_| all > 0.0) {
        row.share = Some(row.connections / all);
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate is shown with three digits")]
fn float(count: u64) -> f64 {
    count as f64
}
