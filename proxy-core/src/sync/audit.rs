//! Compares the maps with the mirror in pieces, so that a change waits for one piece at most.
//!
//! Between two pieces the agent may write to the maps; [`Audit::note`] records these writes. Arrays are compared by
//! position. A hash and a trie return their entries in their own order, so an entry counts as missing if a whole walk has not
//! met it and the agent has not written it since the walk began.

use std::collections::BTreeSet;
use std::ops::Range;

use ipnet::IpNet;

use super::applied::Applied;
use crate::store::{Cursor, FrontendKey, MapError, Store, Table, Write};

/// The result of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// No difference so far, and more pieces follow.
    More,
    /// The last piece: no difference.
    Clean,
    /// A difference was found.
    Differs,
}

/// A comparison in progress.
#[derive(Debug, Default)]
pub(super) struct Audit {
    /// Number of compared tables, in the order of [`Table::ALL`].
    pub(super) done: usize,
    /// Position in the table at which the next piece begins; `None` at its start.
    place: Option<Cursor>,
    /// Frontends that are certainly in the maps.
    frontends: BTreeSet<FrontendKey>,
    /// Ids whose names are certainly in the map.
    names: BTreeSet<u32>,
    /// Source ranges that are certainly in the maps.
    ranges: BTreeSet<(u32, IpNet)>,
}

impl Audit {
    /// Records a successful `write`.
    pub(super) fn note(&mut self, write: &Write) {
        match write {
            Write::Service(key, _) => {
                self.frontends.insert(*key);
            }
            Write::NoService(key) => {
                self.frontends.remove(key);
            }
            Write::Name(id, _) => {
                self.names.insert(*id);
            }
            Write::NoName(id) => {
                self.names.remove(id);
            }
            Write::SourceRange(id, range) => {
                self.ranges.insert((*id, *range));
            }
            Write::NoSourceRange(id, range) => {
                self.ranges.remove(&(*id, *range));
            }
            _ => {}
        }
    }

    /// Compares about `piece` entries; returns whether they equal the mirror. Invalid entries that could not be removed so far are
    /// left out.
    pub(super) fn compare(
        &mut self,
        store: &mut impl Store,
        applied: &Applied,
        orphans: &[Write],
        piece: u32,
    ) -> Result<bool, MapError> {
        let Some(table) = Table::ALL.get(self.done).copied() else { return Ok(true) };
        let start = if let Some(Cursor::At(start)) = self.place { start } else { 0 };
        let (is_right, next) = match table {
            Table::Services | Table::Services6 | Table::Names | Table::SrcRanges | Table::SrcRanges6 => {
                self.walk(table, store, applied, orphans, piece)?
            }
            Table::Node
            | Table::Node6
            | Table::NodeAddrs
            | Table::NodeAddrs6
            | Table::Tunnels
            | Table::Devices
            | Table::Config => (store.walk(table, None, u32::MAX)?.0.node == applied.node.of(table), None),
            Table::Slots => {
                let extents = || {
                    let mut extents = applied.extents.from(start).peekable();
                    let end = extents.peek().map_or(start, |(base, _)| base.saturating_add(piece));
                    extents.take_while(move |(base, _)| *base < end)
                };
                let first = extents().next().map_or(start, |(base, _)| base);
                let end = extents().last().map_or(start, |(base, ids)| base + ids.len() as u32);
                let found = store.read_range(table, first..end)?.slots;
                let holds = |base: u32, ids: &[u32]| {
                    let at = (base - first) as usize;
                    found.get(at..at + ids.len()).is_some_and(|slots| slots == ids)
                };
                (extents().all(|(base, ids)| holds(base, ids)), (end > start).then_some(Cursor::At(end)))
            }
            Table::Maglev => {
                // A Maglev table has some hundred words, so a piece reads few of them, but many indexes without a table.
                let end = applied.maglev.last_key_value().map_or(0, |(index, _)| index + 1);
                let (mut range, mut next) = part(start, piece.saturating_mul(8), end);
                let beyond = applied.maglev.range(range.clone()).nth((piece / 128).max(1) as usize);
                if let Some((index, _)) = beyond {
                    (range.end, next) = (*index, Some(Cursor::At(*index)));
                }
                let found = store.read_range(table, range.clone())?.maglev;
                (applied.maglev.range(range).eq(&found), next)
            }
            Table::Backends | Table::Backends6 => {
                let (range, next) = part(start, piece, applied.endpoints.high_water());
                let mut found = store.read_range(table, range.clone())?;
                found.leave_out(orphans);
                let found = if table == Table::Backends { found.backends } else { found.backends6 };
                let ours =
                    applied.backends.range(range).filter(|(_, row)| Table::backends(row.addr) == table);
                (ours.eq(found.iter().map(|(id, row)| (*id, row))), next)
            }
            Table::Prefilter => {
                let words = applied.prefilter.words();
                let (range, next) = part(start, piece, words.len() as u32);
                let found = store.read_range(table, range.clone())?.prefilter;
                (words.get(range.start as usize..range.end as usize) == Some(&found), next)
            }
        };
        self.place = next;
        self.done += usize::from(next.is_none());
        Ok(is_right)
    }

    /// Compares a piece of a hash. Returns whether it equals the mirror, and the position of the next piece.
    fn walk(
        &mut self,
        table: Table,
        store: &mut impl Store,
        applied: &Applied,
        orphans: &[Write],
        piece: u32,
    ) -> Result<(bool, Option<Cursor>), MapError> {
        let (mut found, next) = store.walk(table, self.place, piece)?;
        found.leave_out(orphans);
        let are_ours = found.services.iter().all(|(key, entry)| applied.services.get(key) == Some(entry))
            && found
                .names
                .iter()
                .all(|(id, name)| applied.names.get(*id).is_some_and(|known| *known == *name))
            && found.source_ranges.iter().all(|(id, range)| applied.ranges.has(*id, range));
        self.frontends.extend(found.services.into_keys());
        self.names.extend(found.names.into_keys());
        self.ranges.extend(found.source_ranges);
        let is_complete = match table {
            _ if next.is_some() => true,
            Table::Services6 => self.frontends.len() == applied.services.len(),
            Table::Names => self.names.len() == applied.names.len(),
            Table::SrcRanges6 => self.ranges.len() == applied.ranges.iter().count(),
            _ => true,
        };
        Ok((are_ours && is_complete, next))
    }
}

/// Returns the next part of an array with `len` used elements, and the start of the part after it.
fn part(start: u32, piece: u32, len: u32) -> (Range<u32>, Option<Cursor>) {
    let end = start.saturating_add(piece).min(len);
    (start.min(end)..end, (end < len).then_some(Cursor::At(end)))
}
