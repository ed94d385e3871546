//! Follows this machine by one subscription to route netlink: publishes the devices for the task that attaches
//! programs, and sends the state that Services depend on to the driver.

use std::collections::BTreeSet;
use std::future::pending;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::tc::TcAttribute;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::devices::{self, Device};
use super::facts::{self, FactsToRead, Host, HostFacts, Placed, is_default_route, is_local_route};
use super::seen::{Entry as _, Present, Seen};
use super::xfrm;
use proxy_core::model::{Event, HostView};

/// The pause after a notification, so that a burst of changes causes one read.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// The pause after a notification of an IPsec policy, until whose read new connections leave in clear text.
const POLICY_DEBOUNCE: Duration = Duration::from_millis(2);
/// The interval of reads without a notification.
const PERIOD: Duration = Duration::from_secs(10);
/// How often all routes are read although no default route has changed, and the large tables of another proxy: a router may
/// have a million routes.
const ROUTES_PERIOD: Duration = Duration::from_mins(5);
/// The pause between a failure and the next attempt.
const RETRY: Duration = Duration::from_secs(1);

/// Every device of this network namespace.
pub type Devices = Present<Device>;

/// Reads the state of this machine after each notification of route netlink, and every 10 s.
#[derive(Debug)]
pub struct Follower {
    facts: HostFacts,
    known: HostView,
    /// Whether `known` has not been sent yet.
    is_new: bool,
    seen_devices: Seen<Device>,
    seen_addresses: Seen<Placed>,
    devices: watch::Sender<Devices>,
    due: watch::Sender<Option<Instant>>,
    problems: watch::Sender<Vec<String>>,
    /// Whether removed filters of the clsact qdisc are notified of.
    has_filters: bool,
}

impl Follower {
    /// Reads everything for the first time. Blocks for a few milliseconds, and longer if there are many routes.
    pub fn start(facts: HostFacts) -> io::Result<Self> {
        let (seen_devices, seen_addresses) = (Seen::start(devices::list)?, Seen::start(facts::addresses)?);
        let devices = seen_devices.present();
        let host = Host { devices: devices.clone(), addresses: seen_addresses.present() };
        let known = facts.read(&host, &HostView::default(), FactsToRead::ALL)?;
        let devices = watch::Sender::new(devices);
        Ok(Self {
            facts,
            known,
            is_new: false,
            seen_devices,
            seen_addresses,
            devices,
            due: watch::Sender::default(),
            problems: watch::Sender::default(),
            has_filters: false,
        })
    }

    /// Also publishes the devices after a filter was removed: packet programs are filters of the clsact qdisc on kernels
    /// without TCX, and are added again at once. A link of TCX cannot be removed like this.
    #[must_use]
    pub fn with_filters(self, has_filters: bool) -> Self {
        Self { has_filters, ..self }
    }

    /// Returns the state that Services depend on, as last read.
    pub const fn view(&self) -> &HostView {
        &self.known
    }

    /// Returns the devices: a new list after each change of a device, address or default route, and every 10 s.
    pub fn devices(&self) -> watch::Receiver<Devices> {
        self.devices.subscribe()
    }

    /// Returns when the next read is due; `None` before [`Follower::run`].
    pub fn due(&self) -> watch::Receiver<Option<Instant>> {
        self.due.subscribe()
    }

    /// Returns why this machine cannot be followed, as a sentence; none if it is.
    pub fn problems(&self) -> watch::Receiver<Vec<String>> {
        self.problems.subscribe()
    }

    /// Sends the state that Services depend on whenever it has changed; returns when the receiver is dropped.
    pub async fn run(mut self, events: Sender<Event>) {
        self.due.send_replace(Some(Instant::now()));
        while !events.is_closed() {
            if let Err(error) = self.follow(&events).await {
                self.note(Some(&error));
            }
            sleep(RETRY).await;
        }
    }

    /// Publishes why this machine cannot be followed, and logs it if it is new; `None`: it is followed.
    fn note(&self, error: Option<&io::Error>) {
        let sentence = |error| {
            format!(
                "cannot watch devices, addresses and routes of this machine, and new pods get no programs: {error}"
            )
        };
        let problems: Vec<_> = error.map(sentence).into_iter().collect();
        let is_new =
            self.problems.send_if_modified(|known| std::mem::replace(known, problems.clone()) != problems);
        if let Some(error) = error.filter(|_| is_new) {
            tracing::warn!(%error, "cannot watch devices, addresses and routes of this machine; retrying");
        }
    }

    /// Runs until the kernel closes the subscription, or the receiver is dropped. A read may take long if there are
    /// many routes; devices are listed in the meantime.
    async fn follow(&mut self, events: &Sender<Event>) -> io::Result<()> {
        let mut groups = vec![
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Ipv4Rule,
            MulticastGroup::Ipv6Rule,
        ];
        groups.extend(self.has_filters.then_some(MulticastGroup::Tc));
        let (connection, _handle, mut changes) = new_multicast_connection(&groups)?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let mut policies = xfrm::Changes::new()?;
        // The first read covers what changed before the subscription.
        self.list().await?;
        let (mut schedule, mut reading) = (Schedule::new(Instant::now()), None);
        loop {
            if reading.is_none()
                && let Some(what) = schedule.begin(Instant::now())
            {
                reading = Some(self.read(what));
            }
            tokio::select! {
                change = changes.next() => match change {
                    None => return Err(io::ErrorKind::ConnectionAborted.into()),
                    Some((message, _)) if !matters(&message) => {}
                    Some((message, _)) => {
                        let mut gone = Gone::default();
                        gone.note(&message);
                        sleep(DEBOUNCE).await;
                        // The read covers all changes so far, so only removals of the notifications that have arrived
                        // in the meantime matter.
                        while let Some((message, _)) = changes.next().now_or_never().flatten() {
                            gone.note(&message);
                        }
                        self.forget(&gone);
                        self.list().await?;
                        // The kernel sends no notification for routes that are removed together with their device or address.
                        schedule.due.get_or_insert_default().routes = true;
                    }
                },
                change = next_policy(&mut policies) => {
                    change?;
                    sleep(POLICY_DEBOUNCE).await;
                    while next_policy(&mut policies).now_or_never().transpose()?.is_some() {}
                    schedule.due.get_or_insert_default();
                }
                seen = done(&mut reading) => {
                    reading = None;
                    schedule.end(Instant::now(), self.is_doubtful());
                    let seen = seen?;
                    self.due.send_replace(Some(schedule.next().max(schedule.rests_until)));
                    self.note(None);
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
                () = sleep_until(schedule.next()), if reading.is_none() => {
                    if events.is_closed() {
                        return Ok(());
                    }
                    if schedule.due.is_none() {
                        self.list().await?;
                        schedule.period_is_over(Instant::now());
                    }
                }
            }
        }
    }

    /// Lists devices and addresses, and publishes the devices. If changes interrupt each attempt, nothing is new: they
    /// are notified of.
    async fn list(&mut self) -> io::Result<()> {
        let lists = || -> io::Result<_> { Ok((devices::list()?, facts::addresses()?)) };
        let listed = spawn_blocking(lists).await.map_err(io::Error::other)?;
        match listed {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            listed => {
                let (devices, addresses) = listed?;
                self.seen_devices.add_list(devices);
                self.seen_addresses.add_list(addresses);
            }
        }
        self.devices.send_replace(self.seen_devices.present());
        Ok(())
    }

    /// Takes the kernel's word that devices and addresses are gone.
    fn forget(&mut self, gone: &Gone) {
        self.seen_devices.gone(|device| gone.devices.contains(&device.ifindex));
        self.seen_addresses
            .gone(|placed| gone.devices.contains(&placed.0) || gone.addresses.contains(&placed.key()));
    }

    const fn is_doubtful(&self) -> bool {
        self.seen_devices.is_doubtful() || self.seen_addresses.is_doubtful()
    }

    /// Starts to read `what`; the rest is copied from the known state.
    fn read(&self, what: FactsToRead) -> JoinHandle<io::Result<HostView>> {
        let (facts, known) = (self.facts.clone(), self.known.clone());
        let host = Host { devices: self.seen_devices.present(), addresses: self.seen_addresses.present() };
        spawn_blocking(move || facts.read(&host, &known, what))
    }
}

/// When the facts are read. Reads take a fifth of the time at most: a router may have a million routes.
#[derive(Debug)]
struct Schedule {
    /// What the next read has to read.
    due: Option<FactsToRead>,
    /// When the last read began.
    began: Instant,
    /// Until then, no read begins.
    rests_until: Instant,
    /// When the next read begins without a notification.
    pause: Instant,
    routes_read: Instant,
    unnotified_read: Instant,
    tables_read: Instant,
}

impl Schedule {
    const fn new(now: Instant) -> Self {
        Self {
            due: Some(FactsToRead::ALL),
            began: now,
            rests_until: now,
            pause: now,
            routes_read: now,
            unnotified_read: now,
            tables_read: now,
        }
    }

    /// Returns what to read now, if a read begins.
    fn begin(&mut self, now: Instant) -> Option<FactsToRead> {
        let what = self.due.take_if(|_| now >= self.rests_until)?;
        self.began = now;
        for (is_read, at) in [
            (what.routes, &mut self.routes_read),
            (what.unnotified, &mut self.unnotified_read),
            (what.large_tables, &mut self.tables_read),
        ] {
            if is_read {
                *at = now;
            }
        }
        Some(what)
    }

    /// Notes that the read is done. `is_doubtful`: devices or addresses may be gone, and are looked for again soon.
    fn end(&mut self, now: Instant, is_doubtful: bool) {
        self.rests_until = now + 4 * now.duration_since(self.began);
        self.pause = now + if is_doubtful { RETRY } else { PERIOD };
    }

    /// Returns when something is to be done while no read runs: a read that waits, or one without a notification. Notifications do
    /// not put off the read of what causes none.
    fn next(&self) -> Instant {
        match self.due {
            Some(_) => self.rests_until,
            None => self.pause.min(self.unnotified_read + PERIOD),
        }
    }

    /// Notes that a read without a notification is to begin.
    fn period_is_over(&mut self, now: Instant) {
        self.due = Some(FactsToRead {
            routes: now.duration_since(self.routes_read) >= ROUTES_PERIOD,
            unnotified: true,
            large_tables: now.duration_since(self.tables_read) >= ROUTES_PERIOD,
        });
    }
}

/// Devices and addresses that are gone by the kernel's notifications. They are collected, because a device may lose
/// thousands of addresses at once.
#[derive(Debug, Default)]
struct Gone {
    devices: BTreeSet<u32>,
    addresses: BTreeSet<(u32, IpAddr)>,
}

impl Gone {
    fn note(&mut self, message: &NetlinkMessage<RouteNetlinkMessage>) {
        match &message.payload {
            // A port that leaves its bridge is still there.
            NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link))
                if link.header.interface_family != AddressFamily::Bridge =>
            {
                self.devices.insert(link.header.index);
            }
            NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelAddress(address)) => {
                self.addresses.extend(facts::place(address).map(|gone| gone.key()));
            }
            _ => {}
        }
    }
}

/// Waits for the next change of an IPsec policy; for ever if the kernel has no IPsec.
async fn next_policy(policies: &mut Option<xfrm::Changes>) -> io::Result<()> {
    match policies {
        Some(policies) => policies.next().await,
        None => pending().await,
    }
}

/// Returns the result of a read; waits for ever if there is no read.
async fn done(reading: &mut Option<JoinHandle<io::Result<HostView>>>) -> io::Result<HostView> {
    match reading {
        Some(reading) => reading.await.map_err(io::Error::other)?,
        None => pending().await,
    }
}

/// Whether a change makes another read necessary; of routes, only default routes and those of local addresses do, of
/// filters only removed ones.
fn matters(change: &NetlinkMessage<RouteNetlinkMessage>) -> bool {
    match &change.payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route),
        ) => is_default_route(&route.header) || is_local_route(&route.header),
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelQueueDiscipline(qdisc)) => {
            qdisc.attributes.iter().any(|one| matches!(one, TcAttribute::Kind(kind) if kind == "clsact"))
        }
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewQueueDiscipline(_)
            | RouteNetlinkMessage::NewTrafficClass(_)
            | RouteNetlinkMessage::DelTrafficClass(_)
            | RouteNetlinkMessage::NewTrafficFilter(_)
            | RouteNetlinkMessage::NewTrafficChain(_)
            | RouteNetlinkMessage::DelTrafficChain(_)
            | RouteNetlinkMessage::NewTrafficAction(_)
            | RouteNetlinkMessage::DelTrafficAction(_),
        ) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests;
