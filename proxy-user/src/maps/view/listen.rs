//! A listener to `events`, of which there may be several: see [`proxy_common::event`].

use std::collections::{BTreeMap, VecDeque};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::MapType;
use proxy_common::event::{Event, LEASE_NANOSECONDS, LEASES, Lease, Monitor};
use proxy_common::map_names as map;

use super::flows::monotonic;
use super::ring::Ring;
use super::{View, ViewError};
use crate::maps::mapping::Mapping;

const WORDS: usize = size_of::<Event>() / 4;

/// More events than the ring holds.
const ALL: usize = 1 << 13;

/// Nanoseconds after which a lease is renewed.
const RENEWAL: u64 = LEASE_NANOSECONDS / 6;

/// A registered listener. While there is one, the programs report refusals and new connections.
pub struct Listener {
    ring: Ring,
    shared: Shared,
    lease: usize,
    /// The end of the lease, as this listener wrote it last.
    until: u64,
    sample: u64,
    /// Start of the listener; older events are skipped.
    begun: u64,
    lost_before: u64,
}

impl View {
    fn events(&self) -> Result<(Ring, Shared), ViewError> {
        let ring = self.pin(map::EVENTS, MapType::RingBuf)?.ring()?;
        Ok((ring, Shared(self.pin(map::MONITOR, MapType::Array)?.shared::<Monitor>()?)))
    }

    /// Starts to keep refusals, drops and passes of the time without listeners. The caller then has to renew it every second.
    pub fn keep_events(&self) -> Result<EventHistory, ViewError> {
        let (ring, shared) = self.events()?;
        Ok(EventHistory { ring, shared })
    }

    /// Starts to listen to all refusals, drops and passes, and to one of `sample` new flows (0: no flows).
    pub fn listen(&self, sample: u32) -> Result<Listener, ViewError> {
        let (mut ring, shared) = self.events()?;
        ring.skip_history();
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
    /// Renews the lease. A listener whose process was stopped for long takes another lease.
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

    /// Returns the next event; `None` if there is none yet. Renews the lease if that is due. Events do not wake a reader: the
    /// caller has to poll, more often than the lease lasts.
    pub fn next_event(&mut self) -> Result<Option<Event>, ViewError> {
        if now() + LEASE_NANOSECONDS >= self.until + RENEWAL {
            self.renew()?;
        }
        while let Some(event) = next_event(&mut self.ring) {
            if event.time >= self.begun {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// Returns the events of the history that this listener does not return, because they are older than it is.
    pub fn earlier_events(&self, view: &View) -> Result<Vec<Event>, ViewError> {
        let (mut ring, _) = view.events()?;
        let events = std::iter::from_fn(|| next_event(&mut ring)).take(ALL);
        Ok(events.filter(|event| event.time < self.begun).collect())
    }

    /// Returns the number of events that were lost since this listener started.
    pub fn lost(&self) -> u64 {
        self.shared.lost().wrapping_sub(self.lost_before) + self.ring.missed()
    }
}

fn next_event(ring: &mut Ring) -> Option<Event> {
    let words = ring.next::<WORDS>()?;
    // SAFETY: both types have one size, and every bit pattern is an event (`Plain`).
    Some(unsafe { std::mem::transmute::<[u32; WORDS], Event>(words) })
}

/// The lease that fills the history while there is no listener. It ends by itself if it is not renewed.
pub struct EventHistory {
    ring: Ring,
    shared: Shared,
}

impl EventHistory {
    /// Renews the lease, and makes room in the ring. In a flood of events, the programs fill the room that there is, and then
    /// write no more until the next renewal.
    pub fn renew(&mut self) {
        // While there is a listener, a flood may fill the ring as fast as it is read.
        for _ in std::iter::from_fn(|| next_event(&mut self.ring)).take(ALL) {}
        let now = now();
        if let Some(until) = self.shared.word(offset_of!(Monitor, history_until)) {
            until.store(now + LEASE_NANOSECONDS, Ordering::Release);
        }
        self.shared.agree(now);
    }
}

/// The last events of each reason, as examples: in a flood of events, only these are kept.
#[derive(Default)]
pub struct LastEvents {
    listener: Option<Listener>,
    events: BTreeMap<u32, VecDeque<Event>>,
}

impl LastEvents {
    /// The most events of each reason.
    pub const MOST: usize = 8;

    /// Reads new events. Starts to listen first, if it does not listen yet and has the maps; if that fails, there are no examples.
    pub fn read(&mut self, view: Option<&View>) {
        let Some(mut listener) = self.listener.take().or_else(|| view?.listen(0).ok()) else { return };
        while let Ok(event) = listener.next_event() {
            let Some(event) = event else {
                self.listener = Some(listener);
                return;
            };
            let last = self.events.entry(event.reason).or_default();
            last.push_back(event);
            if last.len() > Self::MOST {
                last.pop_front();
            }
        }
    }

    /// Stops to listen.
    pub fn stop(&mut self) {
        self.listener = None;
    }

    /// Removes and returns the events.
    pub fn take(&mut self) -> impl Iterator<Item = Event> + use<> {
        std::mem::take(&mut self.events).into_values().flatten()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails if this process was stopped for long, and another listener has taken the lease.
        self.shared.exchange(self.lease, self.until, 0);
        self.shared.agree(now());
    }
}

/// The map `monitor`, mapped into memory.
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

    /// Takes a lease that is free or has ended; returns its number and its end.
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

    /// Writes the summary of all leases for the programs: the latest end, the smallest sample. Two listeners that write it
    /// at once may leave an older value, until the next renewal.
    fn agree(&self, now: u64) {
        let words = [
            offset_of!(Monitor, until),
            offset_of!(Monitor, live_until),
            offset_of!(Monitor, sample),
            offset_of!(Monitor, history_until),
        ];
        let [Some(until), Some(live), Some(sample), Some(history)] = words.map(|offset| self.word(offset))
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
        let longest = held.iter().map(|(until, _)| *until).max().unwrap_or(0);
        sample.store(closest.unwrap_or(0), Ordering::Release);
        live.store(longest, Ordering::Release);
        let kept = Some(history.load(Ordering::Acquire)).filter(|until| *until >= now).unwrap_or(0);
        // If this fails, another listener was faster.
        let _ = until.compare_exchange(before, longest.max(kept), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Returns the time in nanoseconds, by the clock of the events' timestamps.
fn now() -> u64 {
    monotonic().as_nanos() as u64
}
