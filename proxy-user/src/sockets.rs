//! Connected sockets whose endpoint was removed.
//!
//! The peer address of such a socket is fixed, and no hook sees what the socket sends. (A flow of the packet path just
//! selects another endpoint.) So the agent closes the socket: UDP always, TCP if the removal policy of the Service is
//! `reset`. The socket's storage holds the backend that was selected, and iterators list the storages; the map `sockets`
//! holds UDP sockets whose storage could not be allocated. Sockets that were connected to the endpoint's own address are
//! not closed.
//!
//! After that, the next call of a UDP socket fails (ECONNABORTED if it waits, EDESTADDRREQ if it sends), and the
//! application connects again. A TCP socket fails at once (ECONNABORTED), and its endpoint gets a RST.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout_at};

use crate::driver::Status;
use crate::host::diag::{Diag, Sockets};
use crate::host::netns::{self, Namespaces};
use crate::maps::segments;
use crate::maps::view::{ServingEndpoints, StaleSocket, View, ViewError};
use crate::programs::{self, Iterated, Programs, SocketIterator};
use proxy_common::socket::TranslatedSocket;
use proxy_core::model::net::IpFamily;

mod helper;
pub mod rebalance;

pub use helper::{StandaloneError, run_standalone};

/// Returns the folder that `ballast end-udp-sockets` locks while it runs.
pub fn lock_of(bpffs: &Path) -> PathBuf {
    bpffs.join(programs::DIRECTORY).join(segments::FOLDER)
}

/// Delay before a sweep: a connect(2) that selected the endpoint just before its removal has returned by then, so the sweep
/// finds the socket connected.
const DELAY: Duration = Duration::from_millis(50);
/// Delay of one more sweep after a change: a process may be stopped for long between the selection and its connect(2), for
/// example because its cgroup has used up its CPU time.
const LATER: Duration = Duration::from_secs(5);
/// Pause between two sweeps, because each may visit hundreds of network namespaces.
const PAUSE: Duration = Duration::from_millis(500);
/// Pause after a failed sweep; it doubles with each further failure.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest such pause: the reason may be a missing permission, which a running process cannot get.
const LAST_RETRY: Duration = Duration::from_mins(1);

/// The result of a sweep.
#[derive(Debug, Default)]
pub struct Swept {
    /// Closed UDP sockets.
    pub ended: BTreeMap<IpFamily, u64>,
    /// Closed TCP sockets, whose connections were to be reset.
    pub reset: BTreeMap<IpFamily, u64>,
    /// Marked flows of the packet path, whose connections are reset at their next segment.
    pub marked: u64,
    /// Visited network namespaces.
    pub namespaces: u64,
    /// The first reason why some sockets may still be open: the sweep has failed and is retried.
    pub failure: Option<SweepError>,
}

/// The reason why sockets stay connected to a removed endpoint.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The maps cannot be read.
    #[error("cannot read the backends of sockets: {0}")]
    Maps(#[from] ViewError),
    /// The process may not enter other network namespaces.
    #[error("cannot enter the network namespaces of pods: {0}; grant CAP_SYS_ADMIN (setns(2))")]
    Enter(#[source] io::Error),
    /// A network namespace cannot be opened, for example because of the limit of open files.
    #[error("cannot open a network namespace: {0}; each one needs a file descriptor (ulimit -n)")]
    Open(#[source] io::Error),
    /// The network namespaces of some processes are not visible.
    #[error("cannot see the network namespaces of {0} processes; grant CAP_SYS_PTRACE")]
    Hidden(usize),
    /// The processes of this machine cannot be listed.
    #[error("cannot read network namespaces in /proc: {0}")]
    Processes(#[source] io::Error),
    /// The iterator fails.
    #[error("cannot list the backends of sockets: {0}")]
    Iterate(#[source] io::Error),
    /// The iterator cannot be loaded.
    #[error("cannot list the backends of sockets: {0}")]
    Load(#[source] programs::Error),
    /// The kernel does not list sockets.
    #[error("cannot list sockets: {0}; the kernel needs CONFIG_INET_UDP_DIAG and CONFIG_INET_TCP_DIAG")]
    List(#[source] io::Error),
    /// The kernel does not close sockets.
    #[error("cannot close sockets: {0}; the kernel needs CONFIG_INET_DIAG_DESTROY")]
    End(#[source] io::Error),
}

/// Finds and closes connected sockets whose endpoint was removed.
#[derive(Debug)]
pub struct Sweeper {
    view: View,
    iterators: Iterators,
    /// Stale sockets of the LRU maps that earlier sweeps searched for: most of them are closed, and they are not searched
    /// for again.
    known: BTreeSet<StaleSocket>,
    reach: Reach,
    /// Whether the next sweep visits every network namespace in reach: there may be a socket whose endpoint the maps no
    /// longer know.
    is_full: bool,
    /// Whether a sweep also marks flows of the packet path.
    marks: bool,
}

/// An iterator that is loaded when it is first needed; if that fails, again when it is needed again.
struct Loading {
    which: Iterated,
    loaded: Option<SocketIterator>,
}

/// The iterators that list the sockets which are connected to a Service.
pub struct Iterators {
    load: Box<dyn Fn(Iterated) -> Result<SocketIterator, programs::Error> + Send>,
    udp: Loading,
    tcp: Loading,
    /// `None`: the kernel refuses it.
    all: Option<Loading>,
}

impl Iterators {
    /// Returns the iterators that this function loads.
    pub fn new(load: impl Fn(Iterated) -> Result<SocketIterator, programs::Error> + Send + 'static) -> Self {
        let loading = |which| Loading { which, loaded: None };
        Self {
            load: Box::new(load),
            udp: loading(Iterated::Udp),
            tcp: loading(Iterated::Tcp),
            all: Some(loading(Iterated::All)),
        }
    }

    /// Returns the sockets of all network namespaces; `None` if the kernel does not list them at once. An error if it lacks
    /// memory or the like now.
    fn all(&mut self) -> Result<Option<Vec<TranslatedSocket>>, SweepError> {
        let Some(all) = self.all.as_mut() else { return Ok(None) };
        match get(&self.load, all).and_then(|iterator| iterator.list().map_err(SweepError::Iterate)) {
            Ok(listed) => Ok(Some(listed)),
            Err(error) if is_temporary(&error) => Err(error),
            Err(error) => {
                tracing::info!(%error, "the sockets of each network namespace are listed on their own from now on");
                self.all = None;
                Ok(None)
            }
        }
    }

    /// As [`Iterators::all`], if necessary from each network namespace.
    pub fn everywhere(&mut self) -> Result<Vec<TranslatedSocket>, SweepError> {
        if let Some(all) = self.all()? {
            return Ok(all);
        }
        // In a container, the processes of other namespaces are not even visible: a list without them would pass for all.
        if !netns::may_enter() {
            return Err(SweepError::Enter(io::Error::from_raw_os_error(libc::EPERM)));
        }
        let (udp, tcp) = (get(&self.load, &mut self.udp)?, get(&self.load, &mut self.tcp)?);
        let namespaces = netns::all().map_err(SweepError::Processes)?;
        let list = |entered: io::Result<()>| -> Result<Vec<_>, SweepError> {
            entered.map_err(SweepError::Enter)?;
            let both = [udp.list(), tcp.list()].into_iter().collect::<io::Result<Vec<_>>>();
            Ok(both.map_err(SweepError::Iterate)?.concat())
        };
        let mut found = Vec::new();
        for listed in netns::in_each(&namespaces, list) {
            found.extend(listed?);
        }
        unvisited(namespaces).map_or(Ok(found), Err)
    }
}

impl fmt::Debug for Iterators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iterators").finish_non_exhaustive()
    }
}

/// Whether the kernel may do later what failed: it had no memory, no descriptor, or no time.
fn is_temporary(error: &SweepError) -> bool {
    let lacks = [libc::ENOMEM, libc::EAGAIN, libc::EMFILE, libc::ENFILE, libc::EINTR];
    std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source())
        .filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error())
        .any(|code| lacks.contains(&code))
}

/// Returns the iterator, and loads it first if necessary.
fn get<'a>(
    load: &impl Fn(Iterated) -> Result<SocketIterator, programs::Error>,
    one: &'a mut Loading,
) -> Result<&'a SocketIterator, SweepError> {
    let loaded = match one.loaded.take() {
        Some(loaded) => loaded,
        None => load(one.which).map_err(SweepError::Load)?,
    };
    Ok(one.loaded.insert(loaded))
}

/// The network namespaces whose sockets are closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Every network namespace, also of pods.
    All,
    /// Only the caller's own network namespace; this needs only `CAP_NET_ADMIN`.
    Own,
}

impl Sweeper {
    /// Creates a sweeper that reads the maps of `view`.
    pub fn new(view: View, iterators: Iterators, reach: Reach) -> Self {
        Self { view, iterators, known: BTreeSet::new(), reach, is_full: true, marks: false }
    }

    /// Makes the sweeper also mark flows of the packet path.
    #[must_use]
    pub fn with_flows(self) -> Self {
        Self { marks: true, ..self }
    }

    /// Sweeps every network namespace in reach once; visits none if there is nothing to search for. The first sweep, and one
    /// after a failure, search in any case. Blocks for some milliseconds.
    pub fn sweep(&mut self) -> Swept {
        let swept = self.try_sweep().unwrap_or_else(Swept::failed);
        self.is_full = swept.failure.is_some();
        swept
    }

    fn try_sweep(&mut self) -> Result<Swept, SweepError> {
        let stale = self.view.stale()?;
        let fresh: BTreeSet<_> =
            stale.difference(&self.known).map(|one| (one.cookie, one.endpoint)).collect();
        let serving = self.view.serving_endpoints()?;
        let resets = !serving.reset().is_empty();
        let marked = if resets && self.marks { self.view.mark_flows()? } else { 0 };
        let mut swept = Swept { marked, ..Swept::default() };
        let all = if self.is_full { None } else { self.iterators.all()? };
        let any = |is_meant: &dyn Fn(&TranslatedSocket) -> bool| is_any(all.as_deref(), is_meant);
        let udp = any(&|socket| serving.may_be_left_by_udp(socket));
        let tcp = resets && any(&|socket| serving.to_be_reset(socket).is_some());
        if fresh.is_empty() && !udp && !tcp {
            self.known = stale;
            return Ok(swept);
        }
        let mut iterator = |is_wanted: bool, one| {
            let loaded = is_wanted.then(|| get(&self.iterators.load, one)).transpose();
            // The sweep goes on without an iterator, since the maps have some sockets, and fails at its end.
            loaded.unwrap_or_else(|failure| {
                swept.failure = Some(failure);
                None
            })
        };
        let (udp, tcp) = (iterator(udp, &mut self.iterators.udp), iterator(tcp, &mut self.iterators.tcp));
        let wanted = Sweep { fresh, udp, tcp, serving };
        let namespaces = match self.reach {
            Reach::All => netns::all().map_err(SweepError::Processes)?,
            Reach::Own => Namespaces::default(),
        };
        for visit in netns::in_each(&namespaces, |entered| wanted.visit(entered)) {
            swept.add(visit);
        }
        swept.failure = swept.failure.or_else(|| unvisited(namespaces));
        if swept.failure.is_none() {
            self.known = stale;
        }
        Ok(swept)
    }
}

/// Returns why some network namespaces were not visited.
fn unvisited(namespaces: Namespaces) -> Option<SweepError> {
    let hidden = (namespaces.hidden > 0).then_some(SweepError::Hidden(namespaces.hidden));
    namespaces.unopened.map(SweepError::Open).or(hidden)
}

/// Whether any of the sockets of all network namespaces may be meant; `None`: they are not known.
fn is_any(all: Option<&[TranslatedSocket]>, is_meant: &dyn Fn(&TranslatedSocket) -> bool) -> bool {
    all.is_none_or(|all| all.iter().any(is_meant))
}

impl Swept {
    fn failed(failure: SweepError) -> Self {
        Self { failure: Some(failure), ..Self::default() }
    }

    fn add(&mut self, visit: Self) {
        for (sum, counts) in [(&mut self.ended, visit.ended), (&mut self.reset, visit.reset)] {
            for (family, count) in counts {
                *sum.entry(family).or_default() += count;
            }
        }
        self.namespaces += visit.namespaces;
        self.failure = self.failure.take().or(visit.failure);
    }
}

/// What a sweep searches for in each network namespace.
struct Sweep<'a> {
    /// Cookies and peers of UDP sockets, from the LRU maps.
    fresh: BTreeSet<(u64, SocketAddr)>,
    /// Lists UDP sockets.
    udp: Option<&'a SocketIterator>,
    /// Lists TCP sockets, if there may be connections that are to be reset.
    tcp: Option<&'a SocketIterator>,
    serving: ServingEndpoints,
}

impl Sweep<'_> {
    /// Closes the stale sockets of this thread's network namespace.
    fn visit(&self, entered: io::Result<()>) -> Swept {
        entered.map_err(SweepError::Enter).and_then(|()| self.end()).unwrap_or_else(Swept::failed)
    }

    fn end(&self) -> Result<Swept, SweepError> {
        let mut swept = Swept { namespaces: 1, ..Swept::default() };
        let mut udp = meant(self.udp, |socket| self.serving.stale(socket))?;
        udp.extend(&self.fresh);
        let tcp = meant(self.tcp, |socket| self.serving.to_be_reset(socket))?;
        let udp = (Sockets::Udp, udp, &mut swept.ended);
        let tcp = (Sockets::Tcp, tcp, &mut swept.reset);
        for (which, meant, ended) in [udp, tcp].into_iter().filter(|(_, meant, _)| !meant.is_empty()) {
            swept.failure = swept.failure.take().or(end_each(which, &meant, ended)?);
        }
        Ok(swept)
    }
}

/// Returns cookies and peers of the listed sockets for which `is_meant` returns one.
fn meant(
    iterator: Option<&SocketIterator>,
    is_meant: impl Fn(&TranslatedSocket) -> Option<StaleSocket>,
) -> Result<BTreeSet<(u64, SocketAddr)>, SweepError> {
    let led = iterator.map_or_else(|| Ok(Vec::new()), SocketIterator::list).map_err(SweepError::Iterate)?;
    Ok(led.iter().filter_map(is_meant).map(|one| (one.cookie, one.endpoint)).collect())
}

/// Closes these sockets of this thread's network namespace; returns the first reason why one is still open.
fn end_each(
    which: Sockets,
    meant: &BTreeSet<(u64, SocketAddr)>,
    ended: &mut BTreeMap<IpFamily, u64>,
) -> Result<Option<SweepError>, SweepError> {
    let mut failure = None;
    let mut diag = Diag::open().map_err(SweepError::List)?;
    let sockets = diag.connected(which).map_err(SweepError::List)?;
    for socket in sockets.into_iter().filter(|socket| meant.contains(&(socket.cookie, socket.peer))) {
        match diag.destroy(&socket) {
            Ok(()) => *ended.entry(IpFamily::of(socket.peer.ip())).or_default() += 1,
            // The process has closed the socket itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => failure = failure.or(Some(SweepError::End(error))),
        }
    }
    Ok(failure)
}

/// Runs until the driver ends. Sweeps after the first sync, for endpoints that were removed while no agent ran, and after
/// each sync that removed UDP endpoints or marked endpoints for a reset. Calls `report` after every sweep.
pub async fn run(
    programs: Arc<Programs>,
    bpffs: PathBuf,
    mut status: watch::Receiver<Status>,
    report: impl Fn(&Swept),
) {
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    let iterators = Iterators::new(move |which| programs.socket_iterator(which));
    let reach = if netns::may_enter() { Reach::All } else { Reach::Own };
    if reach == Reach::Own {
        tracing::info!(
            "this agent may not end sockets of pods: without `ballast end-udp-sockets`, the packets of their connected UDP \
             sockets are translated instead of the sockets, and removal policy `reset` has no effect on their TCP sockets"
        );
    }
    let mut sweeper = match View::open(&bpffs) {
        Ok(view) => Sweeper::new(view, iterators, reach).with_flows(),
        Err(error) => {
            tracing::error!(%error, "connected sockets stay with removed endpoints");
            return;
        }
    };
    let sweep = move || sweeper.sweep();
    keep_sweeping(sweep, status, |status| status.udp_left + status.resets, report).await;
}

/// Sweeps at the start and whenever the count of removed endpoints has changed, each time once more [`LATER`], and again after
/// a failed sweep.
async fn keep_sweeping<S>(
    mut sweep: impl FnMut() -> Swept + Send + 'static,
    mut status: watch::Receiver<S>,
    count_left: fn(&S) -> u64,
    report: impl Fn(&Swept),
) {
    let (mut done, mut retry, mut later, mut failures) = (None, None::<Instant>, None::<Instant>, 0);
    loop {
        sleep(DELAY).await;
        let left = count_left(&status.borrow_and_update());
        let has_changed = done != Some(left);
        if has_changed || retry.into_iter().chain(later).any(|at| at <= Instant::now()) {
            later = later.filter(|at| *at > Instant::now());
            if has_changed {
                later = Some(Instant::now() + LATER);
            }
            let work = move || {
                let swept = sweep();
                (sweep, swept)
            };
            let Ok((back, swept)) = spawn_blocking(work).await else { return };
            sweep = back;
            note(&swept, failures);
            report(&swept);
            done = Some(left);
            failures = if swept.failure.is_some() { failures + 1 } else { 0 };
            retry = (failures > 0).then(|| Instant::now() + pause(failures));
            sleep(PAUSE).await;
        }
        let changed = match retry.into_iter().chain(later).min() {
            None => status.changed().await,
            // Wait for the time of the next sweep or for a change of the status.
            Some(at) => timeout_at(at, status.changed()).await.unwrap_or(Ok(())),
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Returns the pause after this number of failures in a row, at least 1.
fn pause(failures: u32) -> Duration {
    FIRST_RETRY.saturating_mul(1 << (failures - 1).min(10)).min(LAST_RETRY)
}

/// Logs the result of a sweep. Of several failures in a row, logs the first one and the success that follows them.
fn note(swept: &Swept, failures: u32) {
    let ended: u64 = swept.ended.values().sum();
    if ended > 0 {
        tracing::info!(
            sockets = ended,
            namespaces = swept.namespaces,
            "closed connected UDP sockets whose endpoint was removed"
        );
    }
    let reset: u64 = swept.reset.values().sum();
    if reset > 0 || swept.marked > 0 {
        tracing::info!(
            sockets = reset,
            flows = swept.marked,
            "reset connections whose endpoint was removed; flows are reset at their next segment"
        );
    }
    match &swept.failure {
        Some(failure) if failures == 0 => {
            tracing::warn!(error = %failure, "some connected sockets stay with removed endpoints; retrying");
        }
        None if failures > 0 => tracing::info!(failures, "swept all network namespaces again"),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn removed_endpoint_without_udp_sockets_needs_no_visit() {
        let of = |cookie| TranslatedSocket { cookie, ..TranslatedSocket::default() };
        let is_udp = |socket: &TranslatedSocket| socket.cookie == 7;
        assert!(!is_any(Some(&[]), &is_udp) && !is_any(Some(&[of(1), of(2)]), &is_udp));
        assert!(is_any(Some(&[of(1), of(7)]), &is_udp));
        assert!(is_any(None, &is_udp), "the kernel cannot list them");
    }

    #[test]
    fn the_pause_doubles_up_to_its_bound() {
        let pauses: Vec<_> = [1, 2, 3, 7, 40].map(|failures| pause(failures).as_secs()).into();
        assert_eq!(pauses, [1, 2, 4, 60, 60]);
    }

    #[tokio::test(start_paused = true)]
    async fn removed_endpoint_is_swept_once_more_later() {
        let (status, follows) = watch::channel(0);
        let (sender, mut swept) = mpsc::unbounded_channel();
        let report = move |_: &Swept| {
            let _ = sender.send(());
        };
        let task = tokio::spawn(keep_sweeping(Swept::default, follows, |left| *left, report));
        let mut count = || std::iter::from_fn(|| swept.try_recv().ok()).count();
        for _ in 0..2 {
            sleep(LATER / 2).await;
            assert_eq!(count(), 1, "at the start, and after a change");
            sleep(LATER).await;
            assert_eq!(count(), 1, "once more");
            sleep(10 * LATER).await;
            assert_eq!(count(), 0);
            status.send_modify(|left| *left += 1);
        }
        drop(status);
        task.await.unwrap();
    }

    #[tokio::test]
    async fn a_sweep_that_failed_is_made_again_until_one_succeeds() {
        let (status, follows) = watch::channel(0);
        let (sender, mut sweeps) = mpsc::unbounded_channel();
        let mut count = 0;
        let sweep = move || {
            count += 1;
            let failure = (count == 1).then_some(SweepError::Hidden(1));
            Swept { namespaces: count, failure, ..Swept::default() }
        };
        let began = Instant::now();
        let report = move |swept: &Swept| {
            let _ = sender.send((swept.namespaces, swept.failure.is_some()));
        };
        let task = tokio::spawn(keep_sweeping(sweep, follows, |left| *left, report));
        assert_eq!(sweeps.recv().await, Some((1, true)));
        assert_eq!(sweeps.recv().await, Some((2, false)), "nothing has changed, and it is made again");
        assert!(began.elapsed() >= FIRST_RETRY);
        status.send_modify(|left| *left += 1);
        assert_eq!(sweeps.recv().await, Some((3, false)));
        drop(status);
        task.await.unwrap();
    }
}
