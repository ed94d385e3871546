//! The new frontends: connections to the same address and port may be older.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use proxy_common::service::SERVICE_RECENT;

use super::timed::Timed;
use proxy_core::model::ServiceName;
use proxy_core::plan::{Frontend, FrontendKind, ServicePlan};

/// How long a frontend is new: an older connection may be idle as long (kube-proxy's default of `conntrack.tcpEstablishedTimeout`).
const HOLD: Duration = Duration::from_hours(24);

/// Until when frontends of Services are new.
#[derive(Debug, Default)]
pub(super) struct Recent {
    until: Timed<BTreeMap<Frontend, Instant>>,
}

impl Recent {
    /// Marks the frontends of the plan that are new, apart from those at cluster addresses: `flags` returns the bits of a frontend
    /// that the maps have. `is_first`: the Service had no plan before, so that an earlier agent may have marked them.
    pub(super) fn apply(
        &mut self,
        name: &ServiceName,
        plan: Option<&mut ServicePlan>,
        is_first: bool,
        flags: impl Fn(&Frontend) -> Option<u16>,
        now: Instant,
    ) {
        let mut known = self.until.remove(name).unwrap_or_default();
        known.retain(|_, until| now < *until);
        let mut recent = BTreeMap::new();
        let ports = plan.into_iter().flat_map(|plan| plan.ports.values_mut());
        for (frontend, plan) in ports.flat_map(|port| port.frontends.iter_mut()) {
            let is_new = || flags(frontend).is_none_or(|flags| is_first && flags & SERVICE_RECENT != 0);
            let until = known.get(frontend).copied().or_else(|| is_new().then_some(now + HOLD));
            plan.recent = plan.kind != FrontendKind::ClusterIp && until.is_some();
            if plan.recent {
                recent.extend(until.map(|until| (*frontend, until)));
            }
        }
        if !recent.is_empty() {
            let times: BTreeSet<_> = recent.values().copied().collect();
            self.until.set(name, recent, times.into_iter().collect::<Vec<_>>());
        }
    }

    /// Returns the time at which the next frontend is no longer new.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.until.wake()
    }

    /// Starts a planning: returns the Services with a frontend that is no longer new.
    pub(super) fn begin(&mut self, now: Instant) -> Vec<ServiceName> {
        self.until.take_due(now)
    }
}
