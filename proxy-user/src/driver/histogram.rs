//! Histograms of durations.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

/// The upper bounds of a histogram's buckets.
pub trait Scale {
    /// Upper bounds in seconds, ascending.
    const BOUNDS: &'static [f64];
}

/// The scale of the time from the arrival of a change to its write into the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventScale;

impl Scale for EventScale {
    const BOUNDS: &'static [f64] = &[
        0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    ];
}

/// kube-proxy's scale of syncs (`pkg/proxy/metrics/metrics.go`): doubling from a millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncScale;

impl Scale for SyncScale {
    const BOUNDS: &'static [f64] = &[
        0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192,
        16.384,
    ];
}

/// kube-proxy's scale of network programming: 0.25, 0.5, then by 1 s to 59, by 5 s to 115, by 30 s to 300.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgrammingScale;

impl Scale for ProgrammingScale {
    const BOUNDS: &'static [f64] = &programming_bounds();
}

const fn programming_bounds() -> [f64; 2 + 59 + 12 + 7] {
    let mut bounds = [0.25; 80];
    bounds[1] = 0.5;
    let (mut position, mut second) = (2, 1u32);
    while position < bounds.len() {
        bounds[position] = second as f64;
        position += 1;
        second += match second {
            ..60 => 1,
            60..120 => 5,
            _ => 30,
        };
    }
    bounds
}

/// Durations counted in buckets, for Prometheus.
pub struct Histogram<S> {
    /// Observations up to the bound at the same position in [`Scale::BOUNDS`], each counted once; the last bucket counts
    /// those above all bounds.
    pub buckets: Vec<u64>,
    /// The sum of all durations.
    pub sum: Duration,
    scale: PhantomData<S>,
}

impl<S: Scale> Histogram<S> {
    /// Returns the number of observations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Adds an observation.
    pub fn observe(&mut self, duration: Duration) {
        let bucket = S::BOUNDS.partition_point(|bound| *bound < duration.as_secs_f64());
        if let Some(count) = self.buckets.get_mut(bucket) {
            *count += 1;
        }
        self.sum += duration;
    }
}

impl<S: Scale> Default for Histogram<S> {
    fn default() -> Self {
        Self { buckets: vec![0; S::BOUNDS.len() + 1], sum: Duration::ZERO, scale: PhantomData }
    }
}

// Not derived: a derive would require the same traits of the scale, which is a type parameter only.
impl<S> Clone for Histogram<S> {
    fn clone(&self) -> Self {
        Self { buckets: self.buckets.clone(), sum: self.sum, scale: PhantomData }
    }
}

impl<S> PartialEq for Histogram<S> {
    fn eq(&self, other: &Self) -> bool {
        self.buckets == other.buckets && self.sum == other.sum
    }
}

impl<S> fmt::Debug for Histogram<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histogram").field("buckets", &self.buckets).field("sum", &self.sum).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_kube_proxys() {
        let programming = ProgrammingScale::BOUNDS;
        assert_eq!(programming[..4], [0.25, 0.5, 1.0, 2.0]);
        assert_eq!(programming[59..64], [58.0, 59.0, 60.0, 65.0, 70.0]);
        assert_eq!(programming[72..], [115.0, 120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 300.0]);
        assert_eq!((SyncScale::BOUNDS.len(), SyncScale::BOUNDS[14]), (15, 0.001 * f64::from(1 << 14)));
        for bounds in [EventScale::BOUNDS, SyncScale::BOUNDS, programming] {
            assert!(bounds.is_sorted());
        }
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut histogram = Histogram::<SyncScale>::default();
        for milliseconds in [0, 1, 2, 3, 100_000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        assert_eq!(histogram.buckets[..3], [2, 1, 1]);
        assert_eq!((histogram.buckets[15], histogram.count()), (1, 5));
        assert_eq!(histogram.sum, Duration::from_millis(100_006));
    }
}
