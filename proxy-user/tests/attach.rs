//! Attaching programs, restarts, lost pins and cleanup, on this machine's kernel.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "attach/devices.rs"]
mod devices;
#[path = "attach/xdp.rs"]
mod xdp;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use proxy_common::config::{FlowSize, Limits, NodeConfig};
use proxy_testbed::attach::{Node, Privileges, TCX, foreign, links_on, links_on_device, on_node, run, veth};
use proxy_user::host::manager::DeviceHooks;
use proxy_user::host::seen::Seen;
use proxy_user::programs::bpf::{Link, Rank, tcx_links};
use proxy_user::programs::hooks::SOCKET_HOOKS;
use proxy_user::programs::{
    AttachOutcome, Attachment, Capacities, Cleanup, CurrentMaps, Error, Programs, Settings, StartNotice,
    TcxOrder, attachments, cleanup, dry_run, pinned_elsewhere,
};
use rustix::thread::CapabilitySet;

/// `BPF_PROG_TYPE_CGROUP_SOCK_ADDR` and `BPF_CGROUP_INET4_CONNECT`.
const CONNECT4: (u32, u32) = (18, 10);
/// `BPF_PROG_TYPE_SCHED_CLS` and `BPF_TCX_INGRESS`.
const INGRESS: (u32, u32) = (3, 46);

/// Whether every socket hook has the expected outcome.
fn all(outcomes: &[(&str, AttachOutcome)], expected: AttachOutcome) -> bool {
    outcomes.len() == SOCKET_HOOKS.len() && outcomes.iter().all(|(_, outcome)| *outcome == expected)
}

fn socket_links(node: &Node) -> BTreeMap<&'static str, (u32, u32)> {
    let read = |name| {
        let info = node.link(name);
        (info.id, info.program)
    };
    SOCKET_HOOKS.iter().map(|(name, _)| (*name, read(name))).collect()
}

/// Name of the folder with the maps of this ABI version.
fn version() -> String {
    format!("v{}", proxy_common::version::ABI_VERSION)
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_restart_replaces_programs_in_the_links_that_are_there() {
    on_node(|node| {
        let device = veth("v0");
        let first = node.start();
        assert!(!first.is_current(), "nothing was attached before");
        assert!([100, 250, 300, 1000].contains(&first.hz()), "{} jiffies a second", first.hz());
        assert!(all(&first.attach_sockets().unwrap(), AttachOutcome::Attached));
        first.attach_device(device, false).unwrap();
        let before = socket_links(node);
        let packets = links_on_device(device);
        assert_eq!((links_on(&node.cgroup).len(), packets.len()), (SOCKET_HOOKS.len(), 2));
        drop(first);
        assert_eq!(links_on(&node.cgroup).len(), SOCKET_HOOKS.len(), "the agent's end detaches nothing");

        let second = node.start();
        assert!(second.is_current());
        assert_eq!(second.notices(), []);
        assert!(all(&second.attach_sockets().unwrap(), AttachOutcome::Replaced));
        second.attach_device(device, false).unwrap();
        let after = socket_links(node);
        for (name, (link, program)) in before {
            assert_eq!(after[name].0, link, "{name}: another link");
            assert_ne!(after[name].1, program, "{name}: the old program");
        }
        assert_eq!(links_on_device(device), packets);
        assert_eq!(node.links_on_cgroup().len(), SOCKET_HOOKS.len());
        let attached = attachments(&node.bpffs);
        assert_eq!(attached.len(), SOCKET_HOOKS.len() + 2);
        let runs =
            |one: &Attachment| one.is_attached() && second.program_id(one.program) == Some(one.program_id);
        assert!(attached.iter().all(runs), "{attached:?}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn after_a_lost_bpffs_each_hook_has_one_program() {
    on_node(|node| {
        let device = veth("v0");
        let first = node.serve(device);
        let before = socket_links(node);
        let packets = links_on_device(device);
        drop(first);
        // A new bpffs mounted over the old one hides the pins and keeps the links.
        run(&format!("mount -t bpf bpf {}", node.bpffs.display()));

        let second = node.start();
        assert!(!second.is_current(), "the maps are new and empty");
        assert!(all(&second.attach_sockets().unwrap(), AttachOutcome::Adopted));
        second.attach_device(device, false).unwrap();
        assert_eq!(node.links_on_cgroup().len(), SOCKET_HOOKS.len());
        assert_eq!(links_on_device(device), packets);
        let after = socket_links(node);
        for (name, (link, program)) in before {
            assert_eq!((after[name].0, after[name].1 != program), (link, true), "{name}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_second_link_of_ours_on_a_hook_goes() {
    on_node(|node| {
        let device = veth("v0");
        let first = node.serve(device);
        drop(first);
        run(&format!("mount -t bpf bpf {}", node.bpffs.display()));
        // Without CAP_SYS_ADMIN, an agent cannot search links by id: it does not find the old links, and attaches new ones.
        let few = Privileges::reduce(CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::PERFMON);
        let second = node.start();
        assert!(all(&second.attach_sockets().unwrap(), AttachOutcome::Attached));
        second.attach_device(device, false).unwrap();
        drop((second, few));
        assert_eq!(
            (node.links_on_cgroup().len(), links_on_device(device).len()),
            (2 * SOCKET_HOOKS.len(), 4)
        );

        let third = node.start();
        assert!(all(&third.attach_sockets().unwrap(), AttachOutcome::Replaced));
        third.attach_device(device, false).unwrap();
        assert_eq!((node.links_on_cgroup().len(), links_on_device(device).len()), (SOCKET_HOOKS.len(), 2));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn programs_of_others_survive_everything() {
    on_node(|node| {
        let device = veth("v0");
        let (socket, packet) = (foreign(CONNECT4.0, CONNECT4.1), foreign(INGRESS.0, 0));
        let cgroup = fs::File::open(&node.cgroup).unwrap();
        let on_socket = Link::to_cgroup(socket.as_fd(), cgroup.as_fd(), CONNECT4.1).unwrap();
        let on_packet = Link::to_device(packet.as_fd(), device, INGRESS.1, Rank::First).unwrap();
        let theirs = [on_socket.info().unwrap(), on_packet.info().unwrap()];

        for _ in 0..2 {
            let _agent = node.serve(device);
            assert_eq!(
                (node.links_on_cgroup().len(), links_on_device(device).len()),
                (SOCKET_HOOKS.len() + 1, 3)
            );
            let order = tcx_links(device, INGRESS.1).unwrap();
            assert_eq!(order.last(), Some(&theirs[1].id), "ours come first");
        }
        let report = cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
        assert_eq!(report.left, [""; 0]);
        assert_eq!(node.links_on_cgroup(), theirs[..1]);
        assert_eq!(links_on_device(device), [theirs[1].id]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn the_order_among_the_programs_of_others_is_as_set() {
    on_node(|node| {
        let device = veth("v0");
        // Two foreign programs on each hook, the first and the last.
        let foreign: Vec<_> = TCX
            .iter()
            .flat_map(|hook| [Rank::First, Rank::Last].map(|rank| (*hook, rank)))
            .map(|(hook, rank)| {
                let program = foreign(INGRESS.0, 0);
                Link::to_device(program.as_fd(), device, hook, rank).unwrap()
            })
            .collect();
        let theirs: Vec<_> = foreign.iter().map(|link| link.info().unwrap().id).collect();
        let places = |hook: u32| {
            let links = tcx_links(device, hook).unwrap();
            let place = links.iter().position(|id| !theirs.contains(id)).unwrap();
            assert_eq!(links.len(), 3, "one of ours, whose place is {place}: {links:?}");
            place
        };
        let start = |tcx_order| {
            let agent = Programs::start(&Settings { tcx_order, ..node.settings() }).unwrap();
            agent.attach_sockets().unwrap();
            agent.attach_device(device, false).unwrap();
            for direction in ["ingress", "egress"] {
                let link = node.link(&format!("tcx_{direction}_{device}"));
                let program = agent.program_id(&format!("tc_{direction}"));
                assert_eq!(program, Some(link.program), "{tcx_order:?}");
            }
            TCX.map(places)
        };
        assert_eq!(start(TcxOrder::Nest), [0, 2], "at ingress the others come after ours, at egress before");
        let kept = links_on_device(device);
        assert_eq!(start(TcxOrder::Nest), [0, 2]);
        assert_eq!(links_on_device(device), kept, "a restart keeps the links");
        // Each agent finds links in another order: those of an agent with another setting, or of an older version.
        assert_eq!(start(TcxOrder::First), [0, 0]);
        assert_eq!(start(TcxOrder::Last), [2, 2]);
        assert_eq!(start(TcxOrder::Nest), [0, 2]);
        // A foreign program is attached in front of ours.
        let late = foreign_link(device);
        assert_eq!(tcx_links(device, INGRESS.1).unwrap()[0], late.info().unwrap().id);
        let agent = node.start();
        agent.attach_device(device, false).unwrap();
        assert_eq!(tcx_links(device, INGRESS.1).unwrap()[1], late.info().unwrap().id);
        drop(agent);
        let report = cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
        assert_eq!(report.left, [""; 0]);
        assert_eq!(links_on_device(device).len(), foreign.len() + 1);
    });
}

/// Attaches a foreign program in front of all others at ingress.
fn foreign_link(device: u32) -> Link {
    Link::to_device(foreign(INGRESS.0, 0).as_fd(), device, INGRESS.1, Rank::First).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn cleanup_leaves_nothing_and_finds_nothing_the_second_time() {
    on_node(|node| {
        let device = veth("v0");
        let agent = node.serve(device);
        let refused = cleanup(&node.bpffs, None);
        assert!(matches!(refused, Err(Error::InUse { .. })), "an agent runs: {refused:?}");
        drop(agent);
        // A new bpffs hides all pins, and the next agent pins new maps without attaching: the links have lost their pins.
        run(&format!("mount -t bpf bpf {}", node.bpffs.display()));
        drop(node.start());

        let report = cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
        assert_eq!(report.left, [""; 0]);
        assert!(report.removed.iter().any(|line| line.contains("sock_connect4")), "{report:?}");
        assert_eq!(node.links_on_cgroup(), []);
        assert_eq!(links_on_device(device), [0; 0]);
        assert!(!node.ballast().exists());
        let again = cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
        assert_eq!((again.removed, again.left), (vec![], vec![]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn cleanup_without_a_bpffs_removes_nothing() {
    on_node(|node| {
        let device = veth("v0");
        drop(node.serve(device));
        let links = || (node.links_on_cgroup(), links_on_device(device));
        let before = links();
        let plain = tempfile::tempdir().unwrap();
        for path in [plain.path().to_owned(), plain.path().join("nothing")] {
            let error = cleanup(&path, Some(&node.cgroup)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{} is not a bpffs", path.display())), "{error}");
            assert!(dry_run(&path, Some(&node.cgroup)).is_err());
        }
        assert_eq!(links(), before);
        cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
        assert_eq!(
            cleanup(plain.path(), Some(&node.cgroup)).unwrap(),
            Cleanup::default(),
            "nothing to remove"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn cleanup_works_with_no_more_than_the_bpffs() {
    on_node(|node| {
        let device = veth("v0");
        let agent = node.serve(device);
        drop(agent);
        fs::remove_file(node.ballast().join("services")).unwrap();
        fs::remove_dir_all(node.ballast().join(version())).unwrap();
        assert_eq!(cleanup(&node.bpffs, None).unwrap().left, [""; 0]);
        assert_eq!((node.links_on_cgroup(), links_on_device(device)), (vec![], vec![]));
        assert!(!node.ballast().exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn two_agents_never_share_a_bpffs_or_a_cgroup() {
    on_node(|node| {
        let _agent = node.start();
        let same = Programs::start(&node.settings());
        assert!(matches!(&same, Err(Error::InUse { flag: "--cgroup-root" | "--bpffs", .. })));
        let elsewhere = node.bpffs.join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let other = Programs::start(&Settings { bpffs: elsewhere, ..node.settings() });
        assert!(matches!(&other, Err(Error::InUse { flag: "--cgroup-root", .. })), "{:?}", other.err());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn programs_that_another_bpffs_pins_are_found_unless_an_agent_runs() {
    on_node(|node| {
        let agent = node.start();
        agent.attach_sockets().unwrap();
        let elsewhere = node.bpffs.join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        assert_eq!(pinned_elsewhere(&elsewhere, &node.cgroup).unwrap(), None, "the agent serves the cgroup");
        drop(agent);
        assert_eq!(pinned_elsewhere(&node.bpffs, &node.cgroup).unwrap(), None);
        let found = pinned_elsewhere(&elsewhere, &node.cgroup).unwrap().unwrap();
        assert_eq!((found.programs.len(), found.bpffs.as_ref()), (SOCKET_HOOKS.len(), Some(&node.bpffs)));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn another_cgroup_takes_the_programs_with_it() {
    on_node(|node| {
        let agent = node.start();
        agent.attach_sockets().unwrap();
        drop(agent);
        let inner = node.cgroup.join("inner");
        fs::create_dir(&inner).unwrap();
        let agent = Programs::start(&Settings { cgroup: inner.clone(), ..node.settings() }).unwrap();
        assert!(all(&agent.attach_sockets().unwrap(), AttachOutcome::Attached));
        assert_eq!((node.links_on_cgroup().len(), links_on(&inner).len()), (0, SOCKET_HOOKS.len()));
        drop(agent);
        // The links are removed with their cgroup: the next start attaches new ones.
        fs::remove_dir(&inner).unwrap();
        let agent = node.start();
        assert!(all(&agent.attach_sockets().unwrap(), AttachOutcome::Attached));
        assert_eq!(node.links_on_cgroup().len(), SOCKET_HOOKS.len());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_pin_of_another_shape_is_never_used() {
    on_node(|node| {
        drop(node.start());
        let pin = node.ballast().join(version()).join("services");
        fs::remove_file(&pin).unwrap();
        let wrong = aya::maps::HashMap::<_, u32, u32>::create(8, 0).unwrap();
        wrong.pin(&pin).unwrap();
        let agent = node.start();
        let [StartNotice::PinRefused { map: "services", moved_to, .. }] = agent.notices() else {
            panic!("{:?}", agent.notices())
        };
        assert!(moved_to.starts_with(node.ballast().join("refused")) && moved_to.exists());
        assert_eq!(aya::maps::MapInfo::from_pin(&pin).unwrap().key_size(), 8);
        agent.attach_sockets().unwrap();
        drop(agent);

        fs::remove_file(&pin).unwrap();
        let agent = node.start();
        assert!(!agent.is_current(), "the programs that run use the map that lost its pin");
    });
}

/// Returns the sizes of the flow tables and the ceilings of the maps.
fn config(node: &Node) -> ([FlowSize; 2], Limits) {
    let map = aya::maps::MapData::from_pin(node.ballast().join("config")).unwrap();
    let map: aya::maps::Array<_, NodeConfig> = aya::maps::Map::Array(map).try_into().unwrap();
    let config = map.get(&0, 0).unwrap();
    (config.flows, config.limits)
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn another_capacity_keeps_the_map_and_says_so() {
    on_node(|node| {
        let agent = node.start();
        agent.attach_sockets().unwrap();
        drop(agent);
        let settings = node.settings();
        // A map that grows takes any ceiling.
        let capacities = Capacities { frontends: 128, slots: 512, ..settings.capacities };
        let agent = Programs::start(&Settings { capacities, ..settings }).unwrap();
        let kept = ["services", "services6"].map(|map| StartNotice::SizeKept {
            map,
            setting: "--max-frontends",
            kept: 64,
            max_entries: 128,
            by_memory: false,
        });
        assert_eq!(agent.notices(), kept);
        let (_, limits) = config(node);
        assert_eq!((limits.slots, limits.flows), (512, capacities.flows));
        assert!(agent.is_current());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn maps_of_another_version_are_removed_after_our_programs_are_attached() {
    on_node(|node| {
        drop(node.start());
        let old = node.ballast().join("v0");
        fs::create_dir(&old).unwrap();
        fs::rename(node.ballast().join(version()).join("names"), old.join("names")).unwrap();
        let agent = node.start();
        assert!(old.exists(), "until the hooks run the new programs");
        agent.attach_sockets().unwrap();
        let none = Seen::start(|| Ok(Vec::new())).unwrap().present();
        agent.after_pass(&none, &agent.look().unwrap(), false, true);
        assert!(old.exists(), "until all devices have the new programs");
        agent.after_pass(&none, &agent.look().unwrap(), true, true);
        assert!(!old.exists());
        let target = fs::read_link(node.ballast().join("services")).unwrap();
        assert_eq!(target.to_str(), Some(&*format!("{}/services", version())));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn three_capabilities_are_enough_once_a_bpffs_is_mounted() {
    on_node(|node| {
        let device = veth("v0");
        run(&format!("mount -t bpf bpf {}", node.bpffs.display()));
        let few = Privileges::reduce(CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::PERFMON);
        for expected in [AttachOutcome::Attached, AttachOutcome::Replaced] {
            let agent = node.start();
            assert!(all(&agent.attach_sockets().unwrap(), expected));
            agent.attach_device(device, false).unwrap();
            assert_eq!(links_on_device(device).len(), 2);
        }
        assert_eq!(cleanup(&node.bpffs, Some(&node.cgroup)).unwrap().left, [""; 0]);
        assert_eq!(links_on_device(device).len(), 0);
        drop(few);
        assert_eq!(node.links_on_cgroup(), []);

        let fewer = Privileges::reduce(CapabilitySet::NET_ADMIN);
        let error = Programs::start(&node.settings()).err().unwrap().to_string();
        assert!(error.contains("missing CAP_BPF, CAP_PERFMON:"), "{error}");
        drop(fewer);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn pins_that_others_may_change_are_refused() {
    on_node(|node| {
        run(&format!("mount -t bpf bpf {}", node.bpffs.display()));
        let refused = |what: &str, path: &Path, undo: &str| {
            let shown = path.display();
            run(&format!("{what} {shown}"));
            let error = Programs::start(&node.settings()).err().unwrap().to_string();
            assert!(error.contains(&shown.to_string()) && error.contains("--bpffs"), "{what}: {error}");
            let beside = CurrentMaps::find(&node.bpffs);
            assert!(matches!(beside, Err(Error::NotOurs { .. })) || path != node.ballast(), "{beside:?}");
            run(&format!("{undo} {shown}"));
        };
        // Any user of the node may do this before an agent runs: the kernel mounts a bpffs with mode 1777.
        refused("setpriv --reuid 12345 --clear-groups mkdir -m 755", &node.ballast(), "rmdir");
        refused("mkdir -m 777", &node.ballast(), "rmdir");
        assert!(!node.ballast().exists());
        drop(node.start());
        let links = node.ballast().join("links");
        refused("chown 12345", &links, "chown 0");
        refused("chmod 770", &links, "chmod 700");
        assert!(CurrentMaps::find(&node.bpffs).unwrap().is_none(), "nothing is attached");
        node.start().attach_sockets().unwrap();
        assert!(CurrentMaps::find(&node.bpffs).unwrap().unwrap().still());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn attach_errors_say_why() {
    on_node(|node| {
        fs::write(node.bpffs.join("file"), "").unwrap();
        let error = Programs::start(&node.settings()).err().unwrap().to_string();
        assert!(error.contains("not a bpffs") && error.contains("not empty"), "{error}");
        fs::remove_file(node.bpffs.join("file")).unwrap();
        let empty = Programs::start(&Settings { object: &[], ..node.settings() }).err().unwrap().to_string();
        assert!(empty.contains("cargo xtask build"), "{empty}");
        let no_cgroup = Settings { cgroup: "/proc".into(), ..node.settings() };
        let error = Programs::start(&no_cgroup).err().unwrap().to_string();
        assert!(error.contains("--cgroup-root"), "{error}");
        run(&format!("mount -t bpf bpf {0} && mount -o remount,ro {0}", node.bpffs.display()));
        let error = Programs::start(&node.settings()).err().unwrap().to_string();
        assert!(error.contains("read-only") && error.contains("--bpffs"), "{error}");
    });
}
