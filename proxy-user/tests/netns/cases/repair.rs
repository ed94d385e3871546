//! Another tool changes maps, detaches programs, and removes pins: found, repaired, counted, told.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_user::maps::{KernelStore, Store as _, Write};
use proxy_user::programs::attachments;
use proxy_user::programs::bpf::Link;
use proxy_user::programs::hooks::SOCKET_HOOKS;

use super::{Case, WEB, vip};
use crate::agent;
use crate::lab::{Lab, SOON, Wish, eventually};
use crate::manifest::Family;
use crate::peer::{Attempt, Kind};

/// Small maps, and a comparison that comes soon.
#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "1024", "--max-sockets", "1024", "--sync-period", "1s",
];
/// Nothing is looked at again while the case runs.
#[rustfmt::skip]
const NEVER: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "1024", "--max-sockets", "1024", "--sync-period", "1h",
];

pub const CASES: &[Case] = &[
    Case { name: "repair::maps", wish: Wish { pods: 2, services: &[WEB], flags: FLAGS }, run: maps },
    Case { name: "repair::programs", wish: Wish { pods: 2, services: &[WEB], flags: FLAGS }, run: programs },
    Case { name: "repair::pins", wish: Wish { pods: 2, services: &[WEB], flags: FLAGS }, run: pins },
    Case { name: "repair::bpffs", wish: Wish { pods: 2, services: &[WEB], flags: FLAGS }, run: bpffs },
    Case {
        name: "repair::without_it_all_is_lost",
        wish: Wish { pods: 2, services: &[WEB], flags: NEVER },
        run: lost,
    },
];

/// One attempt on each path and in each family.
pub fn works(lab: &Lab) -> Result<()> {
    for family in Family::BOTH {
        for (path, client) in lab.clients() {
            client.reach(Attempt::new(Kind::Tcp, vip(family, WEB, Kind::Tcp))).context(path)?;
        }
    }
    Ok(())
}

/// The sum of a metric over its labels.
fn metric(lab: &Lab, name: &str) -> Result<u64> {
    let (_, text) = agent::get(&lab.node, 10_249, "/metrics")?;
    let values =
        text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit(' ').next());
    let values: Vec<f64> = values.filter_map(|value| value.parse().ok()).collect();
    ensure!(!values.is_empty(), "no metric {name}");
    Ok(format!("{:.0}", values.iter().sum::<f64>()).parse()?)
}

/// Deletes and changes entries of every table that Services are made of.
fn spoil(lab: &Lab) -> Result<u64> {
    let mut store = KernelStore::open(&lab.bpffs().join("ballast"))?;
    let found = store.read(u32::MAX)?;
    let mut writes: Vec<_> = found.services.keys().map(|key| Write::NoService(*key)).collect();
    writes.extend(found.names.keys().take(2).map(|id| Write::NoName(*id)));
    for (id, row) in found.backends.iter().chain(&found.backends6).take(2) {
        writes.push(Write::Backend(*id, proxy_user::maps::Backend { port: row.port ^ 1, ..*row }));
    }
    let with_slots =
        found.services.values().find(|entry| entry.slot_count > 0).context("no Service is served")?;
    writes.push(Write::Slots(with_slots.slot_base, vec![77]));
    let bits = found.filter.iter().enumerate().filter(|(_, word)| **word != 0);
    writes.extend(bits.take(4).map(|(word, mask)| Write::FilterClear(word as u32, *mask)));
    writes.extend(found.node.addresses.keys().take(1).map(|address| Write::NoNodeAddr(*address)));
    store.write(&writes).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    Ok(writes.len() as u64)
}

fn maps(lab: &Lab) -> Result<()> {
    let before = agent::ask(&lab.node, &["service", "list"], &lab.bpffs())?;
    works(lab)?;
    let spoiled = spoil(lab)?;
    eventually(SOON, || works(lab))?;
    lab.agent_mut()?.says(&["WARN", "the maps were changed externally"])?;
    let repaired = eventually(SOON, || {
        let repaired = metric(lab, "ballast_drift_repairs_total")?;
        ensure!(repaired >= spoiled, "{repaired} of {spoiled}");
        Ok(repaired)
    })?;
    let after = agent::ask(&lab.node, &["service", "list"], &lab.bpffs())?;
    ensure!(after == before, "other ids:\n{before}\n{after}");
    // Once repaired, there is nothing more to repair.
    std::thread::sleep(Duration::from_millis(2500));
    ensure!(metric(lab, "ballast_drift_repairs_total")? == repaired, "repaired for ever");
    works(lab)
}

/// Everything that is pinned as a link.
pub fn links(lab: &Lab) -> Result<Vec<std::path::PathBuf>> {
    let folder = lab.bpffs().join("ballast/links");
    Ok(fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?.into_iter().map(|entry| entry.path()).collect())
}

pub fn complete(lab: &Lab) -> Result<()> {
    let found = attachments(&lab.bpffs());
    let there = found.iter().filter(|one| one.in_force() || one.ifindex.is_some()).count();
    let expected = SOCKET_HOOKS.len() + 2 * lab.devices().len();
    ensure!(there == expected, "{there} of {expected} programs are there");
    Ok(())
}

fn programs(lab: &Lab) -> Result<()> {
    let all = links(lab)?;
    // Every other one is detached, the others lose their pins, which detaches them too.
    for (number, path) in all.iter().enumerate() {
        if number % 2 == 0 {
            Link::pinned(path)?.context("no link")?.detach()?;
        } else {
            fs::remove_file(path)?;
        }
    }
    eventually(SOON, || works(lab))?;
    eventually(SOON, || complete(lab))?;
    lab.agent_mut()?.says(&["WARN", "detached or removed externally", "program sock_connect4"])?;
    lab.agent_mut()?.says(&["packet programs attached again"])?;
    eventually(SOON, || {
        let (repaired, devices) = (metric(lab, "ballast_repairs_total")?, lab.devices().len());
        ensure!(repaired as usize >= SOCKET_HOOKS.len() + devices, "only {repaired}");
        Ok(())
    })?;
    works(lab)
}

fn pins(lab: &Lab) -> Result<()> {
    let ballast = lab.bpffs().join("ballast");
    let real = fs::canonicalize(ballast.join("services"))?;
    // A pin, a short path, and a pin in whose place another map is.
    fs::remove_file(&real)?;
    fs::remove_file(ballast.join("backends"))?;
    let folder = real.parent().context("no folder")?;
    fs::remove_file(folder.join("names"))?;
    fs::rename(folder.join("services6"), folder.join("names"))?;
    eventually(SOON, || agent::ask(&lab.node, &["service", "list"], &lab.bpffs()).map(drop))?;
    lab.agent_mut()?.says(&["detached or removed externally", "pin of map services"])?;
    eventually(SOON, || {
        let repaired = metric(lab, "ballast_repairs_total{what=\"map_pin\"")?;
        ensure!(repaired == 4, "{repaired} instead of 4");
        Ok(())
    })?;
    works(lab)?;
    // The next agent finds all of it.
    lab.restart()?;
    ensure!(lab.log().contains("takes_over=true"), "a restart began anew");
    works(lab)
}

/// The file system of all pins is unmounted: they are made again in a new one, so that the agent may die.
fn bpffs(lab: &Lab) -> Result<()> {
    let pinned = || -> Result<BTreeSet<std::ffi::OsString>> {
        let real = fs::canonicalize(lab.bpffs().join("ballast/services"))?;
        let folder = fs::read_dir(real.parent().context("no folder")?)?;
        Ok(folder.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<_>>()?)
    };
    works(lab)?;
    let before = pinned()?;
    rustix::mount::unmount(lab.bpffs(), rustix::mount::UnmountFlags::DETACH)?;
    ensure!(links(lab).is_err(), "pins outside of a bpffs");
    eventually(SOON, || complete(lab))?;
    eventually(SOON, || agent::ask(&lab.node, &["service", "list"], &lab.bpffs()).map(drop))?;
    eventually(SOON, || {
        let now = pinned()?;
        ensure!(now == before, "missing: {:?}", before.difference(&now).collect::<Vec<_>>());
        Ok(())
    })?;
    works(lab)?;
    lab.kill()?;
    works(lab).context("without an agent")?;
    lab.begin()?;
    ensure!(lab.log().contains("takes_over=true"), "a restart began anew");
    works(lab)
}

/// What the other cases would see without a repair.
fn lost(lab: &Lab) -> Result<()> {
    works(lab)?;
    spoil(lab)?;
    std::thread::sleep(Duration::from_millis(1500));
    ensure!(works(lab).is_err(), "maps that are spoiled still work");
    links(lab)?.iter().try_for_each(fs::remove_file)?;
    std::thread::sleep(Duration::from_millis(1500));
    ensure!(complete(lab).is_err(), "programs without pins are still there");
    Ok(())
}
