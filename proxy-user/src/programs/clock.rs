//! Measures how fast the kernel counts jiffies. `CONFIG_HZ` is not always readable, but a program can read the clock.

use std::thread::sleep;
use std::time::{Duration, Instant};

use aya::programs::SchedClassifier;
use aya::{TestRun, TestRunOptions};

use super::error::Error;

/// The usual values of `CONFIG_HZ`.
const USUAL: [u32; 4] = [100, 250, 300, 1000];
/// Length of the measurement: one jiffy too many or too few then changes the result by at most 10 %.
const SPAN: Duration = Duration::from_millis(100);
/// A jiffy lasts 10 ms at most; a clock that does not advance for this long has stopped.
const STUCK: Duration = Duration::from_secs(1);

/// Both clocks at one moment.
#[derive(Clone, Copy, Debug)]
struct Reading {
    jiffies: u64,
    nanoseconds: u64,
}

fn read(clock: &SchedClassifier) -> Result<Reading, Error> {
    let packet = [0; 64];
    let mut out = [0u8; 64];
    let options =
        TestRunOptions { data_in: Some(&packet), data_out: Some(&mut out), ..TestRunOptions::default() };
    clock.test_run(options).map_err(|error| Error::Clock(error.to_string()))?;
    let word = |at: usize| out.get(at..).and_then(|rest| rest.first_chunk()).copied().map(u64::from_ne_bytes);
    let jiffies = word(0).unwrap_or_default();
    Ok(Reading { jiffies, nanoseconds: word(8).unwrap_or_default() })
}

/// Waits until the jiffies change, and returns both clocks at that moment.
fn edge(clock: &SchedClassifier) -> Result<Reading, Error> {
    let started = Instant::now();
    let first = read(clock)?;
    while started.elapsed() < STUCK {
        let now = read(clock)?;
        if now.jiffies != first.jiffies {
            return Ok(now);
        }
    }
    Err(Error::Clock(format!("the clock stands at {} jiffies", first.jiffies)))
}

/// Measures the jiffies per second; takes about a tenth of a second.
pub(super) fn measure_hz(clock: &SchedClassifier) -> Result<u32, Error> {
    let first = edge(clock)?;
    sleep(SPAN);
    let last = edge(clock)?;
    let jiffies = last.jiffies.wrapping_sub(first.jiffies);
    let nanoseconds = last.nanoseconds.wrapping_sub(first.nanoseconds);
    rate(jiffies, nanoseconds)
        .ok_or_else(|| Error::Clock(format!("{jiffies} jiffies in {nanoseconds} nanoseconds")))
}

/// Returns the jiffies per second: the nearest usual rate if it is within 12 % of the measured one, otherwise the measured
/// rate.
fn rate(jiffies: u64, nanoseconds: u64) -> Option<u32> {
    let measured = u32::try_from(jiffies.checked_mul(1_000_000_000)?.checked_div(nanoseconds)?).ok()?;
    let nearest = USUAL.into_iter().min_by_key(|hz| hz.abs_diff(measured))?;
    let hz = if nearest.abs_diff(measured) * 100 <= nearest * 12 { nearest } else { measured };
    (10..=100_000).contains(&hz).then_some(hz)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usual_rate_is_recognised_with_a_jiffy_missed_or_too_many() {
        for hz in USUAL {
            let jiffies = u64::from(hz) / 10;
            for measured in jiffies - 1..=jiffies + 1 {
                assert_eq!(rate(measured, 100_000_000), Some(hz), "{measured} of {hz}");
            }
        }
    }

    #[test]
    fn an_unusual_rate_is_kept_and_nonsense_refused() {
        assert_eq!(rate(2_400, 2_000_000_000), Some(1_200));
        assert_eq!(rate(50, 1_000_000_000), Some(50));
        assert_eq!(rate(0, 1_000_000_000), None);
        assert_eq!(rate(1, 0), None);
        assert_eq!(rate(u64::MAX, 1), None);
    }
}
