//! What the page of the metrics server shows.

use std::time::Duration;

use serde::Serialize;

use super::value::seconds;

/// Points of a history: `--page-history` says how much time they span.
pub const HISTORY_POINTS: u32 = 240;
/// How long a history is unless something else is said.
pub const HISTORY: Duration = Duration::from_hours(1);

/// The page at `/` of the metrics server. The fields are the flags of these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PageSettings {
    /// Whether there is one, and what it shows.
    pub page: Shows,
    /// How far back its history goes; zero: there is none.
    #[serde(serialize_with = "seconds")]
    pub page_history: Duration,
}

impl Default for PageSettings {
    fn default() -> Self {
        Self { page: Shows::Off, page_history: HISTORY }
    }
}

/// `--page`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shows {
    /// There is no page.
    #[default]
    Off,
    /// What `/metrics` and `/problems` tell: rates by Service and by reason.
    Services,
    /// Addresses of clients and endpoints too, and examples of what was refused.
    All,
}
