//! Collects the log lines and spans of the agent as they are created.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes as NewAttributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::Context as LayerContext;
use tracing_subscriber::registry::LookupSpan;

use super::queue::Queue;
use super::record::{LogRecord, Severity};
use super::span::{Span, Status};
use super::value::{Attributes, Value};
use proxy_core::spans;

/// Field of a span that holds its error message.
const ERROR: &str = "error";
/// Field of an event that holds its message.
const MESSAGE: &str = "message";

/// Layer of the subscriber that puts spans and log lines into the queues.
#[derive(Debug, Default)]
pub struct Layer {
    /// Queue for spans; `None`: spans are not exported.
    pub spans: Option<Queue<Span>>,
    /// Queue for log lines; `None`: log lines are not exported.
    pub logs: Option<Queue<LogRecord>>,
}

impl<S> tracing_subscriber::Layer<S> for Layer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, new: &NewAttributes<'_>, id: &Id, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id).filter(|span| span.metadata().target() == spans::TARGET) else {
            return;
        };
        // Spans of libraries may lie between a span and its exported parent.
        let parent = span.scope().skip(1).find_map(|above| Some(above.extensions().get::<Span>()?.context));
        let mut begun = Span::begin(span.name(), parent, now());
        new.record(&mut Fields::of_span(&mut begun));
        span.extensions_mut().insert(begun);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(span) = span.extensions_mut().get_mut::<Span>() {
            values.record(&mut Fields::of_span(span));
        }
    }

    fn on_close(&self, id: Id, context: LayerContext<'_, S>) {
        let ended = context.span(&id).and_then(|span| span.extensions_mut().remove::<Span>());
        if let (Some(mut span), Some(queue)) = (ended, &self.spans) {
            span.end_time_unix_nano = now();
            queue.push(span);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: LayerContext<'_, S>) {
        let Some(queue) = &self.logs else { return };
        let metadata = event.metadata();
        let scope = context.event_scope(event).into_iter().flatten();
        let span = scope.into_iter().find_map(|span| Some(span.extensions().get::<Span>()?.context));
        let mut fields =
            Fields { attributes: &mut Attributes::default(), error: None, message: String::new() };
        event.record(&mut fields);
        let (mut attributes, message) = (std::mem::take(fields.attributes), fields.message);
        attributes.set("ballast.module", metadata.target());
        let time = now();
        queue.push(LogRecord {
            time_unix_nano: time,
            observed_time_unix_nano: time,
            severity: severity(*metadata.level()),
            body: message.into(),
            attributes,
            context: span,
            event_name: "",
        });
    }
}

/// Returns the current time in nanoseconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or_default()
}

fn severity(level: Level) -> Severity {
    match level {
        Level::ERROR => Severity::Error,
        Level::WARN => Severity::Warn,
        Level::INFO => Severity::Info,
        Level::DEBUG => Severity::Debug,
        Level::TRACE => Severity::Trace,
    }
}

/// Collects the fields of a span or an event.
struct Fields<'a> {
    attributes: &'a mut Attributes,
    /// Status of the span, set by the field `error`; `None` for an event.
    error: Option<&'a mut Status>,
    message: String,
}

impl<'a> Fields<'a> {
    fn of_span(span: &'a mut Span) -> Self {
        Self { attributes: &mut span.attributes, error: Some(&mut span.status), message: String::new() }
    }

    fn set(&mut self, field: &Field, value: Value) {
        match (field.name(), value, &mut self.error) {
            (MESSAGE, Value::Text(text), None) => self.message = text,
            (ERROR, Value::Text(text), Some(status)) => **status = Status::error(text),
            (name, value, _) => self.attributes.set(name, value),
        }
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, Value::Int(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, Value::Bool(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, Value::Double(value));
    }
}
