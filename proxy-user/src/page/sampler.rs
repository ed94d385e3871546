//! Reads the maps while a page is open.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::clients::{Client, KnownFlows, clients};
use crate::cli::monitor::{MonitorContext, MonitorLine};
use crate::maps::view::{LastEvents, Snapshot, View};
use crate::rates::{Counters, Rates};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time between the first two looks; it is shorter because a person who opens the page waits for the second one.
const FIRST: Duration = Duration::from_millis(500);
/// How often the ring of events is read; the ring holds the events of a far longer time.
const POLL: Duration = Duration::from_millis(50);

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
    events: LastEvents,
    examples: Examples,
}

impl<'a> Sampler<'a> {
    pub(super) fn new(bpffs: &'a Path, is_open: bool) -> Self {
        Self {
            bpffs,
            is_open,
            is_first: true,
            before: None,
            known: KnownFlows::default(),
            names: Snapshot::default(),
            events: LastEvents::default(),
            examples: Examples::new(),
        }
    }

    /// Reads the maps now, and returns what happened since the previous look.
    pub(super) fn sample(&mut self, problems: Vec<String>) -> Sample {
        let at = SystemTime::now();
        let read = self.read();
        let (rates, clients) = match read {
            Ok((rates, clients)) => (Ok(rates), clients),
            Err(failure) => {
                (self.before, self.known) = (None, KnownFlows::default());
                self.events.stop();
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
            self.events.read(Some(&view));
        }
        Ok((rates, clients))
    }

    /// Waits until the next look is due, or until `is_over` returns true.
    pub(super) fn wait(&mut self, is_over: impl Fn() -> bool) {
        let end = Instant::now() + if self.is_first { FIRST } else { INTERVAL };
        self.is_first = false;
        while Instant::now() < end && !is_over() {
            thread::sleep(POLL.min(end.saturating_duration_since(Instant::now())));
            self.events.read(None);
        }
        self.take_events();
    }

    fn take_events(&mut self) {
        let world = MonitorContext::now();
        for event in self.events.take() {
            let line = MonitorLine::new(&event, &self.names, &world);
            let Some(reason) = line.reason() else { continue };
            let examples = self.examples.entry(reason).or_default();
            examples.push_front(line);
            examples.truncate(LastEvents::MOST);
        }
    }
}

/// The last examples of each reason, newest first.
pub(super) type Examples = BTreeMap<&'static str, VecDeque<MonitorLine>>;

/// The result of one look at the maps.
#[derive(Debug)]
pub(super) struct Sample {
    /// Time of the look.
    pub at: SystemTime,
    /// Rates since the previous look, or why the maps cannot be read.
    pub rates: Result<Rates, String>,
    /// Clients of the Service ports; empty unless addresses are shown.
    pub clients: Vec<Client>,
    /// Examples of refused and dropped packets and calls since the page was opened; empty unless addresses are shown.
    pub examples: Examples,
    /// Current problems, in sentences.
    pub problems: Vec<String>,
}
