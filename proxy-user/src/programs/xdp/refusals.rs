//! When a device that refused the program is tried again.

use std::time::{Duration, Instant};

use crate::host::devices::XdpMode;

/// The refusal of a driver without XDP, which is never tried again.
pub(super) const NO_DRIVER: &str = "the driver does not support XDP";

/// A device that refused the program is tried again after this time at first. Drivers log each refusal.
const FIRST: Duration = Duration::from_mins(1);
/// The pauses double up to this one.
const LONGEST: Duration = Duration::from_hours(1);

/// A device refused the program.
pub(in crate::programs) struct Refusal {
    at: Instant,
    /// The pause until the next attempt.
    pause: Duration,
    mode: XdpMode,
    mtu: u32,
    pub(super) reason: String,
}

impl Refusal {
    /// Creates the refusal of a device with this MTU, which may have refused before.
    pub(super) fn new(before: Option<&Self>, at: Instant, mode: XdpMode, mtu: u32, reason: String) -> Self {
        let same = before.filter(|before| (before.mode, before.mtu) == (mode, mtu));
        let pause = same.map_or(FIRST, |before| (before.pause * 2).min(LONGEST));
        Self { at, pause, mode, mtu, reason }
    }

    /// Whether it is too early for another attempt. Another MTU or mode may be accepted at once.
    pub(super) fn stands(&self, now: Instant, mode: XdpMode, mtu: u32) -> bool {
        let is_early = now.saturating_duration_since(self.at) < self.pause;
        (self.mode, self.mtu) == (mode, mtu) && (is_early || self.reason == NO_DRIVER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NATIVE: XdpMode = XdpMode::Native;

    #[test]
    fn pauses_after_refusals_double_up_to_an_hour() {
        let mut now = Instant::now();
        let mut refusal = Refusal::new(None, now, NATIVE, 9001, "MTU".to_owned());
        let mut minutes = Vec::new();
        for _ in 0..8 {
            let begun = now;
            while refusal.stands(now, NATIVE, 9001) {
                now += Duration::from_mins(1);
            }
            minutes.push((now - begun).as_secs() / 60);
            refusal = Refusal::new(Some(&refusal), now, NATIVE, 9001, "MTU".to_owned());
        }
        assert_eq!(minutes, [1, 2, 4, 8, 16, 32, 60, 60]);
    }

    #[test]
    fn another_mtu_or_mode_is_tried_at_once_and_pauses_are_short_again() {
        let now = Instant::now();
        let first = Refusal::new(None, now, NATIVE, 9001, "MTU".to_owned());
        let second = Refusal::new(Some(&first), now, NATIVE, 9001, "MTU".to_owned());
        assert!(!second.stands(now, NATIVE, 1500) && !second.stands(now, XdpMode::Generic, 9001));
        let other = Refusal::new(Some(&second), now, NATIVE, 3498, "MTU".to_owned());
        assert!(other.stands(now, NATIVE, 3498) && !other.stands(now + FIRST, NATIVE, 3498));
    }

    #[test]
    fn a_driver_without_xdp_is_never_tried_again() {
        let now = Instant::now();
        let refusal = Refusal::new(None, now, NATIVE, 1500, NO_DRIVER.to_owned());
        assert!(refusal.stands(now + 2 * LONGEST, NATIVE, 1500));
    }
}
