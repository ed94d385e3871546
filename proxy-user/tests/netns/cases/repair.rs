//! Another tool changes maps, detaches programs, and removes pins: the agent finds, repairs, counts and reports this.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_core::store::{Store as _, Write};
use proxy_user::maps::KernelStore;
use proxy_user::programs::attachments;
use proxy_user::programs::bpf::Link;
use proxy_user::programs::hooks::SOCKET_HOOKS;

use super::{Case, WEB, vip};
use crate::agent;
use crate::fixture::{Cgroup, Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

/// Flags for small maps, and for a sync period so short that the agent soon compares them.
#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "1024", "--max-sockets", "1024", "--sync-period", "1s",
];
/// Flags with a sync period so long that the agent checks nothing again while the case runs.
#[rustfmt::skip]
const NEVER: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "1024", "--max-sockets", "1024", "--sync-period", "1h",
];

pub const CASES: &[Case] = &[
    Case {
        name: "repair::changed_maps_are_restored",
        wish: Wish { pods: 2, services: &[WEB], flags: FLAGS },
        run: maps,
    },
    Case {
        name: "repair::detached_programs_are_attached_again",
        wish: Wish { pods: 2, services: &[WEB], flags: FLAGS },
        run: programs,
    },
    Case {
        name: "repair::removed_pins_are_restored",
        wish: Wish { pods: 2, services: &[WEB], flags: FLAGS },
        run: pins,
    },
    Case {
        name: "repair::lost_bpffs_is_restored",
        wish: Wish { pods: 2, services: &[WEB], flags: FLAGS },
        run: bpffs,
    },
    Case {
        name: "repair::cgroup_that_is_created_again_gets_programs",
        wish: Wish { pods: 2, services: &[WEB], flags: FLAGS },
        run: cgroup,
    },
    Case {
        name: "repair::without_repair_changes_stay",
        wish: Wish { pods: 2, services: &[WEB], flags: NEVER },
        run: lost,
    },
];

/// Makes one attempt on each path and in each family.
pub fn works(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        for (path, client) in fixture.clients() {
            client.reach(Attempt::new(SocketKind::Tcp, vip(family, WEB, SocketKind::Tcp))).context(path)?;
        }
    }
    Ok(())
}

/// Returns the sum of a metric over its labels.
fn metric(fixture: &Fixture, name: &str) -> Result<u64> {
    let (_, text) = agent::get(&fixture.node, 10_249, "/metrics")?;
    let values =
        text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit(' ').next());
    let values: Vec<f64> = values.filter_map(|value| value.parse().ok()).collect();
    ensure!(!values.is_empty(), "no metric {name}");
    Ok(format!("{:.0}", values.iter().sum::<f64>()).parse()?)
}

/// Deletes and changes entries of every table that Services use; returns the number of writes.
fn spoil(fixture: &Fixture) -> Result<u64> {
    let mut store = KernelStore::open(&fixture.bpffs().join("ballast"))?;
    let found = store.read(u32::MAX)?;
    let mut writes: Vec<_> = found.services.keys().map(|key| Write::NoService(*key)).collect();
    writes.extend(found.names.keys().take(2).map(|id| Write::NoName(*id)));
    for (id, row) in found.backends.iter().chain(&found.backends6).take(2) {
        writes.push(Write::Backend(*id, proxy_core::store::Backend { port: row.port ^ 1, ..*row }));
    }
    let with_slots =
        found.services.values().find(|entry| entry.slot_count > 0).context("no Service is served")?;
    writes.push(Write::Slots(with_slots.slot_base, vec![77]));
    let bits = found.prefilter.iter().enumerate().filter(|(_, word)| **word != 0);
    writes.extend(bits.take(4).map(|(word, mask)| Write::PrefilterClear(word as u32, *mask)));
    writes.extend(found.node.addresses.keys().take(1).map(|address| Write::NoNodeAddr(*address)));
    store.write(&writes).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    Ok(writes.len() as u64)
}

fn maps(fixture: &Fixture) -> Result<()> {
    let before = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?;
    works(fixture)?;
    let spoiled = spoil(fixture)?;
    eventually(SOON, || works(fixture))?;
    fixture.agent_mut()?.says(&["WARN", "the maps were changed externally"])?;
    let repaired = eventually(SOON, || {
        let repaired = metric(fixture, "ballast_drift_repairs_total")?;
        ensure!(repaired >= spoiled, "{repaired} of {spoiled}");
        Ok(repaired)
    })?;
    let after = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?;
    ensure!(after == before, "other ids:\n{before}\n{after}");
    // After the repair, the agent repairs nothing more.
    std::thread::sleep(Duration::from_millis(2500));
    ensure!(metric(fixture, "ballast_drift_repairs_total")? == repaired, "repaired for ever");
    works(fixture)
}

/// Returns the paths of all pinned links.
pub fn links(fixture: &Fixture) -> Result<Vec<std::path::PathBuf>> {
    let folder = fixture.bpffs().join("ballast/links");
    Ok(fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?.into_iter().map(|entry| entry.path()).collect())
}

pub fn complete(fixture: &Fixture) -> Result<()> {
    let found = attachments(&fixture.bpffs());
    let there = found.iter().filter(|one| one.is_attached() || one.ifindex.is_some()).count();
    let expected = SOCKET_HOOKS.len() + fixture.packet_hooks();
    ensure!(there == expected, "{there} of {expected} programs are there");
    Ok(())
}

fn programs(fixture: &Fixture) -> Result<()> {
    let all = links(fixture)?;
    // Detach every other link, and remove the pins of the others, which detaches these too.
    for (number, path) in all.iter().enumerate() {
        if number % 2 == 0 {
            Link::pinned(path)?.context("no link")?.detach()?;
        } else {
            fs::remove_file(path)?;
        }
    }
    eventually(SOON, || works(fixture))?;
    eventually(SOON, || complete(fixture))?;
    fixture.agent_mut()?.says(&["WARN", "detached or removed externally", "program sock_connect4"])?;
    fixture.agent_mut()?.says(&["packet programs attached again"])?;
    eventually(SOON, || {
        let (repaired, devices) = (metric(fixture, "ballast_repairs_total")?, fixture.devices().len());
        ensure!(repaired as usize >= SOCKET_HOOKS.len() + devices, "only {repaired}");
        Ok(())
    })?;
    works(fixture)
}

fn pins(fixture: &Fixture) -> Result<()> {
    let ballast = fixture.bpffs().join("ballast");
    let real = fs::canonicalize(ballast.join("services"))?;
    // Remove a pin and a short path, and replace another pin by a pin of another map.
    fs::remove_file(&real)?;
    fs::remove_file(ballast.join("backends"))?;
    let folder = real.parent().context("no folder")?;
    fs::remove_file(folder.join("names"))?;
    fs::rename(folder.join("services6"), folder.join("names"))?;
    eventually(SOON, || agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs()).map(drop))?;
    fixture.agent_mut()?.says(&["detached or removed externally", "pin of map services"])?;
    eventually(SOON, || {
        let repaired = metric(fixture, "ballast_repairs_total{what=\"map_pin\"")?;
        ensure!(repaired == 4, "{repaired} instead of 4");
        Ok(())
    })?;
    works(fixture)?;
    // The next agent finds all pins.
    fixture.restart()?;
    ensure!(fixture.log().contains("takes_over=true"), "a restart began anew");
    works(fixture)
}

/// Unmounts the file system of all pins; checks that the agent pins everything again in a new one, so that the agent may die.
fn bpffs(fixture: &Fixture) -> Result<()> {
    let pinned = || -> Result<BTreeSet<std::ffi::OsString>> {
        let real = fs::canonicalize(fixture.bpffs().join("ballast/services"))?;
        let folder = fs::read_dir(real.parent().context("no folder")?)?;
        Ok(folder.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<_>>()?)
    };
    works(fixture)?;
    let before = pinned()?;
    rustix::mount::unmount(fixture.bpffs(), rustix::mount::UnmountFlags::DETACH)?;
    ensure!(links(fixture).is_err(), "pins outside of a bpffs");
    eventually(SOON, || complete(fixture))?;
    eventually(SOON, || agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs()).map(drop))?;
    eventually(SOON, || {
        let now = pinned()?;
        ensure!(now == before, "missing: {:?}", before.difference(&now).collect::<Vec<_>>());
        Ok(())
    })?;
    works(fixture)?;
    fixture.kill()?;
    works(fixture).context("without an agent")?;
    fixture.begin()?;
    ensure!(fixture.log().contains("takes_over=true"), "a restart began anew");
    works(fixture)
}

/// Removes the cgroup of the agent and creates it again, as systemd does with a slice.
fn cgroup(fixture: &Fixture) -> Result<()> {
    let slice = Cgroup(fixture.cgroup().join("slice"));
    fs::create_dir(&slice.0)?;
    fixture.kill()?;
    fixture.setup().cgroup.clone_from(&slice.0);
    fixture.begin()?;
    fs::remove_dir(&slice.0)?;
    eventually(SOON, || {
        let (code, reason) = agent::get(&fixture.node, 10_256, "/readyz")?;
        ensure!(code == 503 && reason.contains("cannot restore"), "{code} {reason}");
        Ok(())
    })?;
    fs::create_dir(&slice.0)?;
    let error = fixture.take_agent()?.fails()?;
    ensure!(error.contains("was removed and created again"), "{error}");
    fixture.begin()?;
    complete(fixture)
}

/// Checks that without a repair, the other cases would fail.
fn lost(fixture: &Fixture) -> Result<()> {
    works(fixture)?;
    spoil(fixture)?;
    std::thread::sleep(Duration::from_millis(1500));
    ensure!(works(fixture).is_err(), "maps that are spoiled still work");
    links(fixture)?.iter().try_for_each(fs::remove_file)?;
    std::thread::sleep(Duration::from_millis(1500));
    ensure!(complete(fixture).is_err(), "programs without pins are still there");
    Ok(())
}
