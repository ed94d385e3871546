//! Listening to `events`, as one of several: see [`proxy_common::event`].

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aya::maps::MapType;
use proxy_common::event::{Event, LEASE_NANOSECONDS, LEASES, Lease, Monitor};
use proxy_common::map_names as map;

use super::flows::monotonic;
use super::ring::Ring;
use super::{View, ViewError};
use crate::maps::mapping::Mapping;

const WORDS: usize = size_of::<Event>() / 4;

/// A registered listener. While there is one, the programs report refusals and new connections.
pub struct Listener {
    ring: Ring,
    shared: Shared,
    lease: usize,
    /// Until when, as we wrote it last.
    until: u64,
    sample: u64,
    /// Older events are skipped.
    begun: u64,
    lost_before: u64,
}

impl View {
    /// Begins to listen to all refusals, drops and passes, and to one of `sample` new flows (0: none).
    pub fn listen(&self, sample: u32) -> Result<Listener, ViewError> {
        let ring = self.pin(map::EVENTS, MapType::RingBuf)?.ring()?;
        let shared = Shared(self.pin(map::MONITOR, MapType::Array)?.shared::<Monitor>()?);
        let begun = now();
        let (lease, until) = shared.claim(begun).ok_or(ViewError::TooMany)?;
        let lost_before = shared.lost();
        let mut listener =
            Listener { ring, shared, lease, until, sample: u64::from(sample), begun, lost_before };
        listener.renew()?;
        Ok(listener)
    }
}

impl Listener {
    /// How often a lease has to be renewed.
    pub const RENEWAL: Duration = Duration::from_nanos(LEASE_NANOSECONDS / 6);

    /// Says that we still listen. One that was stopped for long takes another lease.
    pub fn renew(&mut self) -> Result<(), ViewError> {
        let (now, old) = (now(), self.until);
        let until = now + LEASE_NANOSECONDS;
        if self.shared.exchange(self.lease, old, until) {
            self.until = until;
        } else {
            (self.lease, self.until) = self.shared.claim(now).ok_or(ViewError::TooMany)?;
        }
        self.shared.want(self.lease, self.sample);
        self.shared.agree(now);
        Ok(())
    }

    /// The next event; `None` when there is none yet. No reader is woken by one: poll.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let words = self.ring.next::<WORDS>()?;
            // SAFETY: of one size, and every bit pattern is an event (`Plain`).
            let event = unsafe { std::mem::transmute::<[u32; WORDS], Event>(words) };
            if event.time >= self.begun {
                return Some(event);
            }
        }
    }

    /// Events that could not be passed on since this one began to listen.
    pub fn lost(&self) -> u64 {
        self.shared.lost().wrapping_sub(self.lost_before) + self.ring.missed()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another listener may have taken it, if this process was stopped for long.
        self.shared.exchange(self.lease, self.until, 0);
        self.shared.agree(now());
    }
}

/// `monitor` in memory.
struct Shared(Mapping);

impl Shared {
    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.0.word64_at(0, offset)
    }

    fn lease(&self, number: usize, field: usize) -> Option<&AtomicU64> {
        self.word(offset_of!(Monitor, leases) + number * size_of::<Lease>() + field)
    }

    fn lost(&self) -> u64 {
        self.word(offset_of!(Monitor, lost)).map_or(0, |lost| lost.load(Ordering::Relaxed))
    }

    /// Takes a lease that is free or over; gives its number and until when it holds.
    fn claim(&self, now: u64) -> Option<(usize, u64)> {
        let until = now + LEASE_NANOSECONDS;
        (0..LEASES).find_map(|number| {
            let held = self.lease(number, offset_of!(Lease, until))?.load(Ordering::Acquire);
            (held < now && self.exchange(number, held, until)).then_some((number, until))
        })
    }

    fn exchange(&self, number: usize, old: u64, new: u64) -> bool {
        let until = self.lease(number, offset_of!(Lease, until));
        until.is_some_and(|until| {
            until.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    fn want(&self, number: usize, sample: u64) {
        if let Some(wanted) = self.lease(number, offset_of!(Lease, sample)) {
            wanted.store(sample, Ordering::Release);
        }
    }

    /// Tells the programs what the leases say: the longest time, the closest sample. Two who do it at once may leave
    /// something older, until the next renewal.
    fn agree(&self, now: u64) {
        let Some((until, sample)) =
            self.word(offset_of!(Monitor, until)).zip(self.word(offset_of!(Monitor, sample)))
        else {
            return;
        };
        let before = until.load(Ordering::Acquire);
        let held = (0..LEASES).filter_map(|number| {
            let until = self.lease(number, offset_of!(Lease, until))?.load(Ordering::Acquire);
            let sample = self.lease(number, offset_of!(Lease, sample))?.load(Ordering::Acquire);
            (until >= now).then_some((until, sample))
        });
        let held: Vec<_> = held.collect();
        let closest = held.iter().map(|(_, sample)| *sample).filter(|sample| *sample > 0).min();
        let longest = held.iter().map(|(until, _)| *until).max();
        sample.store(closest.unwrap_or(0), Ordering::Release);
        // The other listener was faster.
        let _ = until.compare_exchange(before, longest.unwrap_or(0), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Nanoseconds of the clock that events are stamped with.
fn now() -> u64 {
    monotonic().as_nanos() as u64
}
