//! Settings of the metrics server and its page.

use std::time::Duration;

use clap::builder::FalseyValueParser;
use serde::Serialize;

use super::choices::{choice, choices};
use proxy_cli::value::{self, seconds};

/// The default length of a history.
pub const HISTORY: Duration = Duration::from_hours(1);

/// The settings of the metrics server and its page at `/`. The fields are the flags with these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::Args)]
#[serde(rename_all = "camelCase")]
#[command(next_help_heading = "Web page")]
pub struct PageSettings {
    /// What the web page at / of the metrics server shows.
    #[arg(long, env = "BALLAST_PAGE", value_name = "WHAT", default_value = "off", value_parser = choice::<Shows>())]
    pub page: Shows,
    /// Length of the history on that page: 4m to 24h; 0: no history. The history has 240 points.
    #[serde(serialize_with = "seconds")]
    #[arg(long, env = "BALLAST_PAGE_HISTORY", value_name = "DURATION", default_value = "1h", value_parser = value::page_history)]
    pub page_history: Duration,
    /// Whether /metrics has series for each Service port. In a cluster of 10,000 Service ports, these are 60,000 series of
    /// each node, and twice as many with both address families.
    #[arg(
        long, env = "BALLAST_SERVICE_METRICS", action = clap::ArgAction::Set, default_value = "true", num_args = 0..=1, default_missing_value = "true",
        require_equals = true, value_parser = FalseyValueParser::new(), help_heading = "Metrics"
    )]
    pub service_metrics: bool,
}

impl Default for PageSettings {
    fn default() -> Self {
        Self { page: Shows::Off, page_history: HISTORY, service_metrics: true }
    }
}

/// The value of `--page`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shows {
    /// No page is served.
    #[default]
    Off,
    /// The data of `/metrics` and the problems of `/status`: rates by Service and by reason.
    Services,
    /// Also addresses of clients and endpoints, and examples of refusals.
    All,
}

choices! {
    Shows {
        Off = "off": "No page",
        Services = "services": "The data of /metrics and the problems of /status: rates by Service and by reason",
        All = "all": "Also addresses of clients and endpoints, and examples of refused connections",
    }
}
