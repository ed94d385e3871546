//! Follows this machine by one subscription to route netlink: devices for those who attach programs, and what Services
//! depend on for the driver.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until};

use super::devices::{self, Device};
use super::facts::{Facts, Look, leads_everywhere};
use crate::model::{Event, HostView};

/// A burst of changes makes one look.
const SETTLE: Duration = Duration::from_millis(50);
/// The look that needs no change.
const PERIOD: Duration = Duration::from_secs(10);
/// How often all routes are read although none to everywhere has changed: a router may have a million of them.
const ROUTES_PERIOD: Duration = Duration::from_mins(5);
/// Between a failure and the next try.
const RETRY: Duration = Duration::from_secs(1);

/// Every device of this network namespace, by index.
pub type Devices = Arc<[Device]>;

/// Reads the state of this machine after each notification of route netlink, and every 10 s.
#[derive(Debug)]
pub struct Follower {
    facts: Facts,
    known: HostView,
    /// `known` has not been sent yet.
    is_new: bool,
    devices: watch::Sender<Devices>,
}

impl Follower {
    /// Looks at everything for the first time. Blocks for a few milliseconds, and longer where there are many routes.
    pub fn start(facts: Facts) -> io::Result<Self> {
        let devices: Devices = devices::list()?.into();
        let known = facts.look(&devices, &HostView::default(), Look::ALL)?;
        Ok(Self { facts, known, is_new: false, devices: watch::Sender::new(devices) })
    }

    /// What Services depend on, as last seen.
    pub const fn view(&self) -> &HostView {
        &self.known
    }

    /// The devices: a new list after each change of a device, address or default route, and every 10 s.
    pub fn devices(&self) -> watch::Receiver<Devices> {
        self.devices.subscribe()
    }

    /// Sends what Services depend on whenever it differs from what was seen before; returns when the receiver is gone.
    pub async fn run(mut self, events: Sender<Event>) {
        while !events.is_closed() {
            if let Err(error) = self.follow(&events).await {
                tracing::warn!(%error, "cannot watch devices, addresses and routes of this machine; retrying");
            }
            sleep(RETRY).await;
        }
    }

    /// Runs until the kernel stops telling, or the receiver is gone. A look may take long where there are many routes;
    /// devices are listed meanwhile.
    async fn follow(&mut self, events: &Sender<Event>) -> io::Result<()> {
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
        ];
        let (connection, _handle, mut changes) = new_multicast_connection(&groups)?;
        let _connection = Background(tokio::spawn(connection).abort_handle());
        // The first look is at what changed before the subscription.
        self.list().await?;
        let (mut due, mut look) = (Some(Look::ALL), None);
        let (mut routes_read, mut pause) = (Instant::now(), Instant::now());
        loop {
            if look.is_none()
                && let Some(what) = due.take()
            {
                if what.routes {
                    routes_read = Instant::now();
                }
                look = Some(self.look(what));
            }
            tokio::select! {
                change = changes.next() => match change {
                    None => return Err(io::ErrorKind::ConnectionAborted.into()),
                    Some((message, _)) if !matters(&message) => {}
                    Some(_) => {
                        sleep(SETTLE).await;
                        // One look reads what it is about, so it answers what came meanwhile.
                        while changes.next().now_or_never().flatten().is_some() {}
                        self.list().await?;
                        // The kernel does not tell of routes that go with their device or address.
                        let kube_proxy_rules = due.is_some_and(|due| due.kube_proxy_rules);
                        due = Some(Look { routes: true, kube_proxy_rules });
                    }
                },
                seen = done(&mut look) => {
                    look = None;
                    pause = Instant::now() + PERIOD;
                    let seen = seen?;
                    if seen != self.known {
                        self.known = seen;
                        self.is_new = true;
                    }
                }
                permit = events.reserve(), if self.is_new => {
                    let Ok(permit) = permit else { return Ok(()) };
                    permit.send(Event::Host(self.known.clone()));
                    self.is_new = false;
                }
                () = sleep_until(pause), if look.is_none() => {
                    if events.is_closed() {
                        return Ok(());
                    }
                    self.list().await?;
                    due = Some(Look { routes: routes_read.elapsed() >= ROUTES_PERIOD, kube_proxy_rules: true });
                }
            }
        }
    }

    /// Lists the devices, and publishes the list.
    async fn list(&self) -> io::Result<()> {
        let devices = spawn_blocking(devices::list).await.map_err(io::Error::other)??;
        self.devices.send_replace(devices.into());
        Ok(())
    }

    /// Begins a look at `what`; the rest is as it is known.
    fn look(&self, what: Look) -> JoinHandle<io::Result<HostView>> {
        let (facts, known) = (self.facts.clone(), self.known.clone());
        let devices = Arc::clone(&self.devices.borrow());
        spawn_blocking(move || facts.look(&devices, &known, what))
    }
}

/// What a look saw; waits for ever while there is none.
async fn done(look: &mut Option<JoinHandle<io::Result<HostView>>>) -> io::Result<HostView> {
    match look {
        Some(look) => look.await.map_err(io::Error::other)?,
        None => pending().await,
    }
}

/// Whether a change makes another look necessary: of routes, those to everywhere do.
fn matters(change: &NetlinkMessage<RouteNetlinkMessage>) -> bool {
    match &change.payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route),
        ) => leads_everywhere(&route.header),
        _ => true,
    }
}

/// A task that ends when this is dropped.
struct Background(AbortHandle);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests;
