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

/// The state of the syncs of one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FamilySync {
    /// Since when the oldest change has waited; `None` if no change waits.
    pub pending_since: Option<Instant>,
    /// Since when most of it could not be programmed, or an uplink has lacked its packet programs; `None` if neither is so.
    pub failing_since: Option<Instant>,
    /// When the maps were last up to date.
    pub last_updated: Option<SystemTime>,
}

/// The state of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The syncs of IPv4.
    pub v4: FamilySync,
    /// The syncs of IPv6.
    pub v6: FamilySync,
    /// Whether load balancers may send traffic to this node: it is neither being removed nor about to be.
    pub node_eligible: bool,
    /// How long the task that owns the maps has made no progress.
    pub stalled: Duration,
    /// How long the progress of a task that keeps the programs on devices has been overdue.
    pub devices_stalled: Duration,
}

impl Default for Snapshot {
    /// The state before the first list.
    fn default() -> Self {
        let (v4, v6) = (FamilySync::default(), FamilySync::default());
        Self { v4, v6, node_eligible: true, stalled: Duration::ZERO, devices_stalled: Duration::ZERO }
    }
}

impl Snapshot {
    /// Records that a change of this family waits. The time of the first waiting change counts.
    pub fn queued(&mut self, family: IpFamily, at: Instant) {
        self.family(family).pending_since.get_or_insert(at);
    }

    /// Records that no change of this family waits any more.
    pub fn updated(&mut self, family: IpFamily, at: SystemTime) {
        *self.family(family) = FamilySync { last_updated: Some(at), ..FamilySync::default() };
    }

    /// Records that both families have also failed since this time.
    #[must_use]
    pub fn failing(mut self, since: Option<Instant>) -> Self {
        for family in [&mut self.v4, &mut self.v6] {
            family.failing_since = family.failing_since.into_iter().chain(since).min();
        }
        self
    }

    fn family(&mut self, family: IpFamily) -> &mut FamilySync {
        match family {
            IpFamily::V4 => &mut self.v4,
            IpFamily::V6 => &mut self.v6,
        }
    }
}

impl From<&Status> for Snapshot {
    /// One sync serves both families, so a change waits in both.
    fn from(status: &Status) -> Self {
        // Before everything is listed, a change cannot be programmed, and kube-proxy does not count it as late.
        let pending = status.synced && status.is_pending();
        let sync = |family| FamilySync {
            pending_since: status.waiting_since.filter(|_| pending),
            failing_since: status.failing_since.get(&family).copied(),
            last_updated: status.up_to_date.get(&family).copied(),
        };
        Self {
            v4: sync(IpFamily::V4),
            v6: sync(IpFamily::V6),
            node_eligible: status.node == NodeFate::Stays,
            stalled: status.progress.map_or(Duration::ZERO, |progress| progress.elapsed()),
            devices_stalled: Duration::ZERO,
        }
    }
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
    pub fn of(snapshot: &Snapshot, patience: Duration, check: Check, now: SystemTime) -> Self {
        let is_recent = |since: Instant| since.elapsed() <= patience;
        let is_stalled = snapshot.stalled > patience || snapshot.devices_stalled > patience.max(SLOWEST);
        let family = |sync: &FamilySync| FamilyReport {
            last_updated: rfc3339(sync.last_updated),
            healthy: !is_stalled
                && sync.pending_since.is_none_or(is_recent)
                && (check == Check::Livez || sync.failing_since.is_none_or(is_recent)),
        };
        let status = Families { v4: family(&snapshot.v4), v6: family(&snapshot.v6) };
        let healthy = status.v4.healthy && status.v6.healthy;
        let mut report = Self {
            last_updated: rfc3339(snapshot.v4.last_updated.max(snapshot.v6.last_updated)),
            current_time: rfc3339(Some(now)),
            node_eligible: (check == Check::Healthz).then_some(snapshot.node_eligible),
            healthy,
            status,
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
    let snapshot = {
        let status = state.status.borrow();
        let bare = state.metrics.bare.first(&status.uplinks);
        let devices_stalled = state.metrics.recent.longest_overdue();
        Snapshot { devices_stalled, ..Snapshot::from(&*status).failing(bare.map(|device| device.since)) }
    };
    HealthReport::of(&snapshot, state.patience, check, SystemTime::now())
}

/// Returns a time as Go writes it in JSON; `None` is Go's zero time, the year 1.
pub(super) fn rfc3339(time: Option<SystemTime>) -> String {
    time.and_then(|time| jiff::Timestamp::try_from(time).ok())
        .map_or_else(|| "0001-01-01T00:00:00Z".to_owned(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

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

        fn check(&self, snapshot: &Snapshot) -> HealthReport {
            HealthReport::of(snapshot, PATIENCE, Check::Healthz, self.0)
        }

        fn update(&self, snapshot: &mut Snapshot, family: IpFamily) {
            snapshot.updated(family, self.0);
        }
    }

    fn well(report: &HealthReport) -> (u16, bool, bool) {
        (report.code(), report.status.v4.healthy, report.status.v6.healthy)
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_200_before_the_first_sync_and_without_changes() {
        let (mut clock, mut snapshot) = (Clock::new(), Snapshot::default());
        assert_eq!(well(&clock.check(&snapshot)), (200, true, true));
        clock.update(&mut snapshot, IpFamily::V4);
        clock.update(&mut snapshot, IpFamily::V6);
        clock.pass(1_000_000).await;
        assert_eq!(well(&clock.check(&snapshot)), (200, true, true));
    }

    #[rstest]
    #[case(IpFamily::V4, (503, false, true))]
    #[case(IpFamily::V6, (503, true, false))]
    #[tokio::test(start_paused = true)]
    async fn healthz_is_503_if_a_change_waits_for_more_than_two_periods(
        #[case] family: IpFamily,
        #[case] expected: (u16, bool, bool),
    ) {
        let (mut clock, mut snapshot) = (Clock::new(), Snapshot::default());
        snapshot.queued(family, Instant::now());
        clock.pass(60).await;
        assert_eq!(clock.check(&snapshot).code(), 200, "exactly two periods are not too long");
        clock.pass(1).await;
        // A later change does not make the first one younger.
        snapshot.queued(family, Instant::now());
        assert_eq!(well(&clock.check(&snapshot)), expected);
        let other = if family == IpFamily::V4 { IpFamily::V6 } else { IpFamily::V4 };
        clock.update(&mut snapshot, other);
        assert_eq!(well(&clock.check(&snapshot)), expected, "the other family's sync has no effect");
        clock.update(&mut snapshot, family);
        assert_eq!(well(&clock.check(&snapshot)), (200, true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_503_until_both_late_families_are_updated() {
        let (mut clock, mut snapshot) = (Clock::new(), Snapshot::default());
        snapshot.queued(IpFamily::V4, Instant::now());
        snapshot.queued(IpFamily::V6, Instant::now());
        clock.pass(61).await;
        assert_eq!(well(&clock.check(&snapshot)), (503, false, false));
        clock.update(&mut snapshot, IpFamily::V4);
        assert_eq!(well(&clock.check(&snapshot)), (503, true, false));
        clock.update(&mut snapshot, IpFamily::V6);
        assert_eq!(well(&clock.check(&snapshot)), (200, true, true));
    }

    #[test]
    fn healthz_is_503_and_livez_is_200_on_a_node_that_leaves() {
        let clock = Clock::new();
        let snapshot = Snapshot { node_eligible: false, ..Snapshot::default() };
        let healthz = clock.check(&snapshot);
        assert_eq!((healthz.code(), healthz.healthy), (503, true));
        assert_eq!(healthz.last_updated, "0001-01-01T00:00:00Z", "the current time only with 200");
        let livez = HealthReport::of(&snapshot, PATIENCE, Check::Livez, clock.0);
        assert_eq!((livez.code(), livez.node_eligible), (200, None));
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_follows_the_drivers_status() {
        let mut clock = Clock::new();
        let mut status = Status { waiting_since: Some(Instant::now()), ..Status::default() };
        status.slice_changes.pending = 1;
        clock.pass(61).await;
        assert_eq!(clock.check(&Snapshot::from(&status)).code(), 200, "not all was listed yet");
        status.synced = true;
        assert_eq!(well(&clock.check(&Snapshot::from(&status))), (503, false, false));
        status.slice_changes.pending = 0;
        assert_eq!(well(&clock.check(&Snapshot::from(&status))), (200, true, true), "nothing waits any more");
        status.node = NodeFate::Leaves;
        assert_eq!(well(&clock.check(&Snapshot::from(&status))), (503, true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_is_503_and_livez_is_200_after_two_periods_of_failed_writes() {
        let mut clock = Clock::new();
        let mut status = Status { synced: true, ..Status::default() };
        status.failing_since.insert(IpFamily::V6, Instant::now());
        clock.pass(60).await;
        assert_eq!(well(&clock.check(&Snapshot::from(&status))), (200, true, true), "not for long");
        clock.pass(1).await;
        let snapshot = Snapshot::from(&status);
        assert_eq!(well(&clock.check(&snapshot)), (503, true, false));
        assert_eq!(HealthReport::of(&snapshot, PATIENCE, Check::Livez, clock.0).code(), 200);
        status.failing_since.clear();
        assert_eq!(clock.check(&Snapshot::from(&status)).code(), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn healthz_and_livez_are_503_if_the_driver_makes_no_progress() {
        let clock = Clock::new();
        let status = Status { progress: Some(Instant::now()), ..Status::default() };
        tokio::time::advance(PATIENCE).await;
        assert_eq!(clock.check(&Snapshot::from(&status)).code(), 200);
        tokio::time::advance(Duration::from_millis(1)).await;
        let snapshot = Snapshot::from(&status);
        for check in [Check::Healthz, Check::Livez] {
            let report = HealthReport::of(&snapshot, PATIENCE, check, clock.0);
            assert_eq!(well(&report), (503, false, false), "{check:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn step_of_the_clock_changes_no_health() {
        let (mut clock, mut snapshot) = (Clock::new(), Snapshot::default());
        snapshot.queued(IpFamily::V4, Instant::now());
        snapshot = snapshot.failing(Some(Instant::now()));
        for code in [200, 503] {
            for shown in [clock.0 - Duration::from_mins(50), clock.0, clock.0 + Duration::from_hours(5)] {
                let report = HealthReport::of(&snapshot, PATIENCE, Check::Healthz, shown);
                assert_eq!(report.code(), code, "{shown:?}");
            }
            clock.pass(61).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn body_of_healthz_equals_kube_proxys() {
        let (mut clock, mut snapshot) = (Clock::new(), Snapshot::default());
        clock.update(&mut snapshot, IpFamily::V4);
        snapshot.queued(IpFamily::V6, Instant::now());
        clock.pass(61).await;
        let body = serde_json::to_string(&clock.check(&snapshot)).unwrap();
        assert_eq!(
            body,
            r#"{"lastUpdated":"1970-01-01T01:00:00Z","currentTime":"1970-01-01T01:01:01Z","nodeEligible":true,"healthy":false,"status":{"IPv4":{"lastUpdated":"1970-01-01T01:00:00Z","healthy":true},"IPv6":{"lastUpdated":"0001-01-01T00:00:00Z","healthy":false}}}"#
        );
        clock.update(&mut snapshot, IpFamily::V6);
        clock.pass(500).await;
        let report = HealthReport::of(&snapshot, PATIENCE, Check::Livez, clock.0);
        assert_eq!(
            report.last_updated, report.current_time,
            "well: the current time, for old load balancers"
        );
        assert!(!serde_json::to_string(&report).unwrap().contains("nodeEligible"));
    }
}
