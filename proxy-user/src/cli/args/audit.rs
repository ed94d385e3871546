//! The flag that says how often the agent audits itself.

use std::time::Duration;

use serde::Serialize;

use crate::cli::config;
use crate::cli::value;

/// How often the agent audits itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditArgs {
    /// How often all Services and EndpointSlices are listed once more and compared with what is programmed; a difference that
    /// lasts is repaired and counted. 0: never.
    #[arg(
        long,
        env = "BALLAST_API_AUDIT_PERIOD",
        value_name = "DURATION",
        default_value = "1h",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    #[serde(serialize_with = "config::seconds")]
    pub api_audit_period: Duration,
}
