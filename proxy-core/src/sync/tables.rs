//! The phases that write and remove Maglev tables.
//!
//! A replaced table stays as a previous one for a day, unless [`PREVIOUS`] newer ones follow, or another table needs its space.
//! While the map is more than half full, it stays for the drain period only.

use std::collections::BTreeSet;
use std::mem::take;
use std::time::{Duration, Instant};

use proxy_common::maglev;

use super::job::{Job, Steps, SyncError, note};
use super::shares::Resource;
use super::writer::Writer;
use crate::plan::maglev::{Member, length, packed, signature};
use crate::store::{MaglevRow, MaglevTable, Store, Write};

/// How long a table serves although endpoints have changed since, if there is no room for the new one. A packet whose endpoint is gone
/// gets another one, and new endpoints get no packets.
const OUTDATED: Duration = Duration::from_secs(10);

/// The most tables that are built before they are written: this limits the memory.
const AT_ONCE: usize = 256;

impl<S: Store> Writer<S> {
    /// Gives every port the tables that its frontends need: the existing ones, or new ones. Without space the old table stays for a
    /// moment, in which tables that leave may make room. Then there is no table, and the hash selects one of the slots; the last
    /// table stays as the previous one, for connections that began with it. Tables hold backend ids: the rows of the backends are written before
    /// them, and a packet that selects a removed backend sees this in its row.
    pub(super) fn write_tables(&mut self, jobs: &mut [Job], now: Instant) {
        let capacity = self.store.capacity();
        let mut steps = Steps::default();
        for number in 0..jobs.len() {
            let job = &mut jobs[number];
            let (Some(id), false, Some(wanted)) = (job.id, job.stopped, &job.wanted) else { continue };
            for (local, members) in wanted.tables.iter().filter(|(_, members)| members.len() > 1) {
                let (index, signature) = (maglev::index(id, *local), signature(members));
                let old = self.applied.maglev.get(&index).cloned().unwrap_or_default();
                if old.current.words != 0 && old.current.signature == signature {
                    continue;
                }
                if let Some(table) = old.previous.iter().find(|table| table.signature == signature) {
                    steps.push(number, Write::MaglevIndex(index, old.replaced(*table)));
                    continue;
                }
                let words = length(members.len());
                // The replaced table counts no more.
                let more = words.saturating_sub(old.current.words).into();
                let is_allowed = job.owner.port().is_some_and(|port| {
                    self.reserve.allows(&self.applied, &capacity, Resource::Maglev, port, more)
                });
                let allocated = if is_allowed {
                    self.applied.tables.allocate_for(id, halves(signature), words)
                } else {
                    Err(self.applied.tables.no_room(words))
                };
                match allocated {
                    Ok(base) => {
                        self.applied.outdated.remove(&index);
                        job.tables.push(base);
                        steps.push(number, Write::MaglevTable(base, packed(members)));
                        let current = MaglevTable { base, words, signature };
                        let mut row = old.replaced(current);
                        if let Some((table, packed)) = self.previous_table_of_single(id, &old, members) {
                            job.tables.push(table.base);
                            steps.push(number, Write::MaglevTable(table.base, packed));
                            row.previous.push(table);
                        }
                        steps.push(number, Write::MaglevIndex(index, row));
                    }
                    Err(no_room) => {
                        let since = *self.applied.outdated.entry(index).or_insert(now);
                        let (has_table, is_late) = (old.current.words != 0, since + OUTDATED <= now);
                        let is_over = has_table && is_late;
                        let waits = has_table && !is_late && is_allowed;
                        let cause = if waits { SyncError::TableWaits } else { SyncError::Tables };
                        note(&mut job.cause, cause(no_room));
                        if is_over {
                            let row = old.replaced(MaglevTable::default());
                            steps.push(number, Write::MaglevIndex(index, row));
                        }
                        // The next try can use the space of the previous tables.
                        if is_allowed {
                            self.applied.drains.end_all(is_over);
                        }
                    }
                }
            }
            if steps.writes.len() >= 2 * AT_ONCE {
                self.execute(&take(&mut steps), jobs, false, now);
            }
        }
        self.execute(&steps, jobs, false, now);
    }

    /// Returns a previous table for a port that had one endpoint until now, and so needed no table; `None` for other ports,
    /// or without space.
    fn previous_table_of_single(
        &mut self,
        id: u32,
        old: &MaglevRow,
        members: &[Member],
    ) -> Option<(MaglevTable, Vec<u64>)> {
        let before = self.applied.extents.live_ids(id);
        let one = members.iter().find(|member| before.len() == 1 && before.contains(&member.id))?;
        if *old != MaglevRow::default() {
            return None;
        }
        let (one, words) = (std::slice::from_ref(one), length(1));
        let signature = signature(one);
        let base = self.applied.tables.allocate_for(id, halves(signature), words).ok()?;
        Some((MaglevTable { base, words, signature }, packed(one)))
    }

    /// Returns the writes that remove the previous tables whose room is needed.
    pub(super) fn drained(&mut self, now: Instant) -> Steps {
        let mut steps = Steps::default();
        let over = self.applied.drains.over(self.applied.tables.is_half_full(), now);
        for index in over.iter().map(|(index, _)| *index).collect::<BTreeSet<_>>() {
            if let Some(row) = self.applied.maglev.get(&index) {
                let stays = |table: &&MaglevTable| !over.contains(&(index, table.base));
                let previous = row.previous.iter().filter(stays).copied().collect();
                steps.push(0, Write::MaglevIndex(index, MaglevRow { current: row.current, previous }));
            }
        }
        steps
    }

    /// Removes the tables that no frontend needs any more.
    pub(super) fn retire_tables(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        for (number, job) in jobs.iter().enumerate() {
            let Some(id) = job.id.filter(|_| !job.stopped || job.abandoned) else { continue };
            for local in [false, true] {
                let is_wanted = job.wanted.as_ref().is_some_and(|wanted| wanted.tables.contains_key(&local));
                let index = maglev::index(id, local);
                if is_wanted {
                    continue;
                }
                self.applied.outdated.remove(&index);
                if self.applied.maglev.contains_key(&index) {
                    steps.push(number, Write::MaglevIndex(index, MaglevRow::default()));
                }
            }
        }
        self.execute(&steps, jobs, true, now);
    }
}

/// Splits a signature into the two numbers by which [`ExtentAllocator`](super::extents::ExtentAllocator) identifies a
/// table.
pub(super) fn halves(signature: u64) -> Vec<u32> {
    vec![signature as u32, (signature >> 32) as u32]
}
