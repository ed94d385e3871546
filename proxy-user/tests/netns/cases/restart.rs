//! The agent is killed, replaced, and meets a folder that is not there; traffic does not notice.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_user::programs::attachments;
use proxy_user::programs::bpf::tcx_links;
use proxy_user::programs::hooks::SOCKET_HOOKS;
use rustix::mount::{MountFlags, mount};
use serde_json::Value;

use super::{Case, WEB, is_clean, packet::WIDE, tcp, vip};
use crate::agent;
use crate::lab::{Lab, SOON, Wish, eventually};
use crate::manifest::{Family, Service};
use crate::peer::{Attempt, Kind, Load};

/// Fewer flows than the traffic makes: who has had his answer gives way to others.
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
    Case { name: "restart::without_a_folder_nothing_is_deleted", wish: WISH, run: no_folder },
    Case { name: "restart::cleanup_leaves_nothing", wish: WISH, run: cleanup },
];

/// For kernels that we have not seen yet. Emulated, a start takes most of a minute.
pub const BY_KERNEL: &[Case] =
    &[Case { name: "restart::killed_and_replaced_beside_traffic", wish: WISH, run: beside_traffic }];

/// Milliseconds between two messages.
const BUSY: u64 = 5;
/// The same on an emulated machine, whose agent starts beside them.
pub(super) const CALM: u64 = 200;

/// All kinds of traffic: new connections all the time, and connections that stay.
pub(super) fn loads(pause: u64) -> Vec<Load> {
    let mut loads = Vec::new();
    for family in Family::BOTH {
        for kind in Kind::ALL {
            for is_one_socket in [false, true] {
                let load = Load::new(Attempt::new(kind, vip(family, WIDE, kind)), is_one_socket);
                loads.push(load.paced(pause));
            }
        }
    }
    loads
}

/// Does something under load, to which nothing may happen.
fn under_load(lab: &Lab, action: impl FnOnce() -> Result<()>) -> Result<()> {
    under(lab, &loads(BUSY), action)
}

pub(super) fn under(lab: &Lab, loads: &[Load], action: impl FnOnce() -> Result<()>) -> Result<()> {
    for (_, client) in lab.clients() {
        client.load(loads)?;
    }
    action()?;
    for (path, client) in lab.clients() {
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

/// What must be the same after a restart: everything but counters.
fn programmed(lab: &Lab) -> Result<Value> {
    let services = agent::ask(&lab.node, &["service", "list"], &lab.bpffs())?;
    let mut backends = agent::ask(&lab.node, &["backend", "list"], &lab.bpffs())?;
    let list = backends["backends"].as_array_mut().context("no list of backends")?;
    ensure!(list.len() >= 12, "only {} backends", list.len());
    for backend in list {
        backend.as_object_mut().context("no object")?.remove("connections").context("no counter")?;
    }
    Ok(serde_json::json!([services, backends]))
}

fn killed(lab: &Lab) -> Result<()> {
    let before = programmed(lab)?;
    under_load(lab, || {
        for _ in 0..5 {
            lab.restart()?;
            ensure!(programmed(lab)? == before, "other ids:\n{before}\n{}", programmed(lab)?);
        }
        Ok(())
    })?;
    ensure!(lab.log().matches("takes_over=true").count() == 5, "a restart began anew");
    Ok(())
}

fn replaced(lab: &Lab) -> Result<()> {
    let before = programmed(lab)?;
    under_load(lab, || {
        replace(lab)?;
        ensure!(programmed(lab)? == before, "other ids");
        Ok(())
    })?;
    // It works, too.
    lab.change(NARROW, &["1/9090"])
}

/// Kills the agent, and starts one from another file.
fn replace(lab: &Lab) -> Result<()> {
    lab.kill()?;
    let copy = lab.bpffs().with_file_name("another");
    agent::copy_program(&agent::binary(), &copy)?;
    lab.setup().binary = copy;
    lab.begin()
}

fn beside_traffic(lab: &Lab) -> Result<()> {
    let before = programmed(lab)?;
    under(lab, &loads(CALM), || {
        lab.restart()?;
        ensure!(programmed(lab)? == before, "other ids after a restart");
        replace(lab)?;
        ensure!(programmed(lab)? == before, "other ids of another binary");
        // A fast machine is done before enough was sent.
        std::thread::sleep(Duration::from_millis(12 * CALM));
        Ok(())
    })?;
    ensure!(lab.log().matches("takes_over=true").count() == 2, "a restart began anew");
    lab.change(NARROW, &["1/9090"])
}

fn no_folder(lab: &Lab) -> Result<()> {
    let before = programmed(lab)?;
    let hidden = lab.folder.dir().with_file_name("hidden");
    under_load(lab, || {
        lab.kill()?;
        fs::rename(lab.folder.dir(), &hidden)?;
        lab.start()?;
        let devices = lab.devices().clone();
        lab.agent_mut()?.is_attached(&devices)?;
        lab.agent_mut()?.says(&["cannot read the folder"])?;
        // Longer than it would take to delete something.
        std::thread::sleep(Duration::from_millis(200));
        ensure!(programmed(lab)? == before, "something has changed");
        fs::rename(&hidden, lab.folder.dir())?;
        lab.agent_mut()?.says(&["first sync done"])?;
        ensure!(programmed(lab)? == before, "other ids");
        Ok(())
    })?;
    // And what was deleted in the meantime goes then.
    lab.kill()?;
    lab.folder.remove(WIDE.name)?;
    lab.begin()?;
    eventually(SOON, || {
        let list = agent::ask(&lab.node, &["service", "list"], &lab.bpffs())?.to_string();
        ensure!(list.contains("default/web") && !list.contains("default/wide"), "{list}");
        Ok(())
    })
}

fn cleanup(lab: &Lab) -> Result<()> {
    let indexes = lab.node.inside(|| {
        let devices = proxy_user::host::devices::list()?;
        Ok(devices.iter().map(|device| device.ifindex).collect::<Vec<_>>())
    })?;
    let packet_links = || {
        lab.node.inside(|| {
            let links = indexes.iter().flat_map(|index| [46, 47].map(|hook| tcx_links(*index, hook)));
            Ok(links.filter_map(Result::ok).map(|links| links.len()).sum::<usize>())
        })
    };
    ensure!(packet_links()? == 2 * lab.devices().len(), "{} links on devices", packet_links()?);
    ensure!(
        attachments(&lab.bpffs()).len() == SOCKET_HOOKS.len() + packet_links()?,
        "{:?}",
        attachments(&lab.bpffs())
    );

    let busy = agent::command(&lab.node, &["cleanup"], &lab.bpffs())?;
    ensure!(!busy.status.success(), "cleanup under a running agent");
    for kind in Kind::ALL {
        lab.local.reach(Attempt::new(kind, vip(Family::V4, WEB, kind)))?;
    }
    lab.kill()?;
    let named = lab.cgroup().to_str().context("a cgroup whose name is no text")?;
    let output = agent::command(&lab.node, &["cleanup", "--cgroup-root", named], &lab.bpffs())?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{said:?}");
    ensure!(packet_links()? == 0, "links are left on devices: {said:?}");
    ensure!(!lab.bpffs().join("ballast").exists(), "pins are left: {said:?}");
    let cgroup = proxy_user::host::cgroup::find(Some(lab.cgroup()))?;
    ensure!(links_on(&cgroup.path)? == 0, "links are left on the cgroup: {said:?}");
    for kind in Kind::ALL {
        for family in Family::BOTH {
            lab.local.fails(Attempt::new(kind, vip(family, WEB, kind)), libc::ENETUNREACH)?;
        }
    }

    // Links whose pins are lost, on a cgroup that is not the root: only who names it finds them.
    lab.begin()?;
    lab.kill()?;
    mount("bpf", lab.bpffs(), "bpf", MountFlags::empty(), None).context("cannot mount over the bpffs")?;
    ensure!(links_on(&cgroup.path)? == SOCKET_HOOKS.len(), "{} links on the cgroup", links_on(&cgroup.path)?);
    let output = agent::command(&lab.node, &["cleanup", "--cgroup-root", named], &lab.bpffs())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(links_on(&cgroup.path)? == 0, "links without pins are left on the cgroup");
    Ok(())
}

/// Links on a cgroup, of whomever.
fn links_on(cgroup: &std::path::Path) -> Result<usize> {
    use proxy_user::programs::bpf::{Hook, Link, link_ids};
    use std::os::unix::fs::MetadataExt as _;

    let wanted = cgroup.metadata()?.ino();
    let links = link_ids().filter_map(|id| Link::by_id(id.ok()?).ok()?.info().ok());
    Ok(links.filter(|info| matches!(info.hook, Hook::Cgroup { id, .. } if id == wanted)).count())
}
