//! The history: rates of the last hour, in bounded memory.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use proxy_cli::page::{HISTORY_POINTS, HistoryAnswer};

use crate::rates::{Counters, History, Point, Rates};

/// Maximum number of Service ports with a history: with [`HISTORY_POINTS`] of 16 bytes each, they take 4 MB at most.
const SERVICES: usize = 1_024;

/// Records the history.
#[derive(Debug)]
pub(super) struct Log {
    /// Time between two points, in whole seconds.
    interval: Duration,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    history: History,
    before: Option<Counters>,
    /// The time of the last point, in intervals since 1970.
    last: u64,
}

impl Log {
    /// Creates a history of this length; `None` if the length is 0.
    pub(super) fn new(length: Duration) -> Option<Self> {
        if length.is_zero() {
            return None;
        }
        let interval = Duration::from_secs((length / HISTORY_POINTS).as_secs().max(1));
        let history = History::new(HISTORY_POINTS as usize, SERVICES);
        Some(Self { interval, kept: Mutex::new(Kept { history, before: None, last: 0 }) })
    }

    /// Returns the time until the next point. Points are at whole multiples of the interval, on every node.
    pub(super) fn pause(&self, now: SystemTime) -> Duration {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let interval = self.interval.as_nanos();
        let rest = interval - since.as_nanos() % interval;
        Duration::from_nanos(u64::try_from(rest).unwrap_or_default())
    }

    /// Adds the rates since the previous call as a point. `None`: the counters cannot be read, and the next call adds no point.
    pub(super) fn add(&self, counters: Option<Counters>, now: SystemTime) {
        let number = self.number(now);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(before), Some(after)) = (&kept.before, &counters) {
            let rates = Rates::of_totals(Some(before), after);
            // The position of a point is its time: a point missed while the machine slept or the maps were away has no traffic.
            let missing = number.saturating_sub(kept.last + 1).min(u64::from(HISTORY_POINTS));
            for _ in 0..missing {
                let silent = Rates { services: silent(&rates), ..Rates::default() };
                kept.history.add(&silent);
            }
            kept.history.add(&rates);
            kept.last = number;
        } else if kept.last == 0 {
            kept.last = number;
        }
        kept.before = counters;
    }

    /// The number of the interval that ends at about `now`.
    fn number(&self, now: SystemTime) -> u64 {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default() + self.interval / 2;
        since.as_secs() / self.interval.as_secs()
    }

    /// Returns the history of all Service ports together if `service` is empty, otherwise that of the one with this key.
    pub(super) fn answer(&self, service: &str) -> HistoryAnswer {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let row = |point: Point| [point.connections, point.packets, point.bytes, point.failures];
        let points = if service.is_empty() {
            kept.history.total().map(row).collect()
        } else {
            kept.history.by_key(service).map(row).collect()
        };
        HistoryAnswer { interval: self.interval.as_secs(), last: kept.last, points }
    }
}

/// Returns the same Service ports, without traffic.
fn silent(rates: &Rates) -> Vec<crate::rates::ServiceRates> {
    let mut services = rates.services.clone();
    for service in &mut services {
        service.rates = crate::rates::Traffic::default();
    }
    services
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::tests::two_looks;

    const KEY: &str = "default/web:http/TCP/IPv4";

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn history_points_have_the_same_times_on_all_nodes() {
        let log = Log::new(Duration::from_hours(1)).unwrap();
        assert_eq!(log.interval, Duration::from_secs(15));
        assert_eq!(log.pause(at(3_000)), Duration::from_secs(15));
        assert_eq!(log.pause(at(3_014)), Duration::from_secs(1));
        assert!(Log::new(Duration::ZERO).is_none());
        assert_eq!(Log::new(Duration::from_mins(4)).unwrap().interval, Duration::from_secs(1));
    }

    #[test]
    fn history_has_the_counted_points_and_gaps_for_missed_ones() {
        let log = Log::new(Duration::from_hours(1)).unwrap();
        let (before, after) = two_looks();
        log.add(Some(before), at(1_500));
        assert_eq!(log.answer(""), HistoryAnswer { interval: 15, last: 100, points: Vec::new() });
        log.add(Some(after.clone()), at(1_515));
        let busy = [20.0, 80.0, 30_000.0, 4.0];
        assert_eq!(log.answer(KEY), HistoryAnswer { interval: 15, last: 101, points: vec![busy] });
        // Two points were missed. The third one has no traffic either.
        log.add(Some(after), at(1_560));
        let history = log.answer(KEY);
        assert_eq!((history.last, history.points), (104, vec![busy, [0.0; 4], [0.0; 4], [0.0; 4]]));
        assert_eq!(log.answer("").points.len(), 4);
        assert_eq!(log.answer("default/other/TCP/IPv4").points, Vec::<[f32; 4]>::new());
        log.add(None, at(1_575));
        assert_eq!(log.answer("").points.len(), 4, "no counters, no point");
    }

    #[test]
    fn an_hour_is_kept_and_no_more() {
        let log = Log::new(Duration::from_hours(1)).unwrap();
        let (mut counters, after) = two_looks();
        log.add(Some(counters.clone()), at(15_000));
        // In the n-th quarter of a minute, n connections per second are made.
        for number in 1..=2 * HISTORY_POINTS {
            counters.at += log.interval;
            let id = *after.snapshot.service_stats.keys().next().unwrap();
            let stats = counters.snapshot.service_stats.entry(id).or_default();
            stats.connections += u64::from(number) * log.interval.as_secs();
            log.add(Some(counters.clone()), at(15_000 + u64::from(number) * 15));
            for service in ["", KEY] {
                let history = log.answer(service);
                let rates: Vec<f32> = history.points.iter().map(|point| point[0]).collect();
                let first = number.saturating_sub(HISTORY_POINTS) + 1;
                let expected: Vec<f32> =
                    (first..=number).map(|number| f32::from(u16::try_from(number).unwrap())).collect();
                assert_eq!((history.last, rates), (1_000 + u64::from(number), expected), "{service}");
            }
        }
        assert_eq!(log.answer(KEY).points.len(), 4 * 60, "four points a minute");
    }
}
