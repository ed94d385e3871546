//! Copies the changes in one flow table to the other.

use proxy_common::Address;
use proxy_common::config::NodeConfig;
use proxy_common::conntrack::{ASSURED, is_closed};

use super::layout::Layout;
use super::table::{Put, Scope, Table};

/// What happened to the flows that were to be copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// New flows that were added.
    pub added: usize,
    /// Flows that existed, and were updated.
    pub updated: usize,
    /// Flows for which there was no room.
    pub lost: usize,
}

impl Copied {
    /// Returns the sums of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            added: self.added + other.added,
            updated: self.updated + other.updated,
            lost: self.lost + other.lost,
        }
    }
}

/// Copies the flows of `from` that have changed since the last call. Expired flows are not added. Closed flows are not added
/// either, unless their source port is in quarantine: a table is full of closed flows.
pub(super) fn copy<A: Address, F: Layout<A>, T: Layout<A>>(
    from: &mut Table<A, F>,
    to: &mut Table<A, T>,
    config: &NodeConfig,
    scope: Scope,
) -> Copied {
    let mut copied = Copied::default();
    let mut changed = from.changes(scope);
    let now = from.latest();
    to.begin_pass(now);
    changed.retain(|flow| T::takes(flow) && (!flow.is_expired(now, config) || to.is_quarantined(flow)));
    // If there is no room for all flows, open and assured ones are added first.
    changed.sort_by_key(|flow| (is_closed(flow.bits()), flow.bits() & ASSURED == 0));
    for flow in changed {
        match to.put(&flow) {
            Put::Added => copied.added += 1,
            Put::Updated => copied.updated += 1,
            Put::Newer | Put::Over => {}
            Put::NoRoom => copied.lost += 1,
        }
    }
    copied
}
