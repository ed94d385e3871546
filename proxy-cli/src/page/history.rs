//! The history of one node, or of several nodes together.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The number of points of a history; `--page-history` is the time that they span.
pub const HISTORY_POINTS: u32 = 240;
/// The answer of `/page/history`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryAnswer {
    /// Seconds between two points.
    pub interval: u64,
    /// The time of the last point, in intervals since 1970, so that the points of all nodes have the same times.
    pub last: u64,
    /// Connections, packets, bytes and failures per second, oldest first. Empty for a Service port without traffic.
    pub points: Vec<[f32; 4]>,
}

impl HistoryAnswer {
    /// Adds the points of another node if both have the same interval, and the clock of that node differs by less than the history
    /// from `now`. Returns whether they were added.
    pub fn add(&mut self, other: &Self, now: SystemTime) -> bool {
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let most = u64::from(HISTORY_POINTS);
        let is_near =
            seconds.checked_div(other.interval).is_some_and(|number| number.abs_diff(other.last) <= most);
        if !other.points.is_empty() && (!is_near || other.points.len() as u64 > most) {
            return false;
        }
        if self.points.is_empty() {
            let interval = self.interval;
            if interval == 0 || interval == other.interval {
                *self = other.clone();
            }
            return self.interval == other.interval;
        }
        if self.interval != other.interval {
            return other.points.is_empty();
        }
        let first = |one: &Self| (one.last + 1).saturating_sub(one.points.len() as u64);
        let (begin, end) = if other.points.is_empty() {
            (first(self), self.last)
        } else {
            (first(self).min(first(other)), self.last.max(other.last))
        };
        let mut sums = vec![[0.0; 4]; (end + 1 - begin) as usize];
        for one in [&*self, other] {
            for (at, point) in one.points.iter().enumerate() {
                let place = sums.get_mut((first(one) - begin) as usize + at);
                for (sum, part) in place.into_iter().flatten().zip(point) {
                    *sum += part;
                }
            }
        }
        let most = sums.len().saturating_sub(HISTORY_POINTS as usize);
        (self.points, self.last) = (sums.split_off(most), end);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn nodes_are_added_up_by_time() {
        let one = |last, values: &[f32]| HistoryAnswer {
            interval: 15,
            last,
            points: values.iter().map(|value| [*value, 0.0, 0.0, 1.0]).collect(),
        };
        let mut sum = HistoryAnswer::default();
        let add = |sum: &mut HistoryAnswer, other: &HistoryAnswer| sum.add(other, at(15 * 12));
        for wrong in [12 + u64::from(HISTORY_POINTS) + 1, 1_000_000_000, u64::MAX] {
            assert!(!add(&mut sum, &one(wrong, &[7.0])), "the clock of the node is wrong");
        }
        assert!(add(&mut sum, &one(10, &[1.0, 2.0])));
        assert!(add(&mut sum, &one(11, &[10.0, 20.0, 30.0])));
        assert!(!sum.add(&one(11, &[7.0]), at(15 * 1_000)));
        let drawn: Vec<_> = sum.points.iter().map(|point| (point[0], point[3])).collect();
        assert_eq!((sum.last, drawn), (11, vec![(11.0, 2.0), (22.0, 2.0), (30.0, 1.0)]));
        assert!(add(&mut sum, &one(12, &[])), "a node where it is silent");
        assert_eq!(sum.points.len(), 3);
        assert!(!add(&mut sum, &HistoryAnswer { interval: 18, ..one(10, &[1.0]) }), "another setting");
        assert!(!add(&mut sum, &HistoryAnswer { interval: 0, ..one(10, &[1.0]) }), "no setting");
    }
}
