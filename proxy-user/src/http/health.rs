//! Whether the agent is healthy, by kube-proxy's rules (`pkg/proxy/healthcheck/proxy_health.go`, 1.37).
//!
//! A family is unhealthy if one of its changes has waited for longer than two sync periods, or if the task that owns
//! the maps has made no progress for that long; so are both if a task that keeps the programs on devices has made none for that long,
//! and for a minute at least ([`SLOWEST`]). A family without a waiting change is healthy, however long ago the last
//! sync was, and so is every family before the first list.
//!
//! `/healthz` also fails if most of a family could not be programmed for longer than two sync periods
//! ([`failing_families`](proxy_core::sync::Reconciler::failing_families)), if no agent has programmed the node for that long since
//! the start, if an uplink has lacked its packet programs for that long, and if the node is about to be removed, so that load
//! balancers stop sending traffic to it. `/livez` does not: a restart would help in neither case. An object that cannot be
//! programmed has a problem, and changes the health of no node: all nodes would leave the load balancers at once.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use super::answer::State;
use crate::driver::{NodeFate, Status};
use crate::metrics::recent::SLOWEST;
use proxy_core::model::net::IpFamily;

/// What is late with the programs on devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceDelays {
    /// Since when an uplink has lacked its packet programs.
    pub bare_since: Option<Instant>,
    /// How long the progress of a task that keeps the programs on devices has been overdue.
    pub overdue: Duration,
}

/// Which check is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Whether this node should get traffic.
    Healthz,
    /// Whether this process should continue.
    Livez,
}

/// The body of the answer, with kube-proxy's fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthReport {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: Families,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Families {
    #[serde(rename = "IPv4")]
    v4: FamilyReport,
    #[serde(rename = "IPv6")]
    v6: FamilyReport,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyReport {
    last_updated: String,
    healthy: bool,
}

impl HealthReport {
    /// Returns the report; a change may wait for `patience`. `now` is only shown: a step of the system's clock changes no health.
    pub fn of(
        status: &Status,
        devices: DeviceDelays,
        patience: Duration,
        check: Check,
        now: SystemTime,
    ) -> Self {
        let is_recent = |since: Instant| since.elapsed() <= patience;
        let is_stalled = status.progress.is_some_and(|progress| !is_recent(progress))
            || devices.overdue > patience.max(SLOWEST);
        // One sync serves both families, so a change waits in both. Before everything is listed, a change cannot be programmed, and
        // kube-proxy does not count it as late.
        let is_late = status.synced
            && status.is_pending()
            && status.waiting_since.is_some_and(|since| !is_recent(since));
        let family = |family| {
            let mut failing =
                status.failing_since.get(&family).copied().into_iter().chain(devices.bare_since);
            FamilyReport {
                last_updated: rfc3339(status.up_to_date.get(&family).copied()),
                healthy: !is_stalled && !is_late && (check == Check::Livez || failing.all(is_recent)),
            }
        };
        let families = Families { v4: family(IpFamily::V4), v6: family(IpFamily::V6) };
        let mut report = Self {
            last_updated: rfc3339(status.up_to_date.values().max().copied()),
            current_time: rfc3339(Some(now)),
            node_eligible: (check == Check::Healthz).then_some(status.node == NodeFate::Stays),
            healthy: families.v4.healthy && families.v6.healthy,
            status: families,
        };
        if report.code() == 200 {
            // Older load balancers check only this field.
            report.last_updated.clone_from(&report.current_time);
        }
        report
    }

    /// Whether both families are healthy.
    pub const fn is_healthy(&self) -> bool {
        self.healthy
    }

    /// Returns the HTTP status.
    pub fn code(&self) -> u16 {
        if self.healthy && self.node_eligible.unwrap_or(true) { 200 } else { 503 }
    }
}

/// Returns the current report.
pub(super) fn report(state: &State, check: Check) -> HealthReport {
    let status = state.status.borrow();
    let bare_since = state.metrics.bare.first(&status.uplinks).map(|device| device.since);
    let devices = DeviceDelays { bare_since, overdue: state.metrics.recent.longest_overdue() };
    HealthReport::of(&status, devices, state.patience, check, SystemTime::now())
}

/// Returns a time as Go writes it in JSON; `None` is Go's zero time, the year 1.
pub(super) fn rfc3339(time: Option<SystemTime>) -> String {
    time.and_then(|time| jiff::Timestamp::try_from(time).ok())
        .map_or_else(|| "0001-01-01T00:00:00Z".to_owned(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    /// The clock that is shown, which only the test advances, together with tokio's.
    struct Clock(SystemTime);

    impl Clock {
        fn new() -> Self {
            Self(SystemTime::UNIX_EPOCH + Duration::from_hours(1))
        }

        async fn pass(&mut self, seconds: u64) {
            let time = Duration::from_secs(seconds);
            self.0 += time;
            tokio::time::advance(time).await;
        }

        fn report(&self, status: &Status, check: Check) -> HealthReport {
            HealthReport::of(status, DeviceDelays::default(), PATIENCE, check, self.0)
        }

        fn healthz(&self, status: &Status) -> (u16, bool, bool) {
            well(&self.report(status, Check::Healthz))
        }
    }

    fn well(report: &HealthReport) -> (u16, bool, bool) {
        (report.code(), report.status.v4.healthy, report.status.v6.healthy)
    }

    /// Returns the status of a driver with a change that has begun to wait.
    fn pending() -> Status {
        let mut status = Status { synced: true, waiting_since: Some(Instant::now()), ..Status::default() };
        status.slice_changes.pending = 1;
        status
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_200_before_the_first_sync_and_without_changes() {
        let (mut clock, mut status) = (Clock::new(), Status::default());
        assert_eq!(clock.healthz(&status), (200, true, true));
        status.up_to_date = [(IpFamily::V4, clock.0), (IpFamily::V6, clock.0)].into();
        clock.pass(1_000_000).await;
        assert_eq!(clock.healthz(&status), (200, true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_503_after_two_periods_with_a_pending_change() {
        let (mut clock, mut status) = (Clock::new(), pending());
        clock.pass(60).await;
        assert_eq!(clock.healthz(&status), (200, true, true), "exactly two periods are not too long");
        clock.pass(1).await;
        assert_eq!(clock.healthz(&status), (503, false, false));
        status.synced = false;
        assert_eq!(clock.healthz(&status), (200, true, true), "not all was listed yet");
        status.synced = true;
        status.slice_changes.pending = 0;
        assert_eq!(clock.healthz(&status), (200, true, true), "nothing waits any more");
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_503_and_livez_is_200_on_a_node_that_leaves() {
        let (clock, status) = (Clock::new(), Status { node: NodeFate::Leaves, ..Status::default() });
        let healthz = clock.report(&status, Check::Healthz);
        assert_eq!((healthz.code(), healthz.healthy), (503, true));
        assert_eq!(healthz.last_updated, "0001-01-01T00:00:00Z", "the current time only with 200");
        let livez = clock.report(&status, Check::Livez);
        assert_eq!((livez.code(), livez.node_eligible), (200, None));
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_503_and_livez_is_200_after_two_periods_of_failed_writes() {
        let mut clock = Clock::new();
        let mut status = Status { synced: true, ..Status::default() };
        status.failing_since.insert(IpFamily::V6, Instant::now());
        clock.pass(60).await;
        assert_eq!(clock.healthz(&status), (200, true, true), "not for long");
        clock.pass(1).await;
        assert_eq!(clock.healthz(&status), (503, true, false));
        assert_eq!(clock.report(&status, Check::Livez).code(), 200);
        status.failing_since.clear();
        assert_eq!(clock.healthz(&status), (200, true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_and_livez_are_503_if_the_driver_makes_no_progress() {
        let clock = Clock::new();
        let status = Status { progress: Some(Instant::now()), ..Status::default() };
        tokio::time::advance(PATIENCE).await;
        assert_eq!(clock.healthz(&status), (200, true, true));
        tokio::time::advance(Duration::from_millis(1)).await;
        for check in [Check::Healthz, Check::Livez] {
            assert_eq!(well(&clock.report(&status, check)), (503, false, false), "{check:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn step_of_the_clock_changes_no_health() {
        let (mut clock, status) = (Clock::new(), pending());
        let devices = DeviceDelays { bare_since: Some(Instant::now()), ..DeviceDelays::default() };
        for code in [200, 503] {
            for shown in [clock.0 - Duration::from_mins(50), clock.0, clock.0 + Duration::from_hours(5)] {
                let report = HealthReport::of(&status, devices, PATIENCE, Check::Healthz, shown);
                assert_eq!(report.code(), code, "{shown:?}");
            }
            clock.pass(61).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn body_of_healthz_equals_kube_proxys() {
        let (mut clock, mut status) = (Clock::new(), Status::default());
        status.up_to_date.insert(IpFamily::V4, clock.0);
        status.failing_since.insert(IpFamily::V6, Instant::now());
        clock.pass(61).await;
        let body = serde_json::to_string(&clock.report(&status, Check::Healthz)).unwrap();
        assert_eq!(
            body,
            r#"{"lastUpdated":"1970-01-01T01:00:00Z","currentTime":"1970-01-01T01:01:01Z","nodeEligible":true,"healthy":false,"status":{"IPv4":{"lastUpdated":"1970-01-01T01:00:00Z","healthy":true},"IPv6":{"lastUpdated":"0001-01-01T00:00:00Z","healthy":false}}}"#
        );
        status.failing_since.clear();
        clock.pass(500).await;
        let report = clock.report(&status, Check::Livez);
        assert_eq!(
            report.last_updated, report.current_time,
            "well: the current time, for old load balancers"
        );
        assert!(!serde_json::to_string(&report).unwrap().contains("nodeEligible"));
    }
}
