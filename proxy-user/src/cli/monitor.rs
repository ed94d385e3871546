//! `ballast monitor`: shows new connections and refusals line by line, as they happen.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use proxy_cli::output::yaml;
use proxy_cli::selector::{AskLabels, ServiceSelector};
use proxy_common::event::{
    EVENT_DROP, EVENT_NEW_FLOW, EVENT_PASS, EVENT_REJECT, Event, HOOK_PACKET, HOOK_SOCKET,
};
use proxy_common::reason::Reason;
use proxy_core::model::plural::plural;
use rustix::net::{self, AddressFamily, SocketType};
use serde::Serialize;

use super::show::{ServiceIdentity, ShowError};
use crate::cli::selector::SelectInMaps as _;
use crate::config::ConfigError;
use crate::config::otlp::resource;
use crate::config::run::node_name_or_host;
use crate::maps::view::{Snapshot, Transport, View, ViewError, ip_of, monotonic};
use crate::otlp::Resource;
use proxy_cli::args::list::Output;
use proxy_cli::args::observe::{EventKind, MonitorArgs};
use proxy_cli::output::input_end;
use proxy_cli::question::Peer;
use proxy_core::model::net::IpFamily;
use proxy_core::model::problem::printable;

mod otlp;

/// How often the ring is polled: an event does not wake the reader, so that it costs the programs little.
const LOOK: Duration = Duration::from_millis(20);
/// Minimum time between two reads of the names; they are read again after an event of a Service without a name.
const NAMES: Duration = Duration::from_secs(1);
/// Maximum age of the names when an event needs one: a port may have been renamed, or another Service may have its id.
const OLD_NAMES: Duration = Duration::from_secs(30);

/// Why `ballast monitor` failed.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The maps cannot be read, or the name of a Service is invalid.
    #[error(transparent)]
    Show(#[from] ShowError),
    /// The reader of standard output has gone.
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
    /// An OpenTelemetry variable is invalid.
    #[error(transparent)]
    Variable(#[from] ConfigError),
}

impl From<ViewError> for MonitorError {
    fn from(error: ViewError) -> Self {
        Self::Show(error.into())
    }
}

/// Which events are shown.
#[derive(Clone, Debug, Default)]
pub struct EventSelection {
    /// Only events of these Services.
    pub services: ServiceSelector,
    /// Only packets of this client.
    pub client: Option<Peer>,
    /// Only calls of this process.
    pub pid: Option<u32>,
    /// Only these reasons; empty: all.
    pub reasons: Vec<Reason>,
    /// Only these kinds; empty: all.
    pub kinds: Vec<EventKind>,
}

impl EventSelection {
    /// Whether the event is selected.
    pub fn takes(&self, event: &Event, names: &Snapshot) -> bool {
        let kind = kind(event);
        self.services.takes(event.service, names)
            && self.client.is_none_or(|client| {
                event.hook == HOOK_PACKET && self::client(event).is_some_and(|found| client.is(&found))
            })
            && self.pid.is_none_or(|pid| event.hook == HOOK_SOCKET && event.pid == pid)
            && (self.reasons.is_empty() || reason(event).is_some_and(|reason| self.reasons.contains(&reason)))
            && (self.kinds.is_empty() || kind.is_some_and(|kind| self.kinds.contains(&kind)))
    }
}

/// Shows events until the requested number is reached or the time is up.
pub fn run(args: &MonitorArgs, labels: AskLabels, out: &mut impl Write) -> Result<(), MonitorError> {
    let view = View::open(&args.maps.bpffs)?;
    let selection = EventSelection {
        services: ServiceSelector::programmed(&args.selector, &view, labels)?,
        client: args.client,
        pid: args.pid,
        reasons: args.reason.clone(),
        kinds: args.kind.clone(),
    };
    let mut names = Names::read(&view)?;
    let is_followed = args.last.is_none() || args.follow;
    // Without new flows, which would replace what the history has.
    let mut listener = view.listen(if is_followed { args.sample } else { 0 })?;
    let begun = Instant::now();
    let (mut shown, mut lost) = (0, 0);
    let context = MonitorContext::now();
    let output = match args.output {
        Output::Otlp => Written::Otlp(own_resource()?),
        other => Written::Plain(other),
    };
    if let Some(last) = args.last {
        let earlier = listener.earlier_events(&view)?;
        let selected: Vec<_> =
            earlier.iter().filter(|event| selection.takes(event, &names.snapshot)).collect();
        for event in &selected[selected.len().saturating_sub(last)..] {
            let line = MonitorLine::new(event, &names.snapshot, &context);
            let date = matches!(output, Written::Plain(Output::Text)).then(|| line.date());
            writeln!(out, "{}{}", date.unwrap_or_default(), output.render(&line)?)?;
        }
        if selected.is_empty() {
            writeln!(
                io::stderr(),
                "no such event in the history of {}",
                plural(earlier.len() as u64, "event")
            )?;
        }
        if !is_followed {
            return Ok(out.flush()?);
        }
    }
    let has_ended = args.end_with_stdin.then(input_end);
    while !has_ended.as_ref().is_some_and(|ended| ended.load(Ordering::Relaxed))
        && args.count.is_none_or(|count| shown < count)
        && args.timeout.is_none_or(|time| begun.elapsed() < time)
    {
        let Some(event) = listener.next_event()? else {
            if lost != listener.lost() {
                lost = listener.lost();
                writeln!(
                    io::stderr(),
                    "lost so far: {}; a larger --sample shows fewer new flows",
                    plural(lost, "event")
                )?;
            }
            out.flush()?;
            std::thread::sleep(LOOK);
            continue;
        };
        names.learn(&view, event.service)?;
        if selection.takes(&event, &names.snapshot) {
            let line = MonitorLine::new(&event, &names.snapshot, &context);
            writeln!(out, "{}", output.render(&line)?)?;
            shown += 1;
        }
    }
    Ok(out.flush()?)
}

/// Format of the lines.
enum Written {
    Plain(Output),
    Otlp(Resource),
}

impl Written {
    fn render(&self, line: &MonitorLine) -> Result<String, ShowError> {
        match self {
            Self::Otlp(resource) => line.otlp(resource),
            Self::Plain(Output::Json) => Ok(serde_json::to_string(line)?),
            Self::Plain(Output::Name) => Ok(line.identity.service.clone().unwrap_or_else(|| "-".to_owned())),
            Self::Plain(Output::Wide) => Ok(line.wide()),
            Self::Plain(Output::Yaml) => Ok(format!("---\n{}", yaml(line)?.trim_end())),
            Self::Plain(Output::Text | Output::Short | Output::Otlp) => Ok(line.text()),
        }
    }
}

/// Describes this program on this node, with the values of OpenTelemetry's variables.
fn own_resource() -> Result<Resource, ConfigError> {
    let variable = |name: &str| std::env::var(name).ok();
    let node = node_name_or_host(variable("BALLAST_HOSTNAME_OVERRIDE"))?;
    resource(variable, Some(&node))
}

/// Names of Services, read again when a new one appears, or when they are old.
#[derive(Debug)]
pub struct Names {
    /// Only Service ports and frontends.
    pub snapshot: Snapshot,
    read: Instant,
}

impl Names {
    /// Reads the current names.
    pub fn read(view: &View) -> Result<Self, ViewError> {
        Ok(Self { snapshot: view.service_names()?, read: Instant::now() })
    }

    /// Reads the names again if an event has a Service without a name or with an old one, but not too often.
    pub fn learn(&mut self, view: &View, service: u32) -> Result<(), ViewError> {
        if self.is_due(service, self.read.elapsed()) {
            *self = Self::read(view)?;
        }
        Ok(())
    }

    /// Whether the names are to be read again for an event of this Service. `age`: of the names.
    fn is_due(&self, service: u32, age: Duration) -> bool {
        let is_known = self.snapshot.names.contains_key(&service);
        service != 0 && age >= if is_known { OLD_NAMES } else { NAMES }
    }
}

/// Context that an event does not contain.
#[derive(Clone, Debug, Default)]
pub struct MonitorContext {
    /// Time at which the monotonic clock was zero.
    zero: Option<SystemTime>,
    /// Names of devices, instead of those of this machine.
    devices: Option<BTreeMap<u32, String>>,
}

impl MonitorContext {
    /// Returns the current context of this machine.
    pub fn now() -> Self {
        Self { zero: SystemTime::now().checked_sub(monotonic()), ..Self::default() }
    }

    fn time(&self, event: &Event) -> Option<SystemTime> {
        self.zero?.checked_add(Duration::from_nanos(event.time))
    }

    fn device(&self, index: u32) -> Option<String> {
        if let Some(devices) = &self.devices {
            return devices.get(&index).cloned();
        }
        let socket = net::socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
        net::netdevice::index_to_name(&socket, index).ok()
    }
}

fn kind(event: &Event) -> Option<EventKind> {
    match event.kind {
        EVENT_NEW_FLOW => Some(EventKind::New),
        EVENT_REJECT => Some(EventKind::Reject),
        EVENT_DROP => Some(EventKind::Drop),
        EVENT_PASS => Some(EventKind::Pass),
        _ => None,
    }
}

fn reason(event: &Event) -> Option<Reason> {
    if event.kind == EVENT_NEW_FLOW { None } else { Reason::from_number(event.reason) }
}

fn socket(event: &Event, words: [u32; 4], port: u16) -> Option<SocketAddr> {
    Some(SocketAddr::new(ip_of(event.family.into(), words)?, port))
}

fn client(event: &Event) -> Option<SocketAddr> {
    let found = socket(event, event.client, event.client_port)?;
    (event.hook == HOOK_PACKET).then_some(found)
}

/// Returns the name of the thread that called. A thread sets its name itself (`PR_SET_NAME`), to any bytes.
fn process(event: &Event) -> Option<String> {
    let bytes: Vec<u8> = event.client.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    (event.hook == HOOK_SOCKET && !name.is_empty()).then(|| printable(&String::from_utf8_lossy(name)))
}

/// An event as text. In JSON, field names are stable, and unknown values are `null`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MonitorLine {
    /// RFC 3339.
    time: Option<String>,
    /// `new`, `reject`, `drop`, `pass`.
    kind: &'static str,
    /// `socket`, `packet`.
    hook: Option<&'static str>,
    /// Packets: address and port of the client.
    client: Option<SocketAddr>,
    /// Packets: the ingress device, and its index.
    device: Option<String>,
    device_index: Option<u32>,
    /// Socket calls: the process, and the name of its thread that called.
    pid: Option<u32>,
    process: Option<String>,
    /// Socket calls: cookie of the network namespace.
    netns: Option<u64>,
    /// Address and port of the original destination.
    frontend: Option<SocketAddr>,
    /// Address and port of the selected endpoint.
    backend: Option<SocketAddr>,
    backend_id: Option<u32>,
    /// The Service port, with the protocol and the family of the event; `service` is `null` for an id without a name.
    #[serde(flatten)]
    identity: ServiceIdentity,
    /// A label of `docs/reasons.md`.
    reason: Option<&'static str>,
    #[serde(skip)]
    why: Option<Reason>,
    /// Time of the event, the same as `time`.
    #[serde(skip)]
    at: Option<SystemTime>,
}

impl MonitorLine {
    /// Creates the line of an event.
    pub fn new(event: &Event, names: &Snapshot, context: &MonitorContext) -> Self {
        let is_call = event.hook == HOOK_SOCKET;
        let is_packet = event.hook == HOOK_PACKET;
        let some = |number: u32| (number != 0).then_some(number);
        let why = reason(event);
        let at = context.time(event);
        let name = names.names.get(&event.service);
        Self {
            time: at.and_then(|time| Timestamp::try_from(time).ok()).map(|time| format!("{time:.3}")),
            kind: match kind(event) {
                Some(EventKind::New) => "new",
                Some(EventKind::Reject) => "reject",
                Some(EventKind::Drop) => "drop",
                Some(EventKind::Pass) => "pass",
                None => "unknown",
            },
            hook: if is_call { Some("socket") } else { is_packet.then_some("packet") },
            client: client(event),
            device: some(event.device).and_then(|index| context.device(index)),
            device_index: some(event.device),
            pid: some(event.pid),
            process: process(event),
            netns: is_call.then_some(event.netns),
            frontend: socket(event, event.frontend, event.frontend_port),
            backend: some(event.backend_id).and(socket(event, event.backend, event.backend_port)),
            backend_id: some(event.backend_id),
            identity: ServiceIdentity {
                service: name.map(ToString::to_string),
                namespace: name.map(|name| name.namespace.clone()),
                name: name.map(|name| name.name.clone()),
                port: name.map(|name| name.port.clone()),
                protocol: (event.proto != 0).then(|| Transport(event.proto).to_string()),
                family: ip_of(event.family.into(), event.frontend).map(|ip| IpFamily::of(ip).to_string()),
                service_id: some(event.service),
            },
            reason: why.map(Reason::label),
            why,
            at,
        }
    }

    /// Returns the label of the reason, if there is one.
    pub const fn reason(&self) -> Option<&'static str> {
        self.reason
    }

    /// Returns the day of the event, as the beginning of a line.
    fn date(&self) -> String {
        self.time.as_deref().and_then(|time| time.get(..11)).unwrap_or_default().replace('T', " ")
    }

    /// Returns one line for people, without a line break.
    pub fn text(&self) -> String {
        // The time of day is enough for a live view.
        let time = self.time.as_deref().and_then(|time| time.get(11..)).unwrap_or("-");
        format!("{time} {:<6} {}", self.kind, self.what())
    }

    /// Returns the line with the date, the hook, the network namespace and the id of the endpoint.
    fn wide(&self) -> String {
        let time = self.time.as_deref().unwrap_or("-");
        let mut text = format!("{time} {:<6} {:<6} {}", self.kind, self.hook.unwrap_or("-"), self.what());
        let netns = self.netns.map(|netns| format!(" netns={netns}"));
        let backend = self.backend_id.map(|id| format!(" backend-id={id}"));
        let service = self.identity.service_id.map(|id| format!(" service-id={id}"));
        text.extend([netns, service, backend].into_iter().flatten());
        text
    }

    /// Returns client, frontend, Service, endpoint and reason as text.
    fn what(&self) -> String {
        let who = match (self.client, &self.process, self.pid, self.hook) {
            (Some(client), ..) => {
                let device = self.device.clone().or(self.device_index.map(|index| index.to_string()));
                device.map_or_else(|| client.to_string(), |device| format!("{client} ({device})"))
            }
            (None, Some(process), Some(pid), _) => format!("{process}[{pid}]"),
            (None, None, Some(pid), _) => format!("[{pid}]"),
            (None, _, None, hook) => hook.unwrap_or("packet").to_owned(),
        };
        let mut words = vec![who];
        if let Some(frontend) = self.frontend {
            let protocol = self.identity.protocol.as_deref().unwrap_or("?");
            words.push(format!("-> {frontend}/{protocol}"));
        }
        if let Some(service) = &self.identity.service {
            words.push(service.clone());
        } else if let Some(id) = self.identity.service_id {
            words.push(format!("id {id}"));
        }
        if let Some(backend) = self.backend {
            words.push(format!("-> {backend}"));
        }
        if let Some(why) = self.why {
            words.push(format!("{}:{}", why.label(), why.explanation()));
        }
        words.join(" ")
    }
}

#[cfg(test)]
mod tests;
