//! Reads the maps while a page is open.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::clients::{Client, KnownFlows, clients};
use super::sample::{Examples, Sample};
use crate::cli::monitor::{MonitorContext, MonitorLine};
use crate::maps::view::{Listener, Snapshot, View};
use crate::rates::{Counters, Rates};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time between the first two looks; it is shorter because a person who opens the page waits for the second one.
const FIRST: Duration = Duration::from_millis(500);
/// How often the ring of events is read; the ring holds the events of a far longer time.
const POLL: Duration = Duration::from_millis(50);
/// Maximum number of examples of each reason.
const EXAMPLES: usize = 8;

/// State that is kept between two looks.
pub(super) struct Sampler<'a> {
    bpffs: &'a Path,
    /// Addresses are shown, so connections and events are read as well.
    is_open: bool,
    /// At most one look was made so far.
    is_first: bool,
    before: Option<Counters>,
    known: KnownFlows,
    names: Snapshot,
    listener: Option<(Listener, Instant)>,
    examples: Examples,
}

impl<'a> Sampler<'a> {
    pub(super) fn new(bpffs: &'a Path, is_open: bool) -> Self {
        let (before, listener) = (None, None);
        let (known, names, examples) = (KnownFlows::default(), Snapshot::default(), Examples::new());
        Self { bpffs, is_open, is_first: true, before, known, names, listener, examples }
    }

    /// Reads the maps now, and returns what happened since the previous look.
    pub(super) fn sample(&mut self, problems: Vec<String>) -> Sample {
        let at = SystemTime::now();
        let read = self.read();
        let (rates, clients) = match read {
            Ok((rates, clients)) => (Ok(rates), clients),
            Err(failure) => {
                (self.before, self.known, self.listener) = (None, KnownFlows::default(), None);
                (Err(failure), Vec::new())
            }
        };
        Sample { at, rates, clients, examples: self.examples.clone(), problems }
    }

    fn read(&mut self) -> Result<(Rates, Vec<Client>), String> {
        // The path is resolved again for each look: after an upgrade the maps are in another folder.
        let view = View::open(self.bpffs).map_err(|error| error.to_string())?;
        let counters = Counters::read(&view).map_err(|error| error.to_string())?;
        let rates = Rates::between(self.before.as_ref(), &counters);
        let clients = if self.is_open {
            let flows = view.flows().map_err(|error| error.to_string())?;
            clients(&flows, &mut self.known, rates.seconds)
        } else {
            Vec::new()
        };
        self.names.names.clone_from(&counters.snapshot.names);
        self.before = Some(counters);
        if self.is_open {
            self.ensure_listener(&view);
        }
        Ok((rates, clients))
    }

    /// Waits until the next look is due, or until `is_over` returns true.
    pub(super) fn wait(&mut self, is_over: impl Fn() -> bool) {
        let end = Instant::now() + if self.is_first { FIRST } else { INTERVAL };
        self.is_first = false;
        while Instant::now() < end && !is_over() {
            thread::sleep(POLL.min(end.saturating_duration_since(Instant::now())));
            self.take_events();
        }
    }

    /// Starts to listen for events; each of several listeners gets every event.
    fn ensure_listener(&mut self, view: &View) {
        if self.listener.is_none() {
            // If this fails, there are no examples, but the counters are still read.
            self.listener = view.listen(0).ok().map(|listener| (listener, Instant::now()));
        }
    }

    fn take_events(&mut self) {
        let Some((mut listener, mut renewed)) = self.listener.take() else { return };
        let now = Instant::now();
        if now - renewed >= Listener::RENEWAL {
            if listener.renew().is_err() {
                return;
            }
            renewed = now;
        }
        let mut last: BTreeMap<u32, VecDeque<_>> = BTreeMap::new();
        while let Some(event) = listener.next_event() {
            // In a flood of events, only the last ones of each reason are formatted.
            let events = last.entry(event.reason).or_default();
            events.push_back(event);
            if events.len() > EXAMPLES {
                events.pop_front();
            }
        }
        let world = MonitorContext::now();
        for event in last.into_values().flatten() {
            let line = MonitorLine::new(&event, &self.names, &world);
            let Some(reason) = line.reason() else { continue };
            let examples = self.examples.entry(reason).or_default();
            examples.push_front(line);
            examples.truncate(EXAMPLES);
        }
        self.listener = Some((listener, renewed));
    }
}
