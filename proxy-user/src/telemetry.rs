//! Logging.
//!
//! # Which level
//! * ERROR: something has stopped permanently, and the agent cannot do its job. There is at most one before it exits.
//! * WARN: the agent continues, but not as well as it should, and an operator should look: an object with a part that cannot be
//!   used, a full map, an address in use, the API server away for long. Rare enough that a test may fail on one.
//! * INFO: what happens once: start, settings, programs attached, first sync, stop.
//! * DEBUG: one line for each object or device: what changed, what was written.
//! * TRACE: one line for each event or map operation.
//!
//! Details are in fields (`service=default/redis`), and the message is a constant. A state is logged once when it
//! begins, and once more when it ends.
//!
//! `BALLAST_LOG` overrides the level for single modules, as [`EnvFilter`] reads it: `info,ballast::sync=trace`.

use std::fmt;
use std::io;

use tracing::Metadata;
use tracing_subscriber::filter::{EnvFilter, FilterExt as _, LevelFilter, ParseError, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::otlp::Layer;
use proxy_cli::value::{LogFormat, LogLevel};
use proxy_core::spans;

/// The environment variable that overrides `--log-level`.
pub const VARIABLE: &str = "BALLAST_LOG";

/// The name of our crates in log lines, and in log filters of users.
const PUBLIC_TARGET: &str = "ballast";
/// The names of our crates for the compiler.
const CRATES: [&str; 6] =
    ["proxy_user", "proxy_cli", "proxy_watch", "proxy_core", "proxy_common", "proxy_ebpf"];
/// Libraries that log at each attempt what [`proxy_watch::api::watch_health`] logs once.
const REPEATERS: [&str; 2] = ["kube_client::client", "kube_runtime::watcher"];

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter is not valid.
    #[error("{VARIABLE}={value:?} is not a log filter: {source}; write it like info,ballast::sync=debug")]
    Filter {
        /// The given value.
        value: String,
        /// Why it is not valid.
        source: ParseError,
    },
    /// A subscriber is already set up.
    #[error("logging was set up twice: {0}")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
}

/// Sends log lines to standard error from now on, and the same lines and spans to `export`, if there is one. `BALLAST_LOG` is
/// read here.
pub fn init(format: LogFormat, level: LogLevel, export: Option<Layer>) -> Result<(), TelemetryError> {
    let filter = std::env::var(VARIABLE).ok();
    let filter = || directives(level, filter.as_deref());
    let export = export.map(|layer| Ok::<_, TelemetryError>((layer, filter()?))).transpose()?;
    let filter = filter()?;
    subscriber(format, filter, io::stderr, export).try_init().map_err(TelemetryError::Twice)
}

/// Returns the given filter, or by default: lines of our crates from `level` on, only warnings of libraries, and no
/// library line that repeats a line of ours, unless `level` is trace.
fn directives(level: LogLevel, filter: Option<&str>) -> Result<EnvFilter, TelemetryError> {
    let libraries = match level {
        LogLevel::Error => LogLevel::Error,
        LogLevel::Warn | LogLevel::Info | LogLevel::Debug => LogLevel::Warn,
        LogLevel::Trace => LogLevel::Debug,
    };
    let repeaters = if level == LogLevel::Trace { libraries.to_string() } else { "off".to_owned() };
    let repeaters = REPEATERS.map(|target| format!("{target}={repeaters}")).join(",");
    let default = format!("{libraries},{repeaters},{PUBLIC_TARGET}={level}");
    let text = filter.filter(|text| !text.is_empty()).unwrap_or(&default);
    let all: Vec<_> = text.split(',').flat_map(of_crates).collect();
    EnvFilter::try_new(all.join(","))
        .map_err(|source| TelemetryError::Filter { value: text.to_owned(), source })
}

/// Returns a directive of a log filter with the compiler's names of our crates instead of the public name.
fn of_crates(directive: &str) -> Vec<String> {
    match directive.trim().strip_prefix(PUBLIC_TARGET) {
        Some(rest) if rest.is_empty() || rest.starts_with("::") || rest.starts_with(['=', '[']) => {
            CRATES.map(|name| [name, rest].concat()).into()
        }
        _ => vec![directive.to_owned()],
    }
}

/// Returns the subscriber; tests choose the writer.
fn subscriber<W>(
    format: LogFormat,
    filter: EnvFilter,
    writer: W,
    export: Option<(Layer, EnvFilter)>,
) -> Box<dyn tracing::Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(false).map_event_format(PublicNames).boxed(),
        LogFormat::Json => {
            lines.json().flatten_event(true).with_current_span(false).map_event_format(PublicNames).boxed()
        }
    };
    // Spans of this crate are only exported: in the log they would precede every line. With the hint, the level of the
    // log still decides whether a line is evaluated.
    let no_span = filter_fn(|metadata| !is_exported_span(metadata)).with_max_level_hint(LevelFilter::TRACE);
    let lines = lines.with_filter(filter.and(no_span));
    let Some((layer, filter)) = export else {
        // Without export there is no second layer, not even one that does nothing: with it, the registry would create the spans.
        return Box::new(Registry::default().with(lines));
    };
    let is_wanted = filter.or(filter_fn(is_exported_span).with_max_level_hint(LevelFilter::INFO));
    Box::new(Registry::default().with(lines).with(layer.with_filter(is_wanted)))
}

/// Writes lines with the name of the product and of its part instead of the compiler's path of a module: `ballast::sync`.
struct PublicNames<F>(F);

impl<S, N, F> FormatEvent<S, N> for PublicNames<F>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        let target = event.metadata().target();
        match public_name(target) {
            Some(name) => writer.write_str(&line.replacen(target, &name, 1)),
            None => writer.write_str(&line),
        }
    }
}

/// Returns the public name of a module of ours; `None` for other targets.
fn public_name(target: &str) -> Option<String> {
    let mut parts = target.split("::");
    let is_ours = parts.next().is_some_and(|name| CRATES.contains(&name));
    let part = parts.next().map(|part| format!("::{part}")).unwrap_or_default();
    is_ours.then(|| format!("{PUBLIC_TARGET}{part}"))
}

fn is_exported_span(metadata: &Metadata<'_>) -> bool {
    metadata.target() == spans::TARGET
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Sink {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    fn written(format: LogFormat, level: LogLevel, filter: Option<&str>) -> String {
        let sink = Sink::default();
        let subscriber = subscriber(format, directives(level, filter).unwrap(), sink.clone(), None);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(service = "default/redis", "programmed");
            tracing::debug!(target: "proxy_core::sync", "one object");
            tracing::info!(target: "hyper", "chatter");
        });
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn info_shows_ours_and_not_the_libraries() {
        let text = written(LogFormat::Text, LogLevel::Info, None);
        assert!(text.contains("programmed service=\"default/redis\""), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }

    #[test]
    fn a_line_names_the_product_and_not_the_paths_of_its_modules() {
        let filter = Some("trace,hyper=off");
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = written(format, LogLevel::Info, filter);
            assert!(text.contains("ballast::telemetry") && text.contains("ballast::sync"), "{text}");
            assert!(!text.contains("proxy_"), "{text}");
        }
        assert_eq!(public_name("proxy_core::sync::addresses").as_deref(), Some("ballast::sync"));
        assert_eq!(public_name("kube_client::client"), None);
    }

    #[test]
    fn libraries_do_not_repeat_what_we_say_once() {
        let repeated = |level| {
            let sink = Sink::default();
            let filter = directives(level, None).unwrap();
            tracing::subscriber::with_default(
                subscriber(LogFormat::Text, filter, sink.clone(), None),
                || {
                    tracing::error!(target: "kube_client::client::builder", "failed with error client error (Connect)");
                    tracing::warn!(target: "kube_client::client", "eof in poll");
                    tracing::warn!(target: "kube_runtime::watcher", "watch list error with 403");
                    tracing::warn!(target: "kube_client::config", "overriding cluster URL");
                },
            );
            let bytes = sink.0.lock().unwrap().clone();
            String::from_utf8(bytes).unwrap()
        };
        for level in [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug] {
            let text = repeated(level);
            assert!(!text.contains("kube_client::client") && !text.contains("kube_runtime"), "{text}");
        }
        assert!(repeated(LogLevel::Debug).contains("overriding cluster URL"), "the rest of it is not ours");
        assert_eq!(repeated(LogLevel::Trace).lines().count(), 4);
    }

    #[test]
    fn spans_are_exported_and_stand_in_no_line() {
        let exporter = crate::otlp::Exporter::default();
        let layer = Layer { spans: Some(exporter.spans.clone()), logs: Some(exporter.logs.clone()) };
        let sink = Sink::default();
        // A filter of the log that lets all levels pass.
        let filter = || directives(LogLevel::Info, Some("trace,hyper=off")).unwrap();
        let subscriber = subscriber(LogFormat::Text, filter(), sink.clone(), Some((layer, filter())));
        tracing::subscriber::with_default(subscriber, || {
            let _span = tracing::info_span!(target: spans::TARGET, "sync", ballast.services = 7).entered();
            tracing::info!(service = "default/redis", "programmed");
            tracing::info!(target: "hyper", "chatter");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        assert!(text.contains("programmed") && !text.contains("sync") && !text.contains("chatter"), "{text}");
        assert_eq!(exporter.waiting(), (1, 1));
    }

    #[test]
    fn without_export_a_span_is_not_even_made() {
        let filter = || directives(LogLevel::Trace, None).unwrap();
        let with = |export| subscriber(LogFormat::Text, filter(), Sink::default(), export);
        let exporting = with(Some((Layer::default(), filter())));
        let span = tracing::subscriber::with_default(exporting, || {
            tracing::info_span!(target: spans::TARGET, "sync").metadata().unwrap()
        });
        assert!(with(None).register_callsite(span).is_never());
        assert!(!with(Some((Layer::default(), filter()))).register_callsite(span).is_never());
    }

    #[test]
    fn a_json_line_is_one_flat_object() {
        let text = written(LogFormat::Json, LogLevel::Info, None);
        let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!(line["message"], "programmed");
        assert_eq!(line["service"], "default/redis");
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn the_variable_wins_and_knows_the_public_name() {
        let text = written(LogFormat::Text, LogLevel::Info, Some("error,ballast::sync=debug"));
        assert!(text.contains("one object") && !text.contains("programmed"), "{text}");
    }

    #[test]
    fn lines_of_each_crate_of_the_product_are_written() {
        let workspace = include_str!("../../Cargo.toml");
        let members = workspace.lines().find_map(|line| line.strip_prefix("members = ")).unwrap();
        let members: std::collections::BTreeSet<String> = serde_json::from_str(members).unwrap();
        let product = members.iter().filter(|name| !["proxy-testbed", "xtask"].contains(&name.as_str()));
        let product = product.map(|name| name.replace('-', "_"));
        assert_eq!(product.collect::<std::collections::BTreeSet<_>>(), CRATES.map(str::to_owned).into());
        for filter in [None, Some("warn,ballast=info"), Some("warn,ballast::sync=info")] {
            let sink = Sink::default();
            let filter = directives(LogLevel::Info, filter).unwrap();
            let subscriber = subscriber(LogFormat::Text, filter, sink.clone(), None);
            tracing::subscriber::with_default(subscriber, || {
                tracing::info!(target: "proxy_cli::sync", "line");
                tracing::info!(target: "proxy_watch::sync", "line");
                tracing::info!(target: "proxy_user::sync", "line");
                tracing::info!(target: "proxy_core::sync", "line");
                tracing::info!(target: "proxy_common::sync", "line");
                tracing::info!(target: "proxy_ebpf::sync", "line");
            });
            let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
            assert_eq!(text.matches("ballast::sync: line").count(), CRATES.len(), "{text}");
        }
    }

    #[test]
    fn a_bad_filter_says_what_a_good_one_is() {
        let error = directives(LogLevel::Info, Some("ballast::sync=loud")).unwrap_err().to_string();
        assert!(error.contains("BALLAST_LOG") && error.contains("info,ballast::sync=debug"), "{error}");
    }
}
