//! The phase that writes Maglev tables, and the one that takes them away.

use std::time::Instant;

use proxy_common::maglev;

use super::job::{Job, Steps};
use super::reconcile::Reconciler;
use super::trouble::Trouble;
use crate::maps::{MaglevRow, Store, Write};
use crate::plan::maglev::{length, packed, signature};

/// Tables that are made before they are written: the most memory that they take at once.
const AT_ONCE: usize = 256;

impl<S: Store> Reconciler<S> {
    /// Gives every port the tables that its frontends need: the one that it has, or a new one. Without room there is none, and
    /// a hash takes one of the slots. Tables hold ids: rows of endpoints stand before them, and an endpoint that has left is
    /// noticed by whoever is led there.
    pub(super) fn write_tables(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        for number in 0..jobs.len() {
            let job = &mut jobs[number];
            let (Some(id), false, Some(wanted)) = (job.id, job.stopped, &job.wanted) else { continue };
            for (local, members) in wanted.tables.iter().filter(|(_, members)| members.len() > 1) {
                let (index, signature) = (maglev::index(id, *local), signature(members));
                if self.applied.maglev.get(&index).is_some_and(|row| row.signature == signature) {
                    continue;
                }
                let words = length(members.len());
                match self.applied.tables.allocate_for(id, halves(signature), words) {
                    Ok(base) => {
                        job.tables.push(base);
                        steps.push(number, Write::MaglevTable(base, packed(members)));
                        steps.push(number, Write::MaglevIndex(index, MaglevRow { base, words, signature }));
                    }
                    Err(no_room) => {
                        job.trouble.get_or_insert(Trouble::Tables(no_room));
                        if self.applied.maglev.contains_key(&index) {
                            steps.push(number, Write::MaglevIndex(index, MaglevRow::default()));
                        }
                    }
                }
            }
            if steps.writes.len() >= 2 * AT_ONCE {
                self.execute(&std::mem::take(&mut steps), jobs, false, now);
            }
        }
        self.execute(&steps, jobs, false, now);
    }

    /// Takes away the tables that no frontend needs any more.
    pub(super) fn retire_tables(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        for (number, job) in jobs.iter().enumerate() {
            let Some(id) = job.id.filter(|_| !job.stopped) else { continue };
            for local in [false, true] {
                let is_wanted = job.wanted.as_ref().is_some_and(|wanted| wanted.tables.contains_key(&local));
                let index = maglev::index(id, local);
                if !is_wanted && self.applied.maglev.contains_key(&index) {
                    steps.push(number, Write::MaglevIndex(index, MaglevRow::default()));
                }
            }
        }
        self.execute(&steps, jobs, true, now);
    }
}

/// A signature as the two numbers by which [`Extents`](super::extents::Extents) knows a table.
pub(super) fn halves(signature: u64) -> Vec<u32> {
    vec![signature as u32, (signature >> 32) as u32]
}
