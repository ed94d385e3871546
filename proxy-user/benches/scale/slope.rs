//! Measures whether the resident memory of a process grows during a long workload.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{park_timeout, scope};
use std::time::{Duration, Instant};

use crate::proc;
use proxy_testbed::report::Row;

/// Time between two samples.
const EVERY: Duration = Duration::from_secs(1);
/// Samples before this time are not used: ids are in quarantine for a minute, and the agent returns free memory once a minute.
const BEGIN: Duration = Duration::from_mins(3);
/// A run that is shorter than this reports no slope.
const LEAST: Duration = Duration::from_mins(10);

/// Runs `work`, and samples the resident memory of `process` meanwhile. Returns no rows if the run was shorter than `LEAST`.
pub fn during<T>(process: u32, group: &'static str, work: impl FnOnce() -> T) -> (T, Vec<Row>) {
    let (is_over, begun) = (AtomicBool::new(false), Instant::now());
    let (result, looks) = scope(|threads| {
        let looks = threads.spawn(|| {
            let mut looks = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                looks.push((begun.elapsed(), proc::memory(process, "VmRSS")));
                park_timeout(EVERY);
            }
            looks
        });
        let result = work();
        is_over.store(true, Ordering::Relaxed);
        looks.thread().unpark();
        (result, looks.join().unwrap())
    });
    (result, rows(group, &looks))
}

fn rows(group: &'static str, looks: &[(Duration, f64)]) -> Vec<Row> {
    let Some((end, _)) = looks.last().filter(|(end, _)| *end >= LEAST) else { return Vec::new() };
    let sizes_by_hour: Vec<(f64, f64)> = looks
        .iter()
        .filter(|(time, _)| *time >= BEGIN)
        .map(|(time, size)| (time.as_secs_f64() / 3600.0, *size))
        .collect();
    let what = format!("{} minutes of churn, without the first {}", end.as_secs() / 60, BEGIN.as_secs() / 60);
    let row = |name: &str, value, unit| Row::new(group, format!("{what}: {name}"), value, unit, None);
    // The agent returns free memory once a minute: the least of each two minutes shows what stays.
    let least: Vec<(f64, f64)> = sizes_by_hour
        .chunk_by(|a, b| (a.0 * 30.0).floor().total_cmp(&(b.0 * 30.0).floor()).is_eq())
        .filter_map(|part| part.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)))
        .collect();
    let sizes = || sizes_by_hour.iter().map(|(_, size)| *size);
    vec![
        row("slope of resident memory", slope(&sizes_by_hour), "MB/h"),
        row("slope of the least of each two minutes", slope(&least), "MB/h"),
        row("resident memory, at least", sizes().fold(f64::INFINITY, f64::min), "MB"),
        row("resident memory, at most", sizes().fold(0.0, f64::max), "MB"),
    ]
}

/// Returns the slope by least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let sums = points.iter().map(|point| ((point.0 - x) * (point.1 - y), (point.0 - x).powi(2)));
    let (above, below) = sums.fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
    if below == 0.0 { 0.0 } else { above / below }
}
