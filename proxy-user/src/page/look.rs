//! What one look at the maps has found, for all who listen.

use std::collections::{BTreeMap, VecDeque};
use std::time::SystemTime;

use super::clients::Client;
use crate::cli::monitor::Line;
use crate::rates::Rates;

/// The last examples of each reason, newest first.
pub(super) type Examples = BTreeMap<&'static str, VecDeque<Line>>;

/// What one look has found.
#[derive(Debug)]
pub(super) struct Look {
    /// When.
    pub at: SystemTime,
    /// What happened since the look before, or why the maps cannot be read.
    pub rates: Result<Rates, String>,
    /// Who dials what; empty unless addresses are shown.
    pub clients: Vec<Client>,
    /// What was refused or dropped since a page is open; empty unless addresses are shown.
    pub examples: Examples,
    /// What is wrong, in sentences.
    pub problems: Vec<String>,
}
