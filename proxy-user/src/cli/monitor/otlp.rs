//! Events as OpenTelemetry log records.
//!
//! Attributes have names of OpenTelemetry's semantic conventions if there are any; other names begin with `ballast.`.
//! `source` is the client, and `destination` the frontend that it connected to; the endpoint is `ballast.endpoint`.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proxy_common::reason::Reason;

use super::MonitorLine;
use crate::cli::show::ShowError;
use crate::otlp::Resource;
use crate::otlp::record::{LogRecord, Severity, document};
use crate::otlp::value::Attributes;

impl MonitorLine {
    /// Returns a document with one record, without a line break.
    pub fn otlp(&self, resource: &Resource) -> Result<String, ShowError> {
        Ok(document(resource, &[self.record(SystemTime::now())])?)
    }

    /// Returns the event as a record that was observed at `now`.
    pub fn record(&self, now: SystemTime) -> LogRecord {
        let nanoseconds = |time: SystemTime| {
            let since: Duration = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_nanos()).unwrap_or_default()
        };
        LogRecord {
            time_unix_nano: self.at.map(nanoseconds).unwrap_or_default(),
            observed_time_unix_nano: nanoseconds(now),
            severity: self.severity(),
            body: format!("{} {}", self.kind, self.what()).into(),
            attributes: self.attributes(),
            context: None,
            event_name: match self.kind {
                "new" => "ballast.new",
                "reject" => "ballast.reject",
                "drop" => "ballast.drop",
                "pass" => "ballast.pass",
                _ => "ballast.unknown",
            },
        }
    }

    fn severity(&self) -> Severity {
        match self.kind {
            _ if self.why.is_some_and(Reason::is_fault) => Severity::Error,
            "reject" | "drop" => Severity::Warn,
            _ => Severity::Info,
        }
    }

    fn attributes(&self) -> Attributes {
        let mut all = Attributes::default();
        let mut socket = |address: &'static str, port: &'static str, socket: Option<SocketAddr>| {
            all.set_some(address, socket.map(|socket| socket.ip().to_string()));
            all.set_some(port, socket.map(|socket| socket.port()));
        };
        socket("source.address", "source.port", self.client);
        socket("destination.address", "destination.port", self.frontend);
        socket("ballast.endpoint.address", "ballast.endpoint.port", self.backend);
        let known = self.frontend.or(self.client);
        all.set_some("network.type", known.map(|socket| if socket.is_ipv4() { "ipv4" } else { "ipv6" }));
        all.set_some(
            "network.transport",
            self.identity.protocol.as_ref().map(|protocol| protocol.to_ascii_lowercase()),
        );
        all.set_some("network.interface.name", self.device.as_deref());
        all.set_some("process.pid", self.pid);
        all.set_some("process.executable.name", self.process.as_deref());
        all.set_some("ballast.netns.cookie", self.netns);
        all.set_some("k8s.namespace.name", self.identity.namespace.as_deref());
        all.set_some("k8s.service.name", self.identity.name.as_deref());
        all.set_some("ballast.service.port", self.identity.port.as_deref().filter(|port| !port.is_empty()));
        all.set_some("ballast.hook", self.hook);
        all.set("ballast.kind", self.kind);
        all.set_some("ballast.reason", self.reason);
        all
    }
}
