//! The endpoints in slow start, and the start time of each.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::timed::Timed;
use proxy_core::model::ServiceName;
use proxy_core::plan::slow_start::{STEPS, apply};
use proxy_core::plan::{BackendAddress, ServicePlan, ServicePortName};

/// Shares grow at multiples of this time only, so that many endpoints that join one after the other cause few syncs.
const GRID: Duration = Duration::from_secs(1);

/// The slow start period, and the endpoints whose share grows.
#[derive(Debug, Default)]
pub(super) struct SlowStart {
    /// 0: no slow start.
    period: Duration,
    /// The start of the grid: the time at which the first one of the endpoints joined.
    grid: Option<Instant>,
    /// Until the next step of an endpoint of a Service begins.
    joined: Timed<BTreeMap<(ServicePortName, BackendAddress), Instant>>,
}

impl SlowStart {
    pub(super) fn new(period: Duration) -> Self {
        Self { period, ..Self::default() }
    }

    /// Gives endpoints that have joined since the plan `before` a part of their share, if the port had other endpoints
    /// before.
    pub(super) fn apply(
        &mut self,
        name: &ServiceName,
        plan: Option<&mut ServicePlan>,
        before: Option<&ServicePlan>,
        now: Instant,
    ) {
        if self.period.is_zero() {
            return;
        }
        let mut known = self.joined.remove(name).unwrap_or_default();
        let Some(plan) = plan else { return };
        let ports: Vec<ServicePortName> = plan.ports.keys().cloned().collect();
        let mut joined = BTreeMap::new();
        for (id, port) in ports.into_iter().zip(plan.ports.values_mut()) {
            let before = before.and_then(|plan| plan.ports.get(&id)).map(|port| &port.backends);
            for (at, facts) in port.backends.iter() {
                let key = (id.clone(), *at);
                let is_new = before.is_some_and(|before| !before.is_empty() && !before.contains_key(at));
                let since = known.remove(&key).or((is_new && !facts.terminating).then_some(now));
                self.grid = self.grid.or(since);
                if let Some(since) = since.filter(|since| self.step(*since, now) < STEPS) {
                    joined.insert(key, since);
                }
            }
            apply(port, |at| joined.get(&(id.clone(), *at)).map(|since| self.step(*since, now)));
        }
        if let Some(next) = joined.values().map(|since| self.next_step(*since, now)).min() {
            self.joined.set(name, joined, [next]);
        }
    }

    /// Returns the last time of the grid before `at`, or `at` itself if it is one.
    fn last_tick(&self, at: Instant) -> Instant {
        let ticks = |grid: Instant| at.saturating_duration_since(grid).as_nanos() / GRID.as_nanos();
        self.grid.map_or(at, |grid| grid + GRID * ticks(grid) as u32)
    }

    /// Returns the step at `now` of an endpoint that joined at `since`, from 1 to [`STEPS`].
    fn step(&self, since: Instant, now: Instant) -> u16 {
        let steps = u128::from(STEPS - 1);
        let time = self.last_tick(now).saturating_duration_since(since);
        let done = time.as_nanos() * steps / self.period.as_nanos().max(1);
        1 + done.min(steps) as u16
    }

    /// Returns the time of the next step of an endpoint that joined at `since`.
    fn next_step(&self, since: Instant, now: Instant) -> Instant {
        #[cfg(test)]
        tests::STEPS_FOUND.set(tests::STEPS_FOUND.get() + 1);
        let steps = self.period.as_nanos() * u128::from(self.step(since, now));
        let at = since + Duration::from_nanos(steps.div_ceil(u128::from(STEPS - 1)) as u64);
        let tick = self.last_tick(at);
        if tick < at { tick + GRID } else { tick }
    }

    /// Returns the time of the next step of any endpoint.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.joined.wake()
    }

    /// Starts a planning: returns the Services with an endpoint whose step has increased since the last one.
    pub(super) fn begin(&mut self, now: Instant) -> Vec<ServiceName> {
        if self.joined.values().next().is_none() {
            self.grid = None;
        }
        self.joined.take_due(now)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proxy_core::testing::generator::service;

    use super::*;

    thread_local! {
        /// How often the next step of an endpoint was computed.
        pub(super) static STEPS_FOUND: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn endpoints_that_wait_cost_an_event_nothing() {
        let (mut slow_start, now) = (SlowStart::new(Duration::from_secs(30)), Instant::now());
        for number in 0..200 {
            let (name, before) = service(&number.to_string(), 1, [0]);
            let (_, mut plan) = service(&number.to_string(), 1, 0..=255);
            slow_start.apply(&name, plan.as_mut(), before.as_ref(), now);
        }
        let before = STEPS_FOUND.get();
        assert_eq!(slow_start.wake(), Some(now + GRID * 4));
        assert_eq!((before > 0, STEPS_FOUND.get()), (true, before));
        assert!(slow_start.begin(now + GRID * 3).is_empty());
        assert_eq!(slow_start.begin(now + GRID * 4).len(), 200);
    }
}
