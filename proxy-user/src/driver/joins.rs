//! The Services that endpoints joined lately: idle connections move to them (annotation `ballast.io/rebalance`).

use std::time::{Duration, Instant};

use super::timed::Timed;
use proxy_core::model::ServiceName;
use proxy_core::plan::{PortPlan, ServicePlan};

/// Pause after the last join: the pods of one scale-out join one after the other.
const QUIET: Duration = Duration::from_secs(5);
/// How long connections move: enough to reset each of them once, at the rate of [`proxy_core::plan::rebalance`], and for requests
/// that keep a connection busy meanwhile.
const LASTS: Duration = Duration::from_mins(2);

/// When connections of Services begin to move, and when they no longer do.
#[derive(Debug)]
pub(super) struct Joins {
    periods: Timed<(Instant, Instant)>,
    /// Time until an endpoint that joins has its full share.
    slow_start: Duration,
}

impl Joins {
    pub(super) fn new(slow_start: Duration) -> Self {
        Self { periods: Timed::default(), slow_start }
    }

    /// Notes whether endpoints joined those of the plan `before`, and lets connections of the plan's ports move only in the time
    /// after that. The first endpoints of a port are no join.
    pub(super) fn apply(
        &mut self,
        name: &ServiceName,
        plan: Option<&mut ServicePlan>,
        before: Option<&ServicePlan>,
        now: Instant,
    ) {
        let Some(plan) = plan.filter(|plan| plan.ports.values().any(|port| port.rebalances)) else {
            self.periods.remove(name);
            return;
        };
        let has_joined = before.is_some_and(|before| {
            let mut ports = plan.ports.iter().filter(|(_, port)| port.rebalances);
            ports.any(|(id, port)| before.ports.get(id).is_some_and(|before| joined(before, port)))
        });
        if has_joined {
            let (begin, end) = (now + QUIET, now + QUIET + self.slow_start + LASTS);
            self.periods.set(name, (begin, end), [begin, end]);
        }
        let moves = self.periods.get(name).is_some_and(|(begin, end)| *begin <= now && now < *end);
        plan.ports.values_mut().for_each(|port| port.rebalances &= moves);
    }

    /// Returns the number of Services whose connections move.
    pub(super) fn active(&self, now: Instant) -> usize {
        self.periods.values().filter(|(begin, end)| *begin <= now && now < *end).count()
    }

    /// Returns the time at which connections of the next Service begin to move, or no longer do.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.periods.wake()
    }

    /// Starts a planning: returns the Services whose connections begin to move, or no longer do.
    pub(super) fn begin(&mut self, now: Instant) -> Vec<ServiceName> {
        let names = self.periods.take_due(now);
        for name in &names {
            if self.periods.get(name).is_some_and(|(_, end)| *end <= now) {
                self.periods.remove(name);
            }
        }
        names
    }
}

/// Whether an endpoint joined others.
fn joined(before: &PortPlan, after: &PortPlan) -> bool {
    !before.backends.is_empty() && after.backends.keys().any(|at| !before.backends.contains_key(at))
}
