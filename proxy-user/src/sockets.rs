//! Connected UDP sockets whose endpoint left.
//!
//! The address that such a socket is connected to is fixed: what it sends goes to the endpoint for ever, and no hook
//! sees it. (A packet's flow just chooses again.) So the socket is ended: its next call fails (ECONNABORTED where
//! it waits, EDESTADDRREQ where it sends), and the application connects anew. `sockets` remembers which ones a Service led there; sockets that went to the same
//! endpoint by its own address are left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::host::diag::Diag;
use crate::host::netns::{self, Namespaces};
use crate::maps::view::{Stranded, View, ViewError};
use crate::model::net::IpFamily;
use crate::sync::Status;

/// A connect(2) that chose the endpoint just before it left has ended by then, and the socket is found connected.
const SETTLE: Duration = Duration::from_millis(50);
/// Between two looks, each of which may go through hundreds of network namespaces.
const PAUSE: Duration = Duration::from_millis(500);

/// What a look came to.
#[derive(Debug, Default)]
pub struct Swept {
    /// Sockets ended.
    pub ended: BTreeMap<IpFamily, u64>,
    /// Network namespaces looked at.
    pub namespaces: u64,
    /// Why some sockets may have been left, the first reason.
    pub trouble: Option<Trouble>,
}

/// Why sockets stay with an endpoint that left.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The network namespaces of others are closed to us.
    #[error("cannot enter the network namespaces of pods: {0}; grant CAP_SYS_ADMIN (setns(2))")]
    Enter(#[source] io::Error),
    /// Some processes do not show which namespace they are in.
    #[error("cannot see the network namespaces of {0} processes; grant CAP_SYS_PTRACE")]
    Hidden(usize),
    /// The processes of this machine cannot be listed.
    #[error("cannot look for network namespaces in /proc: {0}")]
    Processes(#[source] io::Error),
    /// The kernel does not list sockets.
    #[error("cannot list sockets: {0}; the kernel needs CONFIG_INET_UDP_DIAG")]
    List(#[source] io::Error),
    /// The kernel does not end sockets.
    #[error("cannot end sockets: {0}; the kernel needs CONFIG_INET_DIAG_DESTROY")]
    End(#[source] io::Error),
}

/// Looks for them and ends them.
#[derive(Debug)]
pub struct Sweeper {
    view: View,
    /// Stranded sockets that were looked for: most of them are closed, and are never looked for again.
    known: BTreeSet<Stranded>,
}

impl Sweeper {
    /// One that reads the maps of `view`.
    pub fn new(view: View) -> Self {
        Self { view, known: BTreeSet::new() }
    }

    /// Looks once. Where no socket was led to an endpoint that left, that is all; else every network namespace is
    /// visited. Blocks for some milliseconds.
    pub fn sweep(&mut self) -> Result<Swept, ViewError> {
        let stranded = self.view.stranded()?;
        let fresh: BTreeSet<_> =
            stranded.difference(&self.known).map(|one| (one.cookie, one.endpoint)).collect();
        self.known = stranded;
        if fresh.is_empty() {
            return Ok(Swept::default());
        }
        let mut swept = Swept::default();
        match netns::all() {
            Ok(Namespaces { paths, hidden }) => {
                for visit in netns::in_each(&paths, |entered| end(entered, &fresh)) {
                    swept.add(visit);
                }
                if hidden > 0 {
                    swept.trouble = swept.trouble.or(Some(Trouble::Hidden(hidden)));
                }
            }
            Err(error) => swept.trouble = Some(Trouble::Processes(error)),
        }
        Ok(swept)
    }
}

impl Swept {
    fn add(&mut self, visit: Self) {
        for (family, count) in visit.ended {
            *self.ended.entry(family).or_default() += count;
        }
        self.namespaces += visit.namespaces;
        self.trouble = self.trouble.take().or(visit.trouble);
    }
}

/// Ends those of the sockets that are in this thread's network namespace.
fn end(entered: io::Result<()>, stranded: &BTreeSet<(u64, std::net::SocketAddr)>) -> Swept {
    let failed = |trouble| Swept { trouble: Some(trouble), ..Swept::default() };
    match entered {
        Ok(()) => {}
        // Its last process has ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Swept::default(),
        Err(error) => return failed(Trouble::Enter(error)),
    }
    let connected = |mut diag: Diag| Ok((diag.connected()?, diag));
    let (sockets, mut diag) = match Diag::open().and_then(connected) {
        Ok(both) => both,
        Err(error) => return failed(Trouble::List(error)),
    };
    let mut swept = Swept { namespaces: 1, ..Swept::default() };
    for socket in sockets.iter().filter(|socket| stranded.contains(&(socket.cookie, socket.peer))) {
        match diag.destroy(socket) {
            Ok(()) => *swept.ended.entry(IpFamily::of(socket.peer.ip())).or_default() += 1,
            // Its process was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => swept.trouble = swept.trouble.or(Some(Trouble::End(error))),
        }
    }
    swept
}

/// Runs until the driver ends: looks after the first sync, for what left while no agent ran, and after each sync that
/// took UDP endpoints away. `tell` hears of every look.
pub async fn run(bpffs: PathBuf, mut status: watch::Receiver<Status>, tell: impl Fn(&Swept)) {
    if status.wait_for(|status| status.synced).await.is_err() {
        return;
    }
    let mut sweeper = match View::open(&bpffs) {
        Ok(view) => Sweeper::new(view),
        Err(error) => {
            tracing::error!(%error, "connected UDP sockets stay with endpoints that leave");
            return;
        }
    };
    let (mut done, mut told) = (None, false);
    loop {
        sleep(SETTLE).await;
        let left = status.borrow_and_update().udp_left;
        if done != Some(left) {
            let look = move || {
                let result = sweeper.sweep();
                (sweeper, result)
            };
            let Ok((back, result)) = spawn_blocking(look).await else { return };
            sweeper = back;
            match result {
                Ok(swept) => {
                    note(&swept, &mut told);
                    tell(&swept);
                }
                Err(error) => tracing::warn!(%error, "cannot read where sockets were led to"),
            }
            done = Some(left);
            sleep(PAUSE).await;
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

/// Says what was done; trouble is told once, since it does not go away by itself.
fn note(swept: &Swept, told: &mut bool) {
    let ended: u64 = swept.ended.values().sum();
    if ended > 0 {
        tracing::info!(
            sockets = ended,
            namespaces = swept.namespaces,
            "ended connected UDP sockets whose endpoint left their Service"
        );
    }
    if let Some(trouble) = &swept.trouble
        && !std::mem::replace(told, true)
    {
        tracing::warn!(%trouble, "some connected UDP sockets stay with endpoints that left");
    }
}
