//! The state of the display, and the effects of keys. This module neither reads nor draws.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::sampler::Sample;
use crate::cli::selector::SelectInMaps as _;
use crate::cli::show::AgentState;
use crate::maps::view::{FlowRow, LastEvents};
use crate::rates::{Counters, History, Rates, ReasonRate, ServiceRates};
use proxy_cli::args::top::{Screen, SortBy};
use proxy_cli::selector::ServiceSelector;
use proxy_core::model::FlowState;

/// Number of points of each curve, and maximum number of Services that have one.
const CURVE: usize = 120;
const CURVES: usize = 4096;
/// Number of rows that a page key moves the cursor.
const PAGE: usize = 10;

/// The state of the display.
#[expect(clippy::struct_excessive_bools, reason = "facts of what is shown, each apart")]
#[derive(Debug)]
pub(super) struct Top {
    pub screen: Screen,
    pub sort: SortBy,
    pub filter: String,
    /// Services that are shown.
    pub services: ServiceSelector,
    pub interval: Duration,
    /// Keys are added to the filter.
    pub is_typing: bool,
    pub is_paused: bool,
    pub shows_help: bool,
    pub quits: bool,
    /// The frame is printed as text, not on a terminal: no row is selected, and no keys are shown.
    pub is_printed: bool,
    /// Id of the Service port whose endpoints are shown.
    pub opened: Option<u32>,
    /// Number of the selected row.
    pub cursor: usize,
    /// The user moved the cursor to a row, so it stays with that Service when the order changes.
    follows_service: bool,
    pub agent: Option<AgentState>,
    /// Why the maps cannot be read.
    pub failure: Option<String>,
    pub rates: Rates,
    pub history: History,
    pub flows: Vec<FlowRow>,
    /// Names of Service ports by id, for the flows.
    pub names: BTreeMap<u32, String>,
    /// The last examples of each reason, newest first.
    pub examples: BTreeMap<&'static str, VecDeque<String>>,
    before: Option<Counters>,
}

impl Top {
    pub(super) fn new(screen: Screen, sort: SortBy, filter: &str, interval: Duration) -> Self {
        Self {
            screen,
            sort,
            filter: filter.to_owned(),
            services: ServiceSelector::default(),
            interval,
            is_typing: false,
            is_paused: false,
            shows_help: false,
            quits: false,
            is_printed: false,
            opened: None,
            cursor: 0,
            follows_service: false,
            agent: None,
            failure: None,
            rates: Rates::default(),
            history: History::new(CURVE, CURVES),
            flows: Vec::new(),
            names: BTreeMap::new(),
            examples: BTreeMap::new(),
            before: None,
        }
    }

    /// Takes in a look. Returns whether it is shown: not while the display is paused.
    pub(super) fn take(&mut self, sample: Sample) -> bool {
        let chosen = self.chosen();
        for (reason, text) in sample.examples {
            let examples = self.examples.entry(reason).or_default();
            examples.push_front(text);
            examples.truncate(LastEvents::MOST);
        }
        let counters = match sample.counters {
            Ok(counters) => counters,
            Err(failure) => {
                self.failure = Some(failure);
                self.before = None;
                return true;
            }
        };
        let mut rates = Rates::between(self.before.as_ref(), &counters);
        let mut flows = sample.flows;
        if !self.services.is_all() {
            rates.services.retain(|row| self.services.takes(row.id, &counters.snapshot));
            flows.retain(|row| self.services.takes(row.service, &counters.snapshot));
        }
        let is_first = self.before.is_none();
        let names = counters.snapshot.names.iter().map(|(id, name)| (*id, name.to_string())).collect();
        self.before = Some(counters);
        if self.is_paused {
            return false;
        }
        if !is_first {
            self.history.add(&rates);
        }
        (self.names, self.agent, self.failure) = (names, Some(sample.agent), None);
        (self.rates, self.flows) = (rates, flows);
        self.flows.retain(|flow| flow.state != FlowState::Expired);
        self.flows.sort_by_key(|flow| flow.idle);
        if self.opened.is_some_and(|id| self.service(id).is_none()) {
            self.opened = None;
        }
        self.choose(chosen);
        true
    }

    pub(super) fn service(&self, id: u32) -> Option<&ServiceRates> {
        self.rates.services.iter().find(|service| service.id == id)
    }

    /// Returns the id of the Service that the cursor stays with.
    fn chosen(&self) -> Option<u32> {
        self.selected_service().filter(|_| self.follows_service).map(|service| service.id)
    }

    fn choose(&mut self, chosen: Option<u32>) {
        let place = chosen.and_then(|id| self.services().iter().position(|service| service.id == id));
        self.cursor = place.unwrap_or(self.cursor).min(self.rows().saturating_sub(1));
    }

    fn selected_service(&self) -> Option<&ServiceRates> {
        let is_list = self.screen == Screen::Services && self.opened.is_none();
        self.services().get(self.cursor).copied().filter(|_| is_list)
    }

    /// Returns the Service ports that match the filter, sorted.
    pub(super) fn services(&self) -> Vec<&ServiceRates> {
        let mut rows: Vec<_> = self.rates.services.iter().filter(|row| self.takes_service(row)).collect();
        // Rows of the same rate stay in the order of names: the sort is stable.
        rows.sort_by(|one, other| {
            let by = |of: fn(&ServiceRates) -> f64| of(other).total_cmp(&of(one));
            let most = by(|row| row.rates.connections).then(by(|row| row.rates.packets));
            match self.sort {
                SortBy::Connections => most,
                SortBy::Packets => by(|row| row.rates.packets),
                SortBy::Bytes => by(|row| row.rates.bytes),
                SortBy::Failures => by(|row| row.rates.failures).then(most),
                SortBy::Name => Ordering::Equal,
            }
        });
        rows
    }

    fn takes_service(&self, row: &ServiceRates) -> bool {
        self.matches(&row.service)
            || row.frontends.iter().any(|destination| self.matches(&destination.to_string()))
    }

    fn matches(&self, text: &str) -> bool {
        let (text, filter) = (text.to_lowercase(), self.filter.to_lowercase());
        text.contains(&filter)
    }

    /// Returns the reasons that match the filter, the most frequent first.
    pub(super) fn reasons(&self) -> Vec<&ReasonRate> {
        let mut rows: Vec<_> = self.rates.reasons.iter().filter(|row| self.matches(row.reason)).collect();
        rows.sort_by(|one, other| other.rate.total_cmp(&one.rate).then(other.total.cmp(&one.total)));
        rows
    }

    /// Returns the flows that match the filter, the one with the most recent packet first.
    pub(super) fn shown_flows(&self) -> Vec<&FlowRow> {
        let takes = |flow: &&FlowRow| {
            let addresses = [flow.client, flow.frontend, flow.backend];
            addresses.iter().any(|address| self.matches(&address.to_string()))
                || self.names.get(&flow.service).is_some_and(|name| self.matches(name))
                || self.matches(flow.state.label())
        };
        self.flows.iter().filter(takes).collect()
    }

    /// Returns the number of rows of the screen.
    pub(super) fn rows(&self) -> usize {
        match (self.screen, self.opened) {
            (Screen::Services, Some(id)) => self.service(id).map_or(0, |service| service.endpoints.len()),
            (Screen::Services, None) => self.services().len(),
            (Screen::Drops, _) => self.reasons().len(),
            (Screen::Flows, _) => self.shown_flows().len(),
        }
    }

    /// Handles a key.
    pub(super) fn key(&mut self, key: KeyEvent) {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            self.quits = true;
        } else if self.is_typing {
            self.type_key(key.code);
        } else if self.shows_help {
            self.shows_help = false;
        } else {
            self.command(key.code);
        }
    }

    fn type_key(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(sign) => self.filter.push(sign),
            _ => {}
        }
        self.cursor = 0;
    }

    fn command(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('q') => self.quits = true,
            KeyCode::Char('?' | 'h') => self.shows_help = true,
            KeyCode::Char(' ' | 'p') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => {
                self.is_typing = true;
                self.opened = None;
            }
            KeyCode::Char('s') => {
                let chosen = self.chosen();
                self.sort = next(self.sort);
                self.choose(chosen);
            }
            KeyCode::Char('1') => self.go(Screen::Services),
            KeyCode::Char('2') => self.go(Screen::Drops),
            KeyCode::Char('3') => self.go(Screen::Flows),
            KeyCode::Tab => self.go(match self.screen {
                Screen::Services => Screen::Drops,
                Screen::Drops => Screen::Flows,
                Screen::Flows => Screen::Services,
            }),
            KeyCode::Enter | KeyCode::Right | KeyCode::Char('l') => {
                if let Some(id) = self.selected_service().map(|service| service.id) {
                    (self.opened, self.cursor) = (Some(id), 0);
                }
            }
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => self.back(),
            KeyCode::Up | KeyCode::Char('k') => self.move_to(self.cursor.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.move_to(self.cursor + 1),
            KeyCode::PageUp => self.move_to(self.cursor.saturating_sub(PAGE)),
            KeyCode::PageDown => self.move_to(self.cursor + PAGE),
            KeyCode::Home | KeyCode::Char('g') => self.move_to(0),
            KeyCode::End | KeyCode::Char('G') => self.move_to(usize::MAX),
            _ => {}
        }
    }

    /// Moves the cursor. In the first row, it does not stay with a Service.
    fn move_to(&mut self, row: usize) {
        self.cursor = row.min(self.rows().saturating_sub(1));
        self.follows_service = self.cursor > 0;
    }

    fn go(&mut self, screen: Screen) {
        (self.screen, self.opened, self.cursor, self.follows_service) = (screen, None, 0, false);
    }

    /// Returns from the endpoints to the list of Services; in a list, clears the filter.
    fn back(&mut self) {
        if let Some(id) = self.opened.take() {
            self.cursor = self.services().iter().position(|service| service.id == id).unwrap_or_default();
        } else {
            self.filter.clear();
        }
    }
}

fn next(sort: SortBy) -> SortBy {
    match sort {
        SortBy::Connections => SortBy::Packets,
        SortBy::Packets => SortBy::Bytes,
        SortBy::Bytes => SortBy::Failures,
        SortBy::Failures => SortBy::Name,
        SortBy::Name => SortBy::Connections,
    }
}
