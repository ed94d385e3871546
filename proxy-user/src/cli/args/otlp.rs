//! The flags of OpenTelemetry's export.

use crate::config::otlp::{OtlpOptions, Telemetry};

/// Export of telemetry to an OpenTelemetry collector. `OTEL_EXPORTER_OTLP_HEADERS`, `_TIMEOUT`, `_CERTIFICATE`,
/// `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` hold, too.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Health, metrics, log")]
pub struct OtlpArgs {
    /// URL of an OpenTelemetry collector to which traces, log lines and events are sent by HTTP with JSON, like
    /// <http://127.0.0.1:4318>. Default: `$OTEL_EXPORTER_OTLP_ENDPOINT`; nothing is sent where neither is given.
    #[arg(long, env = "BALLAST_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// What is sent to it.
    #[arg(
        long,
        env = "BALLAST_OTLP_SIGNALS",
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "traces,logs,events"
    )]
    pub otlp_signals: Vec<Telemetry>,
    /// Of new flows, one in so many is an event that is sent; 0: none. Refusals, drops and passes always are.
    #[arg(long, env = "BALLAST_OTLP_SAMPLE", value_name = "N", default_value_t = 0)]
    pub otlp_sample: u32,
}

impl From<OtlpArgs> for OtlpOptions {
    fn from(args: OtlpArgs) -> Self {
        let OtlpArgs { otlp_endpoint, otlp_signals, otlp_sample } = args;
        Self { otlp_endpoint, otlp_signals, otlp_sample }
    }
}
