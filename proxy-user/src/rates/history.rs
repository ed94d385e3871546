//! The last rates of Service ports, in bounded memory.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::{Rates, Traffic};

/// One point of a history: a [`Traffic`] in half of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Point {
    /// New connections per second.
    pub connections: f32,
    /// Packets per second.
    pub packets: f32,
    /// Bytes per second.
    pub bytes: f32,
    /// Refusals and drops per second.
    pub failures: f32,
}

impl From<Traffic> for Point {
    fn from(rates: Traffic) -> Self {
        Self {
            connections: rates.connections as f32,
            packets: rates.packets as f32,
            bytes: rates.bytes as f32,
            failures: rates.failures as f32,
        }
    }
}

impl Point {
    fn is_silent(&self) -> bool {
        *self == Self::default()
    }
}

/// The rates of one Service port, up to the last reading.
#[derive(Clone, Debug, Default)]
struct Series {
    points: VecDeque<Point>,
    /// The number of the last reading with traffic.
    active: u64,
}

/// The last rates of the sum of all Service ports, and of the Service ports that had traffic most recently.
#[derive(Clone, Debug)]
pub struct History {
    points: usize,
    most: usize,
    samples: u64,
    total: VecDeque<Point>,
    /// Series by id, with the key ([`ServiceRates::key`](super::ServiceRates::key)) of the Service port that had the id.
    series: BTreeMap<u32, (String, Series)>,
}

impl History {
    /// Creates a history of up to `points` points for each of up to `most` Service ports; a point takes 16 bytes.
    pub fn new(points: usize, most: usize) -> Self {
        Self { points, most, samples: 0, total: VecDeque::new(), series: BTreeMap::new() }
    }

    /// Adds the rates of the last reading. Forgets removed Service ports; if there are too many, forgets those that have
    /// been silent for longest.
    pub fn add(&mut self, rates: &Rates) {
        self.samples += 1;
        push(&mut self.total, rates.total.into(), self.points);
        let mut series = std::mem::take(&mut self.series);
        for service in &rates.services {
            let point = Point::from(service.rates);
            let key = service.key();
            let known = series.remove(&service.id).filter(|(known, _)| *known == key);
            if known.is_none() && point.is_silent() {
                continue;
            }
            let (key, mut one) = known.unwrap_or_else(|| (key, Series::default()));
            if !point.is_silent() {
                one.active = self.samples;
            }
            push(&mut one.points, point, self.points);
            self.series.insert(service.id, (key, one));
        }
        while self.series.len() > self.most {
            let oldest = self.series.iter().min_by_key(|(_, (_, one))| one.active).map(|(id, _)| *id);
            oldest.map(|id| self.series.remove(&id));
        }
    }

    /// Returns the sum of all Service ports, oldest point first.
    pub fn total(&self) -> impl DoubleEndedIterator<Item = Point> {
        self.total.iter().copied()
    }

    /// Returns the points of a Service port by its id, oldest first; none if it had no traffic, or its series was dropped
    /// as too old.
    pub fn of(&self, id: u32) -> impl DoubleEndedIterator<Item = Point> {
        self.series.get(&id).into_iter().flat_map(|(_, one)| &one.points).copied()
    }
}

impl History {
    /// Returns the points of a Service port by its key, oldest first; none as for [`History::of`].
    pub fn by_key(&self, key: &str) -> impl DoubleEndedIterator<Item = Point> {
        let series = self.series.values().find(|(known, _)| known == key);
        series.into_iter().flat_map(|(_, one)| &one.points).copied()
    }
}

fn push(points: &mut VecDeque<Point>, point: Point, most: usize) {
    points.push_back(point);
    while points.len() > most {
        points.pop_front();
    }
}
