//! Flags of the OpenTelemetry export.

use super::choices::choice;
use super::mirror::flags_of;
use crate::config::otlp::{OtlpOptions, Telemetry};

flags_of! {
    /// Export of telemetry to an OpenTelemetry collector. `OTEL_EXPORTER_OTLP_HEADERS`, `_TIMEOUT`, `_CERTIFICATE`,
    /// `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` hold, too.
    #[derive(Clone, Debug, clap::Args)]
    #[command(next_help_heading = "Health, metrics, logs")]
    OtlpArgs => OtlpOptions {
        /// URL of an OpenTelemetry collector (OTLP over HTTP with JSON) for traces, log lines and events, like
        /// <http://127.0.0.1:4318>. Default: `$OTEL_EXPORTER_OTLP_ENDPOINT`; without both, the agent exports nothing.
        #[arg(long, env = "BALLAST_OTLP_ENDPOINT", value_name = "URL")]
        otlp_endpoint: Option<String>,
        /// What the agent exports to the collector.
        #[arg(
            long,
            env = "BALLAST_OTLP_SIGNALS",
            value_name = "LIST",
            value_delimiter = ',',
            default_value = "traces,logs,events",
            value_parser = choice::<Telemetry>(),
        )]
        otlp_signals: Vec<Telemetry>,
        /// Export one of every N new flows as an event; 0: none. Refusals, drops and passes are always exported.
        #[arg(long, env = "BALLAST_OTLP_SAMPLE", value_name = "N", default_value_t = 0)]
        otlp_sample: u32,
    }
}
