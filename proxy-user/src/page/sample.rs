//! The result of one look at the maps, shared by all connected browsers.

use std::collections::{BTreeMap, VecDeque};
use std::time::SystemTime;

use super::clients::Client;
use crate::cli::monitor::MonitorLine;
use crate::rates::Rates;

/// The last examples of each reason, newest first.
pub(super) type Examples = BTreeMap<&'static str, VecDeque<MonitorLine>>;

/// The result of one look at the maps.
#[derive(Debug)]
pub(super) struct Sample {
    /// Time of the look.
    pub at: SystemTime,
    /// Rates since the previous look, or why the maps cannot be read.
    pub rates: Result<Rates, String>,
    /// Clients of the Service ports; empty unless addresses are shown.
    pub clients: Vec<Client>,
    /// Examples of refused and dropped packets and calls since the page was opened; empty unless addresses are shown.
    pub examples: Examples,
    /// Current problems, in sentences.
    pub problems: Vec<String>,
}
