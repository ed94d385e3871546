//! The agent is killed and replaced, and starts without its folder; traffic is not affected.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_common::version::ABI_VERSION;
use proxy_user::programs::attachments;
use proxy_user::programs::bpf::tcx_links;
use proxy_user::programs::hooks::SOCKET_HOOKS;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;

use super::{Case, WEB, is_clean, packet::WIDE, tcp, vip};
use crate::agent;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Load, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::Service;

/// Fewer flows than the traffic makes: flows whose client has had its answer are evicted for others.
#[rustfmt::skip]
const FEW_FLOWS: &[&str] = &[
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "2048", "--max-sockets", "4096",
];
pub(super) const WISH: Wish = Wish { pods: 2, services: &[WEB, WIDE], flags: FEW_FLOWS };
const NARROW: Service = Service { ports: &[tcp(80, 9090, &[1])], ..WIDE };

pub const CASES: &[Case] = &[
    Case { name: "restart::killed_five_times_under_load", wish: WISH, run: killed },
    Case { name: "restart::another_binary_takes_over", wish: WISH, run: replaced },
    Case { name: "restart::another_layout_is_replaced_under_load", wish: WISH, run: other_layouts },
    Case { name: "restart::refused_programs_leave_those_that_serve", wish: WISH, run: refused },
    Case { name: "restart::without_a_folder_nothing_is_deleted", wish: WISH, run: no_folder },
    Case { name: "restart::cleanup_leaves_nothing", wish: WISH, run: cleanup },
    Case { name: "restart::cleanup_of_a_former_bpffs_detaches_nothing", wish: WISH, run: former_bpffs },
];

/// For kernels that were not tested before. On an emulated machine, a start takes most of a minute.
pub const BY_KERNEL: &[Case] =
    &[Case { name: "restart::killed_and_replaced_beside_traffic", wish: WISH, run: beside_traffic }];

/// Milliseconds between two messages.
const BUSY: u64 = 5;
/// The same for an emulated machine, whose agent starts at the same time.
pub(super) const CALM: u64 = 200;

/// Returns all kinds of traffic: new connections all the time, and connections that stay open.
pub(super) fn loads(pause: u64) -> Vec<Load> {
    let mut loads = Vec::new();
    for family in Family::BOTH {
        for kind in SocketKind::ALL {
            for is_one_socket in [false, true] {
                let load = Load::new(Attempt::new(kind, vip(family, WIDE, kind)), is_one_socket);
                loads.push(load.paced(pause));
            }
        }
    }
    loads
}

/// Runs the action under load, which must not be affected.
fn under_load(fixture: &Fixture, action: impl FnOnce() -> Result<()>) -> Result<()> {
    under(fixture, &loads(BUSY), action)
}

pub(super) fn under(fixture: &Fixture, loads: &[Load], action: impl FnOnce() -> Result<()>) -> Result<()> {
    for (_, client) in fixture.clients() {
        client.load(loads)?;
    }
    action()?;
    for (path, client) in fixture.clients() {
        for (tally, load) in client.stop()?.iter().zip(loads) {
            let Load { attempt, is_one_socket, .. } = load;
            let what = format!("{path}, {:?} to {}", attempt.kind, attempt.to);
            is_clean(tally, &what, &["0/8080", "1/8080", "0/5353", "1/5353"])?;
            let is_moved = *is_one_socket && tally.servers.len() != 1;
            ensure!(!is_moved, "{what}: a connection moved: {:?}", tally.servers);
        }
    }
    Ok(())
}

/// Returns what must be the same after a restart: everything except counters.
fn programmed(fixture: &Fixture) -> Result<Value> {
    let services = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?;
    let mut backends = agent::ask(&fixture.node, &["backend", "list"], &fixture.bpffs())?;
    let list = backends["backends"].as_array_mut().context("no list of backends")?;
    ensure!(list.len() >= 12, "only {} backends", list.len());
    for backend in list {
        backend.as_object_mut().context("no object")?.remove("connections").context("no counter")?;
    }
    Ok(serde_json::json!([services, backends]))
}

fn killed(fixture: &Fixture) -> Result<()> {
    let before = programmed(fixture)?;
    under_load(fixture, || {
        for _ in 0..5 {
            fixture.restart()?;
            ensure!(programmed(fixture)? == before, "other ids:\n{before}\n{}", programmed(fixture)?);
        }
        Ok(())
    })?;
    ensure!(fixture.log().matches("takes_over=true").count() == 5, "a restart began anew");
    Ok(())
}

fn replaced(fixture: &Fixture) -> Result<()> {
    let before = programmed(fixture)?;
    under_load(fixture, || {
        replace(fixture)?;
        ensure!(programmed(fixture)? == before, "other ids");
        Ok(())
    })?;
    // The new agent programs changes, too.
    fixture.change(NARROW, &["1/9090"])
}

/// Kills the agent, and starts one from another file.
fn replace(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let copy = fixture.bpffs().with_file_name("another");
    agent::copy_program(&agent::binary(), &copy)?;
    fixture.setup().binary = copy;
    fixture.begin()
}

/// An upgrade and a downgrade between layouts: the agent finds programs that use maps of an older version, then of a newer one.
fn other_layouts(fixture: &Fixture) -> Result<()> {
    for version in [ABI_VERSION - 1, ABI_VERSION + 1] {
        let loads = loads(BUSY);
        for (_, client) in fixture.clients() {
            client.load(&loads)?;
        }
        fixture.kill()?;
        let other = relabel(fixture, version)?;
        fixture.begin()?;
        eventually(SOON, || {
            ensure!(!other.exists(), "{} is left", other.display());
            Ok(())
        })?;
        // Connections that begin now are those of the new programs.
        std::thread::sleep(Duration::from_secs(1));
        for (path, client) in fixture.clients() {
            for (tally, load) in client.stop()?.iter().zip(&loads) {
                let Load { attempt, is_one_socket, .. } = load;
                let what = format!("version {version}, {path}, {:?} to {}", attempt.kind, attempt.to);
                if path == "socket" && attempt.kind.is_tcp() {
                    is_clean(tally, &what, &["0/8080", "1/8080"])?;
                    ensure!(
                        !is_one_socket || tally.servers.len() == 1,
                        "{what}: it moved: {:?}",
                        tally.servers
                    );
                } else if !is_one_socket {
                    // Flows are not carried over: the exchange that was going on may fail.
                    ensure!(tally.failed <= 1, "{what}: {} failed: {:?}", tally.failed, tally.failures);
                }
            }
        }
    }
    ensure!(fixture.log().matches("takes_over=false").count() == 3, "the maps of another version were used");
    fixture.change(NARROW, &["1/9090"])
}

/// Gives the maps of the last agent, which the attached programs use, another version; returns their folder.
fn relabel(fixture: &Fixture, version: u32) -> Result<PathBuf> {
    let root = fixture.bpffs().join("ballast");
    let (ours, other) = (format!("v{ABI_VERSION}"), format!("v{version}"));
    fs::rename(root.join(&ours), root.join(&other))?;
    for entry in fs::read_dir(&root)? {
        let path = entry?.path();
        if let Ok(map) = fs::read_link(&path) {
            fs::remove_file(&path)?;
            std::os::unix::fs::symlink(Path::new(&other).join(map.strip_prefix(&ours)?), &path)?;
        }
    }
    Ok(root.join(other))
}

/// Instructions that call the helper `bpf_get_netns_cookie`, which socket programs do, and a helper that no kernel has.
const CALLS: [[u8; 8]; 2] = [[0x85, 0, 0, 0, 122, 0, 0, 0], [0x85, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f]];

fn refused(fixture: &Fixture) -> Result<()> {
    let before = programmed(fixture)?;
    let [known, unknown] = CALLS;
    let mut program = fs::read(agent::binary())?;
    let calls: Vec<_> = (0..program.len()).filter(|at| program[*at..].starts_with(&known)).collect();
    ensure!(!calls.is_empty(), "no program asks for the cookie");
    for at in calls {
        program[at..at + unknown.len()].copy_from_slice(&unknown);
    }
    let [written, copy] = ["written", "refused"].map(|name| fixture.bpffs().with_file_name(name));
    fs::copy(agent::binary(), &written)?;
    fs::write(&written, program)?;
    agent::copy_program(&written, &copy)?;
    under_load(fixture, || {
        fixture.kill()?;
        fixture.setup().binary = copy;
        fixture.start()?;
        let log = fixture.take_agent()?.fails()?;
        ensure!(log.contains("the kernel rejected the program sock_"), "{log}");
        ensure!(!log.contains("programs loaded") && !log.contains("attached"), "{log}");
        ensure!(programmed(fixture)? == before, "other ids");
        fixture.setup().binary = agent::binary();
        fixture.begin()
    })?;
    fixture.change(NARROW, &["1/9090"])
}

fn beside_traffic(fixture: &Fixture) -> Result<()> {
    let before = programmed(fixture)?;
    under(fixture, &loads(CALM), || {
        fixture.restart()?;
        ensure!(programmed(fixture)? == before, "other ids after a restart");
        replace(fixture)?;
        ensure!(programmed(fixture)? == before, "other ids of another binary");
        // A fast machine would end before enough messages were sent.
        std::thread::sleep(Duration::from_millis(12 * CALM));
        Ok(())
    })?;
    ensure!(fixture.log().matches("takes_over=true").count() == 2, "a restart began anew");
    fixture.change(NARROW, &["1/9090"])
}

fn no_folder(fixture: &Fixture) -> Result<()> {
    let before = programmed(fixture)?;
    let hidden = fixture.folder.dir().with_file_name("hidden");
    under_load(fixture, || {
        fixture.kill()?;
        fs::rename(fixture.folder.dir(), &hidden)?;
        fixture.start()?;
        let log = fixture.take_agent()?.fails()?;
        ensure!(log.contains("cannot read --manifests"), "{log}");
        ensure!(programmed(fixture)? == before, "something has changed");
        fs::rename(&hidden, fixture.folder.dir())?;
        fixture.begin()?;
        ensure!(programmed(fixture)? == before, "other ids");
        Ok(())
    })?;
    // The next agent removes a Service that was deleted while no agent ran.
    fixture.kill()?;
    fixture.folder.remove(WIDE.name)?;
    fixture.begin()?;
    eventually(SOON, || {
        let list = agent::ask(&fixture.node, &["service", "list"], &fixture.bpffs())?.to_string();
        ensure!(list.contains("default/web") && !list.contains("default/wide"), "{list}");
        Ok(())
    })
}

fn cleanup(fixture: &Fixture) -> Result<()> {
    let indexes = fixture.node.inside(|| {
        let devices = proxy_user::host::devices::list()?;
        Ok(devices.iter().map(|device| device.ifindex).collect::<Vec<_>>())
    })?;
    let packet_links = || {
        fixture.node.inside(|| {
            let links = indexes.iter().flat_map(|index| [46, 47].map(|hook| tcx_links(*index, hook)));
            Ok(links.filter_map(Result::ok).map(|links| links.len()).sum::<usize>())
        })
    };
    ensure!(packet_links()? == fixture.packet_hooks(), "{} links on devices", packet_links()?);
    ensure!(
        attachments(&fixture.bpffs()).len() == SOCKET_HOOKS.len() + packet_links()?,
        "{:?}",
        attachments(&fixture.bpffs())
    );

    let busy = agent::command(&fixture.node, &["cleanup"], &fixture.bpffs())?;
    ensure!(!busy.status.success(), "cleanup under a running agent");
    for kind in SocketKind::ALL {
        fixture.local.reach(Attempt::new(kind, vip(Family::V4, WEB, kind)))?;
    }
    fixture.kill()?;
    let named = fixture.cgroup().to_str().context("a cgroup whose name is no text")?;
    let output = agent::command(&fixture.node, &["cleanup", "--cgroup-root", named], &fixture.bpffs())?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{said:?}");
    ensure!(packet_links()? == 0, "links are left on devices: {said:?}");
    ensure!(!fixture.bpffs().join("ballast").exists(), "pins are left: {said:?}");
    let cgroup = proxy_user::host::cgroup::find(Some(fixture.cgroup()))?;
    ensure!(links_on(&cgroup.path)? == 0, "links are left on the cgroup: {said:?}");
    for kind in SocketKind::ALL {
        for family in Family::BOTH {
            fixture.local.fails(Attempt::new(kind, vip(family, WEB, kind)), libc::ENETUNREACH)?;
        }
    }

    // Links whose pins are lost, on a cgroup that is not the root: cleanup finds them only if a flag names the cgroup.
    fixture.begin()?;
    fixture.kill()?;
    mount("bpf", fixture.bpffs(), "bpf", MountFlags::empty(), None).context("cannot mount over the bpffs")?;
    ensure!(links_on(&cgroup.path)? == SOCKET_HOOKS.len(), "{} links on the cgroup", links_on(&cgroup.path)?);
    let output = agent::command(&fixture.node, &["cleanup", "--cgroup-root", named], &fixture.bpffs())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(links_on(&cgroup.path)? == 0, "links without pins are left on the cgroup");
    Ok(())
}

/// The agent has another bpffs now, and has adopted the links that the former one has pins of.
fn former_bpffs(fixture: &Fixture) -> Result<()> {
    fixture.kill()?;
    let former = fixture.bpffs();
    let fresh = former.with_file_name("fresh");
    fs::create_dir(&fresh)?;
    fixture.setup().bpffs = fresh;
    fixture.begin()?;
    let cgroup = proxy_user::host::cgroup::find(Some(fixture.cgroup()))?;
    let named = fixture.cgroup().to_str().context("a cgroup whose name is no text")?;
    let output = agent::command(&fixture.node, &["cleanup", "--cgroup-root", named], &former)?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(links_on(&cgroup.path)? == SOCKET_HOOKS.len(), "{} links: {said:?}", links_on(&cgroup.path)?);
    ensure!(!former.join("ballast").exists(), "pins are left: {said:?}");
    for kind in SocketKind::ALL {
        fixture.local.reach(Attempt::new(kind, vip(Family::V4, WEB, kind)))?;
    }
    fixture.kill()?;
    unmount(fixture.bpffs(), UnmountFlags::DETACH).context("cannot unmount")
}

/// Returns the number of links on a cgroup, of any owner.
fn links_on(cgroup: &Path) -> Result<usize> {
    use proxy_user::programs::bpf::{Hook, Link, link_ids};
    use std::os::unix::fs::MetadataExt as _;

    let wanted = cgroup.metadata()?.ino();
    let links = link_ids().filter_map(|id| Link::by_id(id.ok()?).ok()?.info().ok());
    Ok(links.filter(|info| matches!(info.hook, Hook::Cgroup { id, .. } if id == wanted)).count())
}
