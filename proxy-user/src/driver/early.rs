//! Before all objects are listed: the agent serves static Services, and leaves the entries of an earlier agent unchanged.

use tokio::time::Instant;

use super::Driver;
use crate::driver::status::publish;
use proxy_core::plan::plan_service;
use proxy_core::store::Store;

impl<S: Store> Driver<S> {
    /// Returns the time of the next work that needs no event.
    pub(super) fn early_wake(&self) -> Instant {
        let later = Instant::now() + self.settings.sync_period;
        self.reconciler.early_wake().map_or(later, |at| Instant::from_std(at).min(later))
    }

    /// Programs devices, and static Services if they may have changed or a retry is due.
    pub(super) fn work_early(&mut self) {
        // There is no plan until the host is known.
        if self.plan_node().is_none() {
            return;
        }
        // The node is planned again once the API server has described it.
        self.is_node_new = true;
        let now = Instant::now().into_std();
        let exists = |index| self.cluster.host().is_some_and(|host| host.devices.contains_key(&index));
        self.reconciler.write_devices(exists, now);
        let names: Vec<_> = self.cluster.static_services().cloned().collect();
        let retries = self.reconciler.early_wake().is_some_and(|at| at <= now);
        let is_node_due = self.early.is_first && self.reconciler.is_node_due();
        let was_synced = self.status.borrow().statics_synced;
        if !(self.early.is_due || retries || is_node_due) || (names.is_empty() && !was_synced) {
            return;
        }
        self.early.is_due = false;
        // A Service that left the folder stays until all objects are listed, because the API server may have it, too.
        let plan = |name| {
            let mut plan = plan_service(&self.cluster, &name, self.settings.plan);
            let (is_first, flags) =
                (self.reconciler.plan(&name).is_none(), |at: &_| self.reconciler.flags(at));
            self.recent.apply(&name, plan.as_mut(), is_first, flags, now);
            (name, plan)
        };
        let plans = names.into_iter().map(plan).collect();
        self.reconciler.sync_early(now, plans, self.early.is_first);
        let failing = self.failing_families();
        self.report_problems();
        let reconciler = &self.reconciler;
        publish(&self.status, |status| {
            status.statics_synced = true;
            status.failing_since.retain(|family, _| failing.contains(family));
            status.describe(reconciler);
        });
        if !was_synced {
            tracing::info!(
                services = self.status.borrow().services,
                "static Services programmed; connecting to the API server"
            );
        }
    }
}
