//! The server of the page at `/` of the metrics server (`--page`): what `ballast top` shows, in a browser.
//!
//! | path | answer |
//! |---|---|
//! | `/` | the page |
//! | `/page/NAME` | its scripts, styles and icon ([`assets`]) |
//! | `/page/events?filter=&service=` | server-sent events: the changes since the previous event, as JSON |
//! | `/page/history?service=` | rates of the last hour ([`HistoryAnswer`]), of all Service ports or of one |
//!
//! The agent answers for one node, `kubectl ballast ui` for a cluster; both are a [`Source`]. [`guard`] checks every request.

mod assets;
mod guard;
mod history;
mod server;
mod source;

pub use history::{HISTORY_POINTS, HistoryAnswer};
pub use server::router;
pub use source::{Events, PageQuery, Refusal, Source};
