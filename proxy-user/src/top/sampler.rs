//! Reads the maps in a separate thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::monitor::{MonitorContext, MonitorLine};
use crate::cli::show::{AgentState, probe};
use crate::maps::view::{FlowRow, LastEvents, Snapshot, View};
use crate::rates::Counters;
use proxy_cli::args::top::{Screen, TopArgs};
use proxy_cli::value::Listen;

/// How often the ring of events is read; the ring holds the events of a far longer time.
const POLL: Duration = Duration::from_millis(50);

/// The shown screen, shared with the thread: connections and events are read only while they are shown.
#[derive(Clone, Debug)]
pub(super) struct ShownScreen(Arc<AtomicU8>);

impl ShownScreen {
    pub(super) fn show(&self, screen: Screen) {
        self.0.store(screen as u8, Ordering::Relaxed);
    }

    fn screen(&self) -> Screen {
        let shown = self.0.load(Ordering::Relaxed);
        [Screen::Drops, Screen::Flows].into_iter().find(|screen| *screen as u8 == shown).unwrap_or_default()
    }
}

/// State of the thread.
pub(super) struct Sampler {
    view: View,
    bpffs: PathBuf,
    interval: Duration,
    listen: Option<Listen>,
    /// The events since the previous look.
    events: LastEvents,
    names: Snapshot,
}

impl Sampler {
    pub(super) fn new(view: View, args: &TopArgs) -> Self {
        Self {
            view,
            bpffs: args.maps.bpffs.clone(),
            interval: args.interval.max(POLL),
            listen: args.agent.metrics_bind_address,
            events: LastEvents::default(),
            names: Snapshot::default(),
        }
    }

    /// Samples periodically, until the receiver is gone.
    pub(super) fn start(mut self, samples: SyncSender<Sample>) -> ShownScreen {
        let wanted = ShownScreen(Arc::default());
        let shown = wanted.clone();
        thread::spawn(move || {
            let mut sample = self.first(shown.screen());
            while samples.send(sample).is_ok() {
                sample = self.follow(|| shown.screen());
            }
        });
        wanted
    }

    /// Reads the maps now.
    pub(super) fn first(&mut self, screen: Screen) -> Sample {
        self.ensure_listener(screen);
        self.sample(screen)
    }

    /// Reads the maps after an interval.
    pub(super) fn next(&mut self, screen: Screen) -> Sample {
        self.follow(|| screen)
    }

    fn follow(&mut self, screen: impl Fn() -> Screen) -> Sample {
        let (end, before) = (Instant::now() + self.interval, screen());
        while Instant::now() < end {
            thread::sleep(POLL.min(end.saturating_duration_since(Instant::now())));
            self.ensure_listener(screen());
            if screen() != before {
                // The data of the new screen have not been read yet.
                break;
            }
        }
        self.sample(screen())
    }

    fn sample(&mut self, screen: Screen) -> Sample {
        // The path is resolved again for each look: after an upgrade the maps are in another folder.
        if let Ok(view) = View::open(&self.bpffs) {
            self.view = view;
        }
        let counters = Counters::read(&self.view).map_err(|error| error.to_string());
        if let Ok(counters) = &counters {
            self.names.names.clone_from(&counters.snapshot.names);
        }
        let flows = if screen == Screen::Flows { self.view.flows().unwrap_or_default() } else { Vec::new() };
        Sample { counters, agent: probe(self.listen), flows, examples: self.examples() }
    }

    fn examples(&mut self) -> Vec<(&'static str, String)> {
        let world = MonitorContext::now();
        let events = self.events.take();
        let lines = events.map(|event| MonitorLine::new(&event, &self.names, &world));
        lines.filter_map(|line| Some((line.reason()?, line.text()))).collect()
    }

    /// Listens for events while drops are shown; each of several listeners gets every event.
    fn ensure_listener(&mut self, screen: Screen) {
        if screen != Screen::Drops {
            self.events.stop();
            return;
        }
        self.events.read(Some(&self.view));
    }
}

/// The result of one look at the maps.
#[derive(Debug)]
pub(super) struct Sample {
    /// The counters, or why they cannot be read.
    pub counters: Result<Counters, String>,
    /// State of the agent.
    pub agent: AgentState,
    /// Flows, if they are shown.
    pub flows: Vec<FlowRow>,
    /// Refused and dropped packets and calls since the previous look, if shown: the reason's label, and the event as text.
    pub examples: Vec<(&'static str, String)>,
}
