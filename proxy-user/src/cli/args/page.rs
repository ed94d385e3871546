//! The flags of the page.

use super::choices::choice;
use super::mirror::flags_of;
use std::time::Duration;

use clap::builder::FalseyValueParser;

use crate::config::page::{PageSettings, Shows};
use proxy_cli::value;

flags_of! {
    /// The page at `/` of the metrics server.
    #[derive(Clone, Copy, Debug, clap::Args)]
    #[command(next_help_heading = "Web page")]
    PageArgs => PageSettings {
        /// What the web page at / of the metrics server shows.
        #[arg(long, env = "BALLAST_PAGE", value_name = "WHAT", default_value = "off", value_parser = choice::<Shows>())]
        page: Shows,
        /// Length of the history on that page: 4m to 24h; 0: no history. The history has 240 points.
        #[arg(long, env = "BALLAST_PAGE_HISTORY", value_name = "DURATION", default_value = "1h", value_parser = value::page_history)]
        page_history: Duration,
        /// Whether /metrics has series for each Service port. In a cluster of 10,000 Service ports, these are 60,000 series of
        /// each node, and twice as many with both address families.
        #[arg(
            long, env = "BALLAST_SERVICE_METRICS", action = clap::ArgAction::Set, default_value = "true", num_args = 0..=1, default_missing_value = "true",
            require_equals = true, value_parser = FalseyValueParser::new(), help_heading = "Metrics"
        )]
        service_metrics: bool,
    }
}
