//! The phase that finds out what Service ports should be, and writes what nothing refers to yet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use proxy_common::PROTO_TCP;
use proxy_common::name::PortName;

use super::applied::Applied;
use super::entries::{backend_row, frontend_key, needs_table, service_entry, slots};
use super::job::{Job, Owner, Steps, Trouble, Wanted};
use super::services::Services;
use super::writer::Writer;
use crate::maps::FilterBit as Bit;
use crate::maps::{Backend, Store, Table, Write};
use crate::model::{SortedMap, TrafficPolicy};
use crate::plan::Access;
use crate::plan::maglev::Member;

impl Services {
    /// Ids, names, endpoints, filter bits and source ranges.
    pub(super) fn prepare<S: Store>(&self, writer: &mut Writer<S>, jobs: &mut [Job], now: Instant) {
        let (mut names, mut rows, mut bits) = (Steps::default(), Steps::default(), Steps::default());
        let (mut ranges, mut joins) = (Steps::default(), Steps::default());
        for (number, job) in jobs.iter_mut().enumerate() {
            if let Err(trouble) = self.plan_job(&mut writer.applied, job) {
                job.stop(trouble);
                continue;
            }
            let (Some(wanted), Some(id), Owner::Port(port)) = (&job.wanted, job.id, &job.owner) else {
                continue;
            };
            let Some(name) = PortName::new(&port.text(), port.protocol.number(), port.family.number()) else {
                job.stop(Trouble::Name);
                continue;
            };
            if writer.applied.names.get(&id) != Some(&name) {
                names.push(number, Write::Name(id, Box::new(name)));
            }
            let is_new =
                |(id, row): &(&u32, &Backend)| row.proto == PROTO_TCP && !writer.applied.serves(**id);
            let mut new = wanted.rows.iter().filter(is_new).peekable();
            if new.peek().is_some() {
                let others = writer.applied.endpoints_of(id).map(|(_, id)| id);
                let others: Arc<[u32]> = others.filter(|id| writer.applied.serves(*id)).collect();
                for (id, row) in new {
                    joins.push(number, Write::Join(*id, Table::backends(row.addr), Arc::clone(&others)));
                }
            }
            for (id, row) in &wanted.rows {
                if writer.applied.backends.get(*id) != Some(row) {
                    rows.push(number, Write::Backend(*id, *row));
                }
            }
            let is_missing = |bit: &Bit| !writer.applied.filter.is_set(*bit);
            let missing: BTreeSet<_> = writer.applied.bits_of(wanted).filter(is_missing).collect();
            for (word, mask) in missing {
                bits.push(number, Write::FilterSet(word, mask));
            }
            let known = writer.applied.ranges.get(&id);
            for range in wanted.ranges.iter().filter(|range| known.is_none_or(|known| !known.contains(range)))
            {
                ranges.push(number, Write::SourceRange(id, *range));
            }
        }
        writer.execute(&names, jobs, false, now);
        writer.execute(&joins, jobs, false, now);
        writer.execute(&rows, jobs, false, now);
        writer.execute(&bits, jobs, false, now);
        writer.execute(&ranges, jobs, false, now);
    }

    /// Finds out what the port should be, and gives ids to it and to its endpoints.
    fn plan_job(&self, applied: &mut Applied, job: &mut Job) -> Result<(), Trouble> {
        let Owner::Port(port) = &job.owner else { return Ok(()) };
        let Some(plan) = self.port_plan(port) else { return Ok(()) };
        let has = |frontend: &_| self.claims.owner(frontend) == Some(port);
        if !plan.frontends.keys().any(has) {
            return Ok(());
        }
        let id = applied.ports.acquire(port).map_err(Trouble::Services)?;
        job.id = Some(id);
        let wanted = job.wanted.insert(Wanted::default());
        let (mut ids_of, mut rows) = (Vec::new(), Vec::new());
        for (at, facts) in &plan.backends {
            match applied.endpoints.acquire(&(id, *at)) {
                Ok(backend) => {
                    ids_of.push((*at, backend));
                    let tunnel = facts.tunnel.and_then(|node| applied.tunnels.get(&node).copied());
                    rows.push((backend, backend_row(id, port, at, *facts, tunnel.unwrap_or(0))));
                }
                // Those that have an id are served; the problem stands until all are.
                Err(exhausted) => {
                    job.trouble.get_or_insert(Trouble::Backends(exhausted));
                }
            }
        }
        let ids_of: SortedMap<_, _> = ids_of.into_iter().collect();
        wanted.rows = rows.into_iter().collect();
        let mut tables = BTreeMap::new();
        for (frontend, what) in
            plan.frontends.iter().filter(|(frontend, _)| self.claims.owner(frontend) == Some(port))
        {
            let key = frontend_key(frontend);
            let weight = |at: &_| plan.backends.get(at).map_or(1, |facts| u32::from(facts.weight.max(1)));
            let endpoints =
                || what.slots.iter().filter_map(|at| Some((ids_of.get(at).copied()?, weight(at), *at)));
            if needs_table(plan, what) {
                let mut members: Vec<_> =
                    endpoints().map(|(id, weight, at)| Member { at, weight, id }).collect();
                members.sort_unstable_by_key(|member| member.at);
                tables.insert(what.policy == TrafficPolicy::Local, members);
            }
            let share = |at: &_| plan.backends.get(at).map_or(1, |facts| u32::from(facts.share()));
            let ids = slots(endpoints().map(|(id, _, at)| (id, share(&at))).collect(), plan.algorithm);
            wanted.frontends.push((key, service_entry(id, &key, plan, what), ids));
            if what.access != Access::Everybody {
                wanted.ranges.clone_from(&plan.source_ranges);
            }
        }
        wanted.tables = tables;
        Ok(())
    }
}
