//! Whether this node takes part in direct server return (DSR): it then needs the addresses of all nodes, and accepts packets
//! that they encapsulate.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use proxy_core::model::ServiceName;
use proxy_core::plan::ServicePlan;

/// Time between two looks for flows that began with DSR, after the last Service with DSR is gone.
const PERIOD: Duration = Duration::from_mins(10);

/// The Services with DSR, and the time of the next look for their last flows.
#[derive(Debug)]
pub(super) struct DsrUse {
    services: BTreeSet<ServiceName>,
    is_always: bool,
    is_needed: bool,
    /// `None`: a Service has DSR, or none had it.
    next_check: Option<Instant>,
}

impl DsrUse {
    /// Begins with the state of the maps: after a restart, flows may be left. `is_always`: the operator wants it, whatever the
    /// Services are.
    pub(super) fn new(is_always: bool, is_needed: bool, now: Instant) -> Self {
        let next_check = (is_needed && !is_always).then(|| now + PERIOD);
        Self { services: BTreeSet::new(), is_always, is_needed: is_needed || is_always, next_check }
    }

    /// Whether a Service has DSR, a flow that began with it may be left, or the operator wants it.
    pub(super) const fn is_needed(&self) -> bool {
        self.is_needed
    }

    /// Returns the time of the next look for flows.
    pub(super) const fn next_check(&self) -> Option<Instant> {
        self.next_check
    }

    /// Takes new plans; looks for flows if that is due. Returns whether the need has changed.
    pub(super) fn update(
        &mut self,
        plans: &BTreeMap<ServiceName, Option<ServicePlan>>,
        has_flows: impl FnOnce() -> bool,
        now: Instant,
    ) -> bool {
        for (name, plan) in plans {
            if plan.as_ref().is_some_and(ServicePlan::has_dsr) {
                self.services.insert(name.clone());
            } else {
                self.services.remove(name);
            }
        }
        let before = self.is_needed;
        if self.is_always {
            return false;
        }
        if !self.services.is_empty() {
            self.is_needed = true;
            self.next_check = None;
        } else if self.is_needed {
            let at = *self.next_check.get_or_insert(now + PERIOD);
            if at <= now {
                self.is_needed = has_flows();
                self.next_check = self.is_needed.then(|| now + PERIOD);
            }
        }
        self.is_needed != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_core::model::net::{IpFamily, Protocol};
    use proxy_core::plan::{Frontend, FrontendKind, FrontendPlan, Scope};
    use proxy_core::testing::generator;

    fn plans(dsr: bool) -> BTreeMap<ServiceName, Option<ServicePlan>> {
        let (name, plan) = generator::service("a", 1, [1]);
        let mut plan = plan.unwrap();
        let at = Frontend {
            address: [0, 0, 0, 0].into(),
            port: 30_080,
            protocol: Protocol::Tcp,
            scope: Scope::Internal,
        };
        let id = plan.ports.keys().next().unwrap().clone();
        assert_eq!(id.family, IpFamily::V4);
        let what = FrontendPlan { dsr, ..FrontendPlan::new(FrontendKind::NodePort) };
        plan.ports.get_mut(&id).unwrap().frontends.insert(at, what);
        [(name, Some(plan))].into()
    }

    #[test]
    fn the_need_ends_with_the_last_flow() {
        let start = Instant::now();
        let mut dsr = DsrUse::new(false, false, start);
        let none = BTreeMap::new();
        assert!(!dsr.update(&plans(false), || unreachable!(), start) && !dsr.is_needed());
        assert!(dsr.update(&plans(true), || unreachable!(), start) && dsr.is_needed());
        assert!(!dsr.update(&none, || unreachable!(), start + 3 * PERIOD) && dsr.next_check().is_none());
        let gone = start + 3 * PERIOD;
        assert!(!dsr.update(&plans(false), || unreachable!(), gone) && dsr.is_needed());
        assert_eq!(dsr.next_check(), Some(gone + PERIOD));
        assert!(!dsr.update(&none, || true, gone + PERIOD) && dsr.is_needed(), "a flow is left");
        assert!(dsr.update(&none, || false, gone + 2 * PERIOD) && !dsr.is_needed());
        assert_eq!(dsr.next_check(), None);
    }

    #[test]
    fn the_operators_wish_needs_no_service_and_never_ends() {
        let start = Instant::now();
        let mut dsr = DsrUse::new(true, false, start);
        assert!(dsr.is_needed() && dsr.next_check().is_none());
        for plans in [plans(true), plans(false)] {
            assert!(!dsr.update(&plans, || unreachable!(), start + 3 * PERIOD) && dsr.is_needed());
        }
    }

    #[test]
    fn after_a_restart_the_flows_decide() {
        let start = Instant::now();
        let mut dsr = DsrUse::new(false, true, start);
        assert!(!dsr.update(&BTreeMap::new(), || unreachable!(), start) && dsr.is_needed());
        assert!(dsr.update(&BTreeMap::new(), || false, start + PERIOD) && !dsr.is_needed());
    }
}
