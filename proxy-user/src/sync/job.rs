//! What one sync does for a Service port, and why it may fail.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use proxy_common::service::ServiceEntry;

use super::extents::NoRoom;
use super::ids::Exhausted;
use crate::maps::{Backend, FrontendKey, MapError, Write};
use crate::model::problem::chain;
use crate::model::{Problem, SortedMap};
use crate::plan::ServicePortName;
use crate::plan::maglev::Member;

/// Whom writes are for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    /// A Service port.
    Port(ServicePortName),
    /// None: entries of the node, and those that are no longer needed.
    Upkeep,
}

/// What is done for an owner in one sync: what a port should be, and how far it got.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) owner: Owner,
    pub(super) id: Option<u32>,
    /// `None`: it has no frontend, so it should not be in the maps.
    pub(super) wanted: Option<Wanted>,
    /// Extents allocated in this sync.
    pub(super) extents: Vec<u32>,
    /// Maglev tables allocated in this sync.
    pub(super) tables: Vec<u32>,
    pub(super) cause: Option<SyncError>,
    /// It goes no further.
    pub(super) stopped: bool,
    /// It got as far as the commit, where an entry that fails does not stop the others.
    pub(super) committing: bool,
}

/// What a Service port should be, with its ids.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) rows: SortedMap<u32, Backend>,
    /// With the ids of each frontend's slots: sorted, or in the order of turns.
    pub(super) frontends: Vec<(FrontendKey, ServiceEntry, Vec<u32>)>,
    /// The endpoints of its Maglev tables, by address: those of policy Cluster, and those of policy Local.
    pub(super) tables: BTreeMap<bool, Vec<Member>>,
    /// So long after an endpoint has left, connections to it are reset; `None`: they go on.
    pub(super) reset_after: Option<Duration>,
    /// Clients that its load balancer addresses let in.
    pub(super) ranges: BTreeSet<IpNet>,
}

impl Job {
    pub(super) fn new(owner: Owner) -> Self {
        Self {
            owner,
            id: None,
            wanted: None,
            extents: Vec::new(),
            tables: Vec::new(),
            cause: None,
            stopped: false,
            committing: false,
        }
    }

    /// The port, if it is one's.
    pub(super) fn port(&self) -> Option<&ServicePortName> {
        match &self.owner {
            Owner::Port(port) => Some(port),
            Owner::Upkeep => None,
        }
    }

    /// It cannot go on.
    pub(super) fn stop(&mut self, cause: impl Into<SyncError>) {
        self.cause.get_or_insert(cause.into());
        self.stopped = true;
    }
}

/// What kept a Service port from being programmed. What was there before stays.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// A write to a map failed.
    #[error(transparent)]
    Map(#[from] MapError),
    /// There are more Service ports than ids.
    #[error("all {} ids of Service ports are in use; raise --max-services", .0.limit)]
    Services(Exhausted),
    /// There are more endpoints than ids. Those that have one are served.
    #[error("all {} ids of endpoints are in use; raise --max-backends", .0.limit)]
    Backends(Exhausted),
    /// No part of `slots` is long enough.
    #[error("no room for {} slots: {} are free, the longest free range has {}; raise --max-slots", .0.wanted, .0.free, .0.longest)]
    Slots(NoRoom),
    /// No part of `maglev` is long enough. Without a table, a hash takes one of the slots: more connections move when endpoints
    /// change.
    #[error("no room for a Maglev table of {} words: {} are free, the longest free range has {}; raise --max-maglev-words", .0.wanted, .0.free, .0.longest)]
    Tables(NoRoom),
    /// Frontends took the room of addresses.
    #[error("no room left, because frontends need it; raise --max-frontends")]
    Addresses,
    /// The names are longer than the API server allows.
    #[error("the name is too long for the map names")]
    Name,
}

impl SyncError {
    /// As a report about what it kept from being done.
    pub(super) fn problem(&self, owner: &Owner) -> Problem {
        let message = chain(self);
        let Owner::Port(port) = owner else {
            let message = format!("cannot change map entries that belong to no Service port: {message}");
            return Problem { object: "Node".to_owned(), field: "maps".to_owned(), message };
        };
        Problem {
            object: format!("Service {}/{}", port.namespace, port.name),
            field: if port.port.is_empty() {
                "spec.ports".to_owned()
            } else {
                format!("spec.ports[{}]", port.port)
            },
            message: format!("{} {}: {message}", port.protocol, port.family),
        }
    }
}

/// The first pause after a failure; each further one is twice as long.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// The longest pause.
const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// Something that is not in the maps as it should be, and when it is tried again.
#[derive(Debug)]
pub(super) struct Failure {
    attempts: u32,
    pub(super) retry: Instant,
    pub(super) problem: Problem,
}

impl Failure {
    /// After the one before, if there was one.
    pub(super) fn after(before: Option<&Self>, problem: Problem, now: Instant) -> Self {
        let attempts = before.map_or(0, |failure| failure.attempts);
        Self { attempts: attempts + 1, retry: now + pause(attempts), problem }
    }
}

pub(super) fn pause(attempts: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1 << attempts.min(16)).min(RETRY_LONGEST)
}

/// Writes of one phase, each with the job it belongs to.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) owners: Vec<usize>,
    pub(super) writes: Vec<Write>,
}

impl Steps {
    pub(super) fn push(&mut self, owner: usize, write: Write) {
        self.owners.push(owner);
        self.writes.push(write);
    }
}

/// Every frontend that a job may have changed: the ones it has and the ones it should have.
pub(super) type Touched = BTreeSet<FrontendKey>;
