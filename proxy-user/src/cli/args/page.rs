//! The flags of the page.

use std::time::Duration;

use crate::config::page::{PageSettings, Shows};
use crate::config::value;

/// The page at `/` of the metrics server.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Being asked")]
pub struct PageArgs {
    /// Show a page at / of --metrics-bind-address, for browsers.
    #[arg(long, env = "BALLAST_PAGE", value_name = "WHAT", default_value = "off")]
    pub page: Shows,
    /// How far back the history of that page goes: 4m to 24h; 0: none. It has 240 points.
    #[arg(long, env = "BALLAST_PAGE_HISTORY", value_name = "DURATION", default_value = "1h", value_parser = value::page_history)]
    pub page_history: Duration,
}

impl From<PageArgs> for PageSettings {
    fn from(args: PageArgs) -> Self {
        let PageArgs { page, page_history } = args;
        Self { page, page_history }
    }
}
