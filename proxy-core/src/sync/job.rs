//! The work of one sync for a Service port, and its errors.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::model::plural::plural;
use proxy_common::service::ServiceEntry;

use super::extents::NoRoom;
use super::ids::Exhausted;
use super::ranges::RangeSet;
use crate::model::problem::chain;
use crate::model::{Problem, SortedMap};
use crate::plan::ServicePortName;
use crate::plan::maglev::Member;
use crate::store::{Backend, FrontendKey, MapError, Write};

/// What a write belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    /// A Service port.
    Port(ServicePortName),
    /// No Service port: entries of the node, and entries that are no longer needed.
    NoPort,
}

/// The work for an owner in one sync, and its progress.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) owner: Owner,
    pub(super) id: Option<u32>,
    /// `None`: the port has no frontend, so it should not be in the maps.
    pub(super) wanted: Option<DesiredPort>,
    /// Extents allocated in this sync.
    pub(super) extents: Vec<u32>,
    /// Maglev tables allocated in this sync.
    pub(super) tables: Vec<u32>,
    /// The set of source ranges that it uses; 0: none.
    pub(super) range_set: u32,
    pub(super) cause: Option<SyncError>,
    /// The later phases skip this job.
    pub(super) stopped: bool,
    /// The job has reached the commit, in which a failed entry does not stop the others.
    pub(super) committing: bool,
    /// The job has stopped and its port has no frontend in the maps: nothing of it stays there.
    pub(super) abandoned: bool,
}

/// The desired state of a Service port, with its ids.
#[derive(Debug, Default)]
pub(super) struct DesiredPort {
    pub(super) rows: SortedMap<u32, Backend>,
    /// Each with the ids of its slots: sorted, or evenly spread by weight.
    pub(super) frontends: Vec<(FrontendKey, ServiceEntry, Vec<u32>)>,
    /// The members of its Maglev tables, sorted by address: `false` for policy Cluster, `true` for policy Local.
    pub(super) tables: BTreeMap<bool, Vec<Member>>,
    /// Time after the removal of an endpoint until its connections are reset; `None`: they drain.
    pub(super) reset_after: Option<Duration>,
    /// Source ranges of its load balancer addresses; `None`: no frontend has any.
    pub(super) ranges: Option<RangeSet>,
}

impl Owner {
    /// Returns the Service port, if it is one.
    pub(super) fn port(&self) -> Option<&ServicePortName> {
        match self {
            Self::Port(port) => Some(port),
            Self::NoPort => None,
        }
    }
}

impl Job {
    pub(super) fn new(owner: Owner) -> Self {
        Self {
            owner,
            id: None,
            wanted: None,
            extents: Vec::new(),
            tables: Vec::new(),
            range_set: 0,
            cause: None,
            stopped: false,
            committing: false,
            abandoned: false,
        }
    }

    /// Returns the Service port of the job, if it has one.
    pub(super) fn port(&self) -> Option<&ServicePortName> {
        self.owner.port()
    }

    /// Stops the job, and records the cause ([`note`]).
    pub(super) fn stop(&mut self, cause: impl Into<SyncError>) {
        note(&mut self.cause, cause.into());
        self.stopped = true;
    }
}

/// The reason why a Service port could not be programmed. Its previous entries stay.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// A write to a map failed.
    #[error(transparent)]
    Map(#[from] MapError),
    /// There are more Service ports than ids.
    #[error("all {} ids of Service ports are in use; raise --max-services", .0.limit)]
    Services(Exhausted),
    /// There are more endpoints than ids. Endpoints that have an id are served.
    #[error("all {} ids of endpoints are in use; raise --max-backends", .0.limit)]
    Backends(Exhausted),
    /// The last ids are for namespaces that use fewer, and some are free again when those of removed endpoints are.
    #[error(
        "{used} of {limit} ids of endpoints are in use, and the last ones are for namespaces with fewer endpoints; raise --max-backends"
    )]
    ReservedBackends {
        /// The ids in use, those of removed endpoints included.
        used: usize,
        /// The number of ids.
        limit: u32,
    },
    /// No free range of `slots` is long enough.
    #[error("no room for {}: {} are free, the longest free range has {}; raise --max-slots", plural(.0.wanted, "slot"), .0.free, .0.longest)]
    Slots(NoRoom),
    /// No free range of `maglev` is long enough. Without a table, the hash selects one of the slots, and more connections
    /// move when endpoints change.
    #[error("no room for a Maglev table of {} words: {} are free, the longest free range has {}; raise --max-maglev-words", .0.wanted, .0.free, .0.longest)]
    Tables(NoRoom),
    /// The same while previous tables leave, whose room the next try gets; the port keeps its table for so long.
    #[error("a Maglev table of {} words waits for the room of previous ones", .0.wanted)]
    TableWaits(NoRoom),
    /// The table of source ranges has too few free entries.
    #[error("no room for {}: {} are free; raise --max-source-ranges", plural(.0.wanted, "source range"), .0.free)]
    Ranges(NoRoom),
    /// Another Service port with the same source ranges could not write them.
    #[error("the source ranges are not written completely")]
    IncompleteRanges,
    /// Frontends took the space of entries of cluster addresses.
    #[error("no room left, because frontends need it; raise --max-frontends")]
    Addresses,
    /// The names are longer than the API server allows.
    #[error("the name is too long for the map names")]
    Name,
}

impl SyncError {
    /// Returns what the error means for a port that it has stopped.
    pub(super) const fn effect(&self) -> Effect {
        match self {
            Self::Map(MapError::Full { .. }) => Effect::Object,
            Self::Map(_) => Effect::Node,
            _ => Effect::Object,
        }
    }

    /// Converts the error to a problem of the owner's Service, or of the node.
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

/// Records the first cause that is not just a wait.
pub(super) fn note(known: &mut Option<SyncError>, cause: SyncError) {
    if matches!(known, None | Some(SyncError::TableWaits(_))) {
        *known = Some(cause);
    }
}

/// The first pause after a failure; each further one is twice as long.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// The longest pause.
const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// A failure to write the desired state, and the time of the next try.
#[derive(Debug)]
pub(super) struct Failure {
    attempts: u32,
    pub(super) retry: Instant,
    pub(super) problem: Problem,
    pub(super) effect: Effect,
}

/// What a failure means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The port serves, without all that it asks for.
    Degraded,
    /// The port serves with what it had until there is room, which is no problem.
    Waits,
    /// The port's objects ask for what this node cannot do: they do not fit.
    Object,
    /// The kernel refuses what it should accept.
    Node,
}

impl Failure {
    /// Creates a failure; the pause grows with the attempts of the failure `before`.
    pub(super) fn after(before: Option<&Self>, problem: Problem, now: Instant) -> Self {
        let attempts = before.map_or(0, |failure| failure.attempts);
        Self { attempts: attempts + 1, retry: now + pause(attempts), problem, effect: Effect::Object }
    }
}

fn pause(attempts: u32) -> Duration {
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

/// Every frontend that a job may have changed: those that it has and those that it should have.
pub(super) type Touched = BTreeSet<FrontendKey>;
