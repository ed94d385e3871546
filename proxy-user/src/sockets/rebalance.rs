//! Moves idle connections to endpoints that joined their Service (annotation `ballast.io/rebalance`).
//!
//! [`plan::rebalance`](proxy_core::plan::rebalance) decides how many connections of which endpoints. The kernel tells of a socket
//! when data was sent and received last, so that a connection that owes an answer is never closed. The entries of the flow table
//! tell only when the last packet passed, so a marked flow is reset by the packet programs at the client's next request, when all
//! earlier ones have been answered: [`is_moving`](proxy_common::conntrack::is_moving).

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::{Iterators, Reach, SweepError, get};
use crate::driver::Status;
use crate::host::diag::Diag;
use crate::host::netns::{self, Namespaces};
use crate::maps::view::{FlowId, RebalancedPort, View};
use crate::programs::Programs;
use proxy_common::socket::TranslatedSocket;
use proxy_core::model::net::IpFamily;
use proxy_core::plan::rebalance::Moves;

/// Pause between two rounds.
const PERIOD: Duration = Duration::from_secs(1);
/// A connection is idle if nothing was sent for this long.
const IDLE: Duration = Duration::from_millis(500);

/// The connections that were reset in a round.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Closed sockets.
    pub sockets: BTreeMap<IpFamily, u64>,
    /// Flows that are reset at their client's next request.
    pub flows: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Connection {
    /// By its cookie.
    Socket(u64),
    Flow(FlowId),
}

/// Moves idle connections.
#[derive(Debug)]
pub struct Mover {
    view: View,
    iterators: Iterators,
    reach: Reach,
    /// Whether it also moves flows of the packet path.
    with_flows: bool,
    seed: u64,
    /// The connections of each Service port, by its id, and the time of the last round.
    ports: BTreeMap<u32, (Moves<Connection>, Instant)>,
}

impl Mover {
    /// Creates a mover that reads the maps of `view`.
    pub fn new(view: View, iterators: Iterators, reach: Reach, with_flows: bool) -> Self {
        let seed = u64::from(std::process::id()) ^ u64::from(crate::maps::view::monotonic().subsec_nanos());
        Self { view, iterators, reach, with_flows, seed, ports: BTreeMap::new() }
    }

    /// Runs one round for the Services that endpoints joined lately. Blocks for some milliseconds.
    pub fn run_round(&mut self) -> Result<Moved, SweepError> {
        let ports = self.view.rebalanced()?;
        self.ports.retain(|id, _| ports.contains_key(id));
        if ports.is_empty() {
            return Ok(Moved::default());
        }
        let flows = if self.with_flows { self.view.movable_flows(&ports)? } else { Vec::new() };
        let sockets: Vec<_> = self.sockets()?.into_iter().filter(|socket| may_move(&ports, socket)).collect();
        let of_socket = |socket: &TranslatedSocket| {
            (socket.storage.service, Connection::Socket(socket.cookie), socket.storage.backend_id)
        };
        let of_flows = flows.iter().map(|flow| (flow.service, Connection::Flow(flow.id), flow.backend_id));
        let all: Vec<_> = of_flows.chain(sockets.iter().map(of_socket)).collect();
        self.begin_rounds(&ports, &all);
        let mut moved = Moved::default();
        let idle_flows = flows.iter().filter(|flow| flow.idle >= IDLE);
        let meant: Vec<_> = idle_flows
            .filter(|flow| self.take(flow.service, Connection::Flow(flow.id), flow.backend_id))
            .map(|flow| flow.id)
            .collect();
        moved.flows = self.view.move_flows(&meant)?;
        let candidates: BTreeMap<u64, (u32, u32)> = sockets
            .iter()
            .filter(|socket| {
                let (service, connection, backend) = of_socket(socket);
                self.ports.get(&service).is_some_and(|(moves, _)| moves.is_candidate(&connection, backend))
            })
            .map(|socket| (socket.cookie, (socket.storage.service, socket.storage.backend_id)))
            .collect();
        self.close(&candidates, &mut moved)?;
        Ok(moved)
    }

    /// Returns the sockets in reach that are connected to a Service.
    fn sockets(&mut self) -> Result<Vec<TranslatedSocket>, SweepError> {
        match self.reach {
            Reach::All => self.iterators.everywhere(),
            Reach::Own => {
                get(&self.iterators.load, &mut self.iterators.tcp)?.list().map_err(SweepError::Iterate)
            }
        }
    }

    fn begin_rounds(&mut self, ports: &BTreeMap<u32, RebalancedPort>, all: &[(u32, Connection, u32)]) {
        let now = Instant::now();
        let mut of_port: BTreeMap<u32, Vec<(Connection, u32)>> = BTreeMap::new();
        for (id, connection, backend) in all {
            of_port.entry(*id).or_default().push((*connection, *backend));
        }
        for (id, port) in ports {
            let own = of_port.remove(id).unwrap_or_default();
            let (moves, last) =
                self.ports.entry(*id).or_insert_with(|| (Moves::new(self.seed ^ u64::from(*id)), now));
            moves.begin_round(&port.shares, &own, now - *last, port.on_trial);
            *last = now;
        }
    }

    fn take(&mut self, service: u32, connection: Connection, backend: u32) -> bool {
        self.ports.get_mut(&service).is_some_and(|(moves, _)| moves.take(&connection, backend))
    }

    /// Closes those of these sockets that are idle and owe no answer, as many as may move. By cookie: Service port and endpoint.
    fn close(&mut self, candidates: &BTreeMap<u64, (u32, u32)>, moved: &mut Moved) -> Result<(), SweepError> {
        if candidates.is_empty() {
            return Ok(());
        }
        let namespaces = match self.reach {
            Reach::All => netns::all().map_err(SweepError::Processes)?,
            Reach::Own => Namespaces::default(),
        };
        let visit = |entered: io::Result<()>| {
            entered.map_err(SweepError::Enter)?;
            self.close_here(candidates, &mut moved.sockets)
        };
        netns::in_each(&namespaces, visit).into_iter().collect()
    }

    /// Does the same in this thread's network namespace.
    fn close_here(
        &mut self,
        candidates: &BTreeMap<u64, (u32, u32)>,
        closed: &mut BTreeMap<IpFamily, u64>,
    ) -> Result<(), SweepError> {
        let mut diag = Diag::open().map_err(SweepError::List)?;
        // Each is closed at once: until then, its client may send a request.
        let idle = diag.idle(IDLE).map_err(SweepError::List)?;
        for socket in idle {
            let Some((service, backend)) = candidates.get(&socket.cookie).copied() else { continue };
            if self.take(service, Connection::Socket(socket.cookie), backend) {
                match diag.destroy(&socket) {
                    Ok(()) => *closed.entry(IpFamily::of(socket.peer.ip())).or_default() += 1,
                    // The process has closed the socket itself.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(SweepError::End(error)),
                }
            }
        }
        Ok(())
    }
}

/// Runs until the driver ends. Moves connections while it says that endpoints joined; calls `report` after each round.
pub async fn run(
    programs: Arc<Programs>,
    bpffs: PathBuf,
    status: watch::Receiver<Status>,
    report: impl Fn(&Moved),
) {
    let iterators = Iterators::new(move |which| programs.socket_iterator(which));
    let reach = if netns::may_enter() { Reach::All } else { Reach::Own };
    let mover = match View::open(&bpffs) {
        Ok(view) => Mover::new(view, iterators, reach, true),
        Err(error) => {
            tracing::error!(%error, "connections do not move to endpoints that join");
            return;
        }
    };
    let is_due = || status.has_changed().is_ok().then(|| status.borrow().rebalances > 0);
    keep_moving(mover, PERIOD, is_due, report).await;
}

/// Runs rounds while there are Services whose connections move, and looks for such Services every `period` while `is_due`; ends when
/// it returns `None`.
pub(super) async fn keep_moving(
    mut mover: Mover,
    period: Duration,
    is_due: impl Fn() -> Option<bool>,
    report: impl Fn(&Moved),
) {
    let mut has_failed = false;
    loop {
        sleep(if mover.ports.is_empty() { period } else { PERIOD }).await;
        let Some(is_due) = is_due() else { return };
        if !is_due && mover.ports.is_empty() {
            continue;
        }
        let work = move || {
            let moved = mover.run_round();
            (mover, moved)
        };
        let Ok((back, moved)) = spawn_blocking(work).await else { return };
        mover = back;
        match moved {
            Ok(moved) => {
                if moved != Moved::default() {
                    let sockets: u64 = moved.sockets.values().sum();
                    tracing::debug!(
                        sockets,
                        flows = moved.flows,
                        "idle connections move to endpoints that joined"
                    );
                }
                report(&moved);
                has_failed = false;
            }
            Err(error) => {
                if !has_failed {
                    tracing::warn!(%error, "idle connections stay with their endpoints; retrying");
                }
                has_failed = true;
            }
        }
    }
}

fn may_move(ports: &BTreeMap<u32, RebalancedPort>, socket: &TranslatedSocket) -> bool {
    ports.get(&socket.storage.service).is_some_and(|port| port.may_move(socket))
}
