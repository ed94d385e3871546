//! Watches the API server for as long as the agent runs.
//!
//! Objects are converted as they arrive, so that the large Kubernetes types exist only for a moment. Each list, the first one
//! and every later one, becomes one [`Event::Reset`]; it also covers deletions that happened while there was no watch.

use std::collections::BTreeMap;
use std::time::Duration;

use backon::ExponentialBuilder;
use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt as _, Stream, StreamExt, future, stream};
use kube::runtime::utils::ResetTimerBackoff;
use kube::runtime::watcher::{self, ExponentialBackoff};
use kube::{Api, Client};
use tokio::sync::mpsc::Sender;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::field::Empty;
use tracing::{Span, info, info_span, warn};

use proxy_core::model::problem::chain;
use proxy_core::model::{Event, Key, Listing, Object, WatchFailure, Watches};
use proxy_core::spans;

use super::jitter::jitter;
use super::kinds::Watched;
use super::objects::{EndpointSlice, Node, OtherNode, Service, ServiceCidr};
use super::reflector::reflect;
use super::transport::{Source, watch_works};
use super::watch_health::{WatchErrorKind, WatchHealth};

/// The first pause after a failure.
const MIN_DELAY: Duration = Duration::from_millis(200);
/// The longest pause; jitter is added, so that the agents of all nodes do not reconnect at once.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// From this number of refusals on, pauses are long: the server does not have the resource, or the role does not allow it.
const REFUSALS: u32 = 10;
/// The shortest pause after so many refusals, as in client-go; the longest is twice as long.
const REFUSED_DELAY: Duration = Duration::from_secs(30);
/// The same for a resource that a server may lack for ever: Kubernetes before 1.33 has no `ServiceCIDR`.
const LACKED_DELAY: Duration = Duration::from_mins(5);
/// After this time without a failure, pauses are short again, and an outage is over.
const QUIET: Duration = Duration::from_secs(30);
/// The longest pause that a server may demand.
const MAX_DEMANDED: Duration = Duration::from_mins(2);
/// A list that is incomplete for this time is reported.
const LATE: Duration = Duration::from_secs(30);
/// How long the other lists wait for this node's addresses; kube-proxy (`pkg/proxy/node.go`) waits for 5 minutes, and then ends. Until
/// they are known, node ports would answer at other addresses, and pods would be clients outside. A kubelet without a cloud provider sets them as it registers
/// the node; a cloud provider sets them later. What an earlier agent has programmed serves meanwhile.
const NODE_WAIT: Duration = Duration::from_secs(30);

/// An event or a failure of one of the watches.
enum Report {
    Event(&'static str, Box<Event>),
    /// The list is incomplete after [`LATE`].
    Late(&'static str),
    Failed(&'static str, watcher::Error),
}

/// Watches Services, `EndpointSlices`, `ServiceCIDR`s and the node called `node_name`, and sends each event to `sender`.
///
/// While `needs_nodes` has a value, it watches the other nodes too: a cluster may have 5,000 nodes, and most clusters do not
/// need this. Another value is another need, for which they are listed again. `note` sees each event before it is sent, and `watches` has which watches fail. Runs for ever, whatever the API server does; returns when the
/// receiver is dropped.
pub async fn run(
    client: Client,
    node_name: String,
    sender: Sender<Event>,
    needs_nodes: watch::Receiver<Option<Instant>>,
    watches: watch::Sender<Watches>,
    note: impl FnMut(&Event),
) {
    let own_node = Node::selectors().fields(&format!("metadata.name={node_name}"));
    let (ends, is_known) = oneshot::channel::<()>();
    let mut ends = Some(ends);
    let node = reports(Api::<Node>::all(client.clone()), own_node, &watches)
        .inspect(move |report| drop(ends.take_if(|_| ends_wait(report))));
    let services = reports(Api::<Service>::all(client.clone()), Service::selectors(), &watches);
    let slices = reports(Api::<EndpointSlice>::all(client.clone()), EndpointSlice::selectors(), &watches);
    let cidrs = reports(Api::<ServiceCidr>::all(client.clone()), ServiceCidr::selectors(), &watches);
    let all_but_own = OtherNode::selectors().fields(&format!("metadata.name!={node_name}"));
    let of_others = watches.clone();
    let others = while_needed(needs_nodes, move || {
        reports(Api::<OtherNode>::all(client.clone()), all_but_own.clone(), &of_others).boxed()
    });
    let rest: SelectAll<BoxStream<'static, Report>> =
        stream::select_all([services.boxed(), slices.boxed(), cidrs.boxed(), others.boxed()]);
    let rest = timeout(NODE_WAIT, is_known).map(|known| {
        if known.is_err() {
            info!(
                node = node_name,
                "the Node object has no address, or is not known yet; continuing with the addresses of this machine"
            );
        }
        rest
    });
    let rest = rest.flatten_stream();
    forward(stream::select(node, rest).boxed(), &node_name, &sender, &watches, note).await;
}

/// Whether this report about the node ends the wait for it: its addresses are known now, or the role of the agent does not allow it.
fn ends_wait(report: &Report) -> bool {
    match report {
        Report::Event(_, event) => match &**event {
            Event::Reset(Listing::Node(Some(node))) | Event::Apply(Object::Node(node)) => {
                node.addresses().next().is_some()
            }
            _ => false,
        },
        Report::Late(_) => false,
        Report::Failed(_, error) => WatchErrorKind::of(error) == WatchErrorKind::Forbidden,
    }
}

async fn forward(
    mut reports: impl Stream<Item = Report> + Unpin,
    node_name: &str,
    sender: &Sender<Event>,
    watches: &watch::Sender<Watches>,
    mut note: impl FnMut(&Event),
) {
    let mut outage = WatchHealth::default();
    let mut last_failure = Instant::now();
    loop {
        let report = tokio::select! {
            () = sender.closed() => return,
            () = sleep_until(last_failure + QUIET), if outage.is_away() => {
                outage.recovered(None);
                continue;
            }
            report = reports.next() => report,
        };
        match report {
            Some(Report::Event(resource, event)) => {
                outage.recovered(Some(resource));
                // After a list, the watch may still be refused: the reflector reports that it works.
                if !matches!(*event, Event::Reset(_)) {
                    watch_works(watches, resource);
                }
                if *event == Event::Reset(Listing::Node(None)) {
                    warn!(
                        node = node_name,
                        "the API server has no node of this name; give the correct name with --hostname-override"
                    );
                }
                note(&event);
                if sender.send(*event).await.is_err() {
                    return;
                }
            }
            Some(Report::Late(resource)) => {
                outage.late(resource);
                watch_fails(watches, resource, "the API server does not complete its list".to_owned());
            }
            Some(Report::Failed(resource, error)) => {
                last_failure = Instant::now();
                outage.failed(resource, &error, last_failure.into_std());
                if resource == ServiceCidr::RESOURCE && is_lasting(&error) {
                    // Kubernetes before 1.33 has none, and answers 403 to an account without the right.
                    watch_works(watches, resource);
                } else {
                    watch_fails(watches, resource, chain(&error));
                }
            }
            None => return,
        }
    }
}

/// Records that the watch of `resource` fails.
fn watch_fails(watches: &watch::Sender<Watches>, resource: &'static str, error: String) {
    watches.send_modify(|watches| {
        let since = Instant::now().into_std();
        watches
            .entry(resource)
            .or_default()
            .get_or_insert(WatchFailure { since, error: String::new() })
            .error = error;
    });
}

/// Returns the reports of a watch that `begin` starts, while it is needed. The driver forgets the nodes when a need ends, so each
/// need has a watch of its own, even if the end of the one before was not seen.
fn while_needed(
    needed: watch::Receiver<Option<Instant>>,
    begin: impl Fn() -> BoxStream<'static, Report> + Send + 'static,
) -> impl Stream<Item = Report> + Send {
    let state: (_, Option<(Instant, BoxStream<'static, Report>)>, _) = (needed, None, begin);
    stream::unfold(state, |(mut needed, mut watch, begin)| async move {
        loop {
            let since = watch.as_ref().map(|(since, _)| *since);
            let report = async {
                match &mut watch {
                    Some((_, reports)) => reports.next().await,
                    None => future::pending().await,
                }
            };
            let changed = async {
                let now = needed.wait_for(|needed| *needed != since).await.ok().map(|needed| *needed);
                match now {
                    Some(now) => now,
                    // The driver has ended.
                    None => future::pending().await,
                }
            };
            tokio::select! {
                biased;
                since = changed => watch = since.map(|since| (since, begin())),
                report = report => return report.map(|report| (report, (needed, watch, begin))),
            }
        }
    })
}

/// Returns the reports of one kind; the stream never ends.
fn reports<K: Watched>(
    api: Api<K>,
    config: watcher::Config,
    watches: &watch::Sender<Watches>,
) -> impl Stream<Item = Report> + Send + use<K> {
    let refused = if K::RESOURCE == ServiceCidr::RESOURCE { LACKED_DELAY } else { REFUSED_DELAY };
    collected(paced(reflect(Source::new(api).with_watches(watches.clone()), config), refused))
}

/// Collects the lists of one kind, and reports one that takes too long.
fn collected<K: Watched>(
    items: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
) -> impl Stream<Item = Report> + Send {
    let state = (Box::pin(items), List::default(), None, true);
    stream::unfold(state, |(mut items, mut list, mut late, is_first)| async move {
        // The time begins with the first request, and not while the stream waits for the node's object.
        if is_first {
            late = Some(Instant::now() + LATE);
        }
        loop {
            let item = tokio::select! {
                biased;
                item = items.next() => item?,
                () = sleep_until(late.unwrap_or_else(Instant::now)), if late.is_some() => {
                    return Some((Report::Late(K::RESOURCE), (items, list, None, false)));
                }
            };
            match &item {
                Ok(watcher::Event::Init) if !list.is_open() => late = late.or(Some(Instant::now() + LATE)),
                Ok(watcher::Event::InitDone) => late = None,
                Err(error) if is_lasting(error) => late = None,
                _ => {}
            }
            if let Some(report) = report::<K>(item, &mut list) {
                return Some((report, (items, list, late, false)));
            }
        }
    })
}

/// A list that is in progress.
struct List<M> {
    objects: BTreeMap<Key, M>,
    /// The span of the list; it ends with the list.
    span: Option<Span>,
}

impl<M> Default for List<M> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), span: None }
    }
}

impl<M> List<M> {
    fn begin(&mut self, resource: &'static str) {
        self.objects.clear();
        // A list that restarts keeps its span: the span measures the time until the list is complete.
        self.span.get_or_insert_with(|| {
            let span = info_span!(
                target: spans::TARGET, parent: None, "list", ballast.resource = Empty, ballast.objects = Empty
            );
            span.record("ballast.resource", resource);
            span
        });
    }

    const fn is_open(&self) -> bool {
        self.span.is_some()
    }

    fn end(&mut self) -> Vec<M> {
        if let Some(span) = self.span.take() {
            span.record("ballast.objects", self.objects.len() as u64);
        }
        std::mem::take(&mut self.objects).into_values().collect()
    }
}

/// Collects the objects of a list in `list`, and converts all other items to reports.
fn report<K: Watched>(item: watcher::Result<watcher::Event<K>>, list: &mut List<K::Model>) -> Option<Report> {
    let event = match item {
        Err(error) => return Some(Report::Failed(K::RESOURCE, error)),
        Ok(watcher::Event::Init) => {
            list.begin(K::RESOURCE);
            return None;
        }
        Ok(watcher::Event::InitDone) => Event::Reset(K::listing(list.end())),
        Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => {
            let key = object.key();
            match object.convert() {
                Some(model) if list.is_open() => {
                    list.objects.insert(key, model);
                    return None;
                }
                None if list.is_open() => {
                    list.objects.remove(&key);
                    return None;
                }
                Some(model) => Event::Apply(K::object(model)),
                None => Event::Delete(key),
            }
        }
        Ok(watcher::Event::Delete(object)) if list.is_open() => {
            list.objects.remove(&object.key());
            return None;
        }
        Ok(watcher::Event::Delete(object)) => Event::Delete(object.key()),
    };
    Some(Report::Event(K::RESOURCE, Box::new(event)))
}

/// Waits after each error, before the next attempt: longer each time, and at least as long as the server demands. The
/// pauses become short again only after a time without errors, because an attempt that begins well may fail later. Pauses
/// after lasting refusals (403, 404) are at least `refused`.
fn paced<T: Send>(
    items: impl Stream<Item = watcher::Result<T>> + Send,
    refused: Duration,
) -> impl Stream<Item = watcher::Result<T>> + Send {
    let delays = ExponentialBuilder::default()
        .with_min_delay(MIN_DELAY)
        .with_max_delay(MAX_DELAY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times();
    let pauses = ResetTimerBackoff::new(ExponentialBackoff::from(delays), QUIET);
    let state = (Box::pin(items), pauses, 0, Duration::ZERO);
    stream::unfold(state, move |(mut items, mut pauses, mut refusals, pause)| async move {
        sleep(pause).await;
        let item = items.next().await?;
        let pause = match &item {
            Ok(_) => {
                refusals = 0;
                Duration::ZERO
            }
            Err(error) => {
                refusals += u32::from(is_lasting(error));
                let pause = pauses.next().unwrap_or(MAX_DELAY) + demanded(error);
                if is_lasting(error) && refusals >= REFUSALS {
                    pause.max(refused + jitter(refused))
                } else {
                    pause
                }
            }
        };
        Some((item, (items, pauses, refusals, pause)))
    })
}

/// Whether the server will answer the same until an operator changes it or its roles.
fn is_lasting(error: &watcher::Error) -> bool {
    matches!(WatchErrorKind::of(error), WatchErrorKind::Forbidden | WatchErrorKind::Missing)
}

/// Returns how long the server demands to wait (`Retry-After`).
fn demanded(error: &watcher::Error) -> Duration {
    let (watcher::Error::WatchError(status)
    | watcher::Error::InitialListFailed(kube::Error::Api(status))
    | watcher::Error::WatchStartFailed(kube::Error::Api(status))
    | watcher::Error::WatchFailed(kube::Error::Api(status))) = error
    else {
        return Duration::ZERO;
    };
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    Duration::from_secs(seconds.into()).min(MAX_DEMANDED)
}

#[cfg(test)]
mod tests;
