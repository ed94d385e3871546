//! The page at `/` of the metrics server (`--page`): what `ballast top` shows, in a browser.
//!
//! | path | answer |
//! |---|---|
//! | `/` | the page |
//! | `/page/NAME` | its scripts, styles and icon ([`assets`]) |
//! | `/page/events?filter=&service=` | server-sent events: the changes since the previous event, as JSON ([`frame`]) |
//! | `/page/history?service=` | rates of the last hour ([`HistoryAnswer`]), of all Service ports or of one |
//!
//! [`Agent`] answers for one node, `kubectl ballast ui` for a cluster; both are a [`Source`]. [`guard`] checks every request.
//! The agent reads the maps while a page is open, and for the history.

mod agent;
mod assets;
mod clients;
mod frame;
mod guard;
mod log;
mod sample;
mod sampler;
mod server;
mod source;

pub use agent::Agent;
pub use log::HistoryAnswer;
pub use server::router;
pub use source::{Events, PageQuery, Refusal, Source};

#[cfg(test)]
mod tests;
