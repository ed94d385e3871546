//! Settings of the metrics server and its page.

use std::time::Duration;

use serde::Serialize;

use proxy_cli::value::seconds;

/// The default length of a history.
pub const HISTORY: Duration = Duration::from_hours(1);

/// The settings of the metrics server and its page at `/`. The fields are the flags with these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PageSettings {
    /// Whether the page is served, and what it shows.
    pub page: Shows,
    /// How far back its history goes; zero: no history.
    #[serde(serialize_with = "seconds")]
    pub page_history: Duration,
    /// Whether `/metrics` has series for each Service port.
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
