//! Packet programs: TCX and clsact, and devices that appear and disappear.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proxy_common::map_names::CALLS;
use proxy_user::host::facts::HostFacts;
use proxy_user::host::follow::Follower;
use proxy_user::host::manager::{DeviceHooks as _, DeviceManager};
use proxy_user::host::seen::Seen;
use proxy_user::host::selection::Selection;
use proxy_user::programs::hooks::SOCKET_HOOKS;
use proxy_user::programs::{Attachment, Error, PacketHook, Programs, Settings, attachments, cleanup};
use tokio::sync::mpsc;

use proxy_testbed::attach::{index, links_on, links_on_device, on_node, run, veth};

/// Timeout until the agent notices a device: this takes some 100 ms, much more on a busy machine.
const SOON: Duration = Duration::from_mins(1);
/// Period in which the manager checks all devices without an event: longer than the test.
const NEVER: Duration = Duration::from_hours(1);

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn clsact_is_replaced_in_place_and_gives_way_to_tcx_and_back() {
    on_node(|node| {
        let device = veth("v0");
        let shown = |direction: &str| run(&format!("tc filter show dev v0 {direction}"));
        let filters = || ["ingress", "egress"].map(|d| shown(d).matches("handle 0xba11a57").count());
        for _ in 0..2 {
            let agent = node.start_with(PacketHook::Clsact);
            agent.attach_device(device, false).unwrap();
            assert_eq!((filters(), links_on_device(device).len()), ([1, 1], 0));
            let found = attachments(&node.bpffs);
            let is_ours = |one: &&Attachment| {
                one.place.as_deref() == Some("v0") && agent.program_id(one.program) == Some(one.program_id)
            };
            assert_eq!(found.iter().filter(is_ours).count(), 2, "{found:?}");
        }
        assert!(shown("ingress").contains("tc_ingress") && shown("egress").contains("tc_egress"));

        let agent = node.start_with(PacketHook::Tcx);
        agent.attach_device(device, false).unwrap();
        assert_eq!((filters(), links_on_device(device).len()), ([0, 0], 2));
        assert!(!run("tc qdisc show dev v0").contains("clsact"), "we made it, and no program uses it");
        drop(agent);

        let agent = node.start_with(PacketHook::Clsact);
        agent.attach_device(device, false).unwrap();
        assert_eq!((filters(), links_on_device(device).len()), ([1, 1], 0));
        drop(agent);
        assert_eq!(cleanup(&node.bpffs, None).unwrap().left, [""; 0]);
        assert!(!run("tc qdisc show dev v0").contains("clsact"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn pins_of_calls_stay_while_packet_programs_use_them() {
    on_node(|node| {
        let device = veth("v0");
        let folder = node.bpffs.join("ballast").join(crate::version()).join(CALLS);
        let pinned = || {
            let entries = fs::read_dir(&folder).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>()
        };
        let first = node.serve(device);
        let of_first = pinned();
        assert_eq!(of_first.len(), 1);
        drop(first);
        let second = node.start();
        second.attach_sockets().unwrap();
        let none = Seen::start(|| Ok(Vec::new())).unwrap().present();
        second.after_pass(&none, &second.look().unwrap(), true, true);
        assert!(pinned().is_superset(&of_first), "the first one's programs are still attached");
        second.attach_device(device, false).unwrap();
        second.attach_device(veth("v1"), true).unwrap();
        // The kernel frees programs a moment after the last reference is gone.
        let begun = Instant::now();
        while !pinned().is_disjoint(&of_first) && begun.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(20));
            second.after_pass(&none, &second.look().unwrap(), true, true);
        }
        assert!(pinned().is_disjoint(&of_first), "no device uses it");
        assert_eq!(pinned().len(), 2, "of devices with link-layer header and without");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_foreign_filter_keeps_its_qdisc() {
    on_node(|node| {
        let device = veth("v0");
        let agent = node.start_with(PacketHook::Clsact);
        agent.attach_device(device, false).unwrap();
        run("tc filter add dev v0 ingress prio 9 bpf bytecode '1,6 0 0 0'");
        drop(agent);
        assert_eq!(cleanup(&node.bpffs, None).unwrap().left, [""; 0]);
        let left = run("tc filter show dev v0 ingress");
        assert!(left.contains("bytecode") && !left.contains("tc_ingress"), "{left}");

        run("tc qdisc del dev v0 clsact");
        run("tc qdisc add dev v0 clsact");
        let agent = node.start_with(PacketHook::Clsact);
        agent.attach_device(device, false).unwrap();
        agent.detach_device(device).unwrap();
        assert!(run("tc qdisc show dev v0").contains("clsact"), "it was there before us");
        run("tc filter add dev v0 ingress prio 2 handle 0xba11a57 bpf bytecode '1,6 0 0 0'");
        let taken = agent.attach_device(device, false);
        assert!(matches!(taken, Err(Error::FilterTaken { .. })), "{taken:?}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn devices_are_attached_when_they_come_and_forgotten_when_they_go() {
    on_node(|node| {
        let (there, _) = (veth("v0"), veth("skip0"));
        run("ip link add br0 type bridge");
        let agent = Arc::new(node.start());
        let selection: Selection = "!skip*".parse().unwrap();
        let (manager, mut states) = DeviceManager::new(selection, Arc::clone(&agent));
        let manager = manager.with_period(NEVER);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let follower = Follower::start(HostFacts::default()).unwrap();
            let devices = follower.devices();
            let (sender, _events) = mpsc::channel(1);
            tokio::spawn(follower.run(sender));
            let task = tokio::spawn(manager.run(devices));
            let names = |states: &Option<BTreeMap<u32, _>>| {
                states.as_ref().map(|states| states.keys().copied().collect::<Vec<_>>())
            };
            tokio::time::timeout(SOON, states.changed()).await.unwrap().unwrap();
            assert_eq!(
                names(&states.borrow()),
                Some(vec![index("lo").unwrap(), index("v0p").unwrap(), there])
            );
            assert_eq!(links_on_device(there).len(), 2);

            let began = Instant::now();
            let fresh = tokio::task::spawn_blocking(|| veth("late0")).await.unwrap();
            let pin = node.ballast().join(format!("links/tcx_ingress_{fresh}"));
            while links_on_device(fresh).len() < 2 || pin.symlink_metadata().is_err() {
                assert!(began.elapsed() < SOON, "not attached in time");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }

            run("ip link del late0");
            let began = Instant::now();
            while pin.symlink_metadata().is_ok() {
                assert!(began.elapsed() < SOON, "not forgotten in time");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert!(states.borrow().iter().flatten().all(|(_, state)| state.problem.is_none()));
            task.abort();
        });
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_second_agent_leaves_the_devices_and_cleanup_leaves_both_alone() {
    on_node(|node| {
        let device = veth("v0");
        let _agent = node.serve(device);
        let (bpffs, cgroup) = (node.bpffs.join("other"), node.cgroup.join("other"));
        fs::create_dir(&bpffs).unwrap();
        fs::create_dir(&cgroup).unwrap();
        let other = Settings { bpffs: bpffs.clone(), cgroup: cgroup.clone(), ..node.settings() };
        let other = Programs::start(&other).unwrap();
        other.attach_sockets().unwrap();
        assert!(matches!(other.attach_device(device, false), Err(Error::DevicesInUse)));
        drop(other);
        let report = cleanup(&bpffs, Some(&node.cgroup)).unwrap();
        assert_eq!(report.left.len(), 2, "{report:?}");
        assert_eq!((node.links_on_cgroup().len(), links_on_device(device).len()), (SOCKET_HOOKS.len(), 2));
        assert_eq!(links_on(&cgroup), []);
        fs::remove_dir(&cgroup).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn program_with_folder_as_pin_is_attached_again() {
    on_node(|node| {
        let device = veth("v0");
        let agent = node.serve(device);
        let links = node.ballast().join("links");
        let pins = [format!("tcx_ingress_{device}"), "sock_connect4".to_owned()];
        for pin in &pins {
            fs::remove_file(links.join(pin)).unwrap();
            fs::create_dir(links.join(pin)).unwrap();
        }
        assert_eq!(Programs::attached(&agent.look().unwrap()).get(&device), Some(&false));
        agent.attach_device(device, false).unwrap();
        assert_eq!(links_on_device(device).len(), 2);
        assert!(agent.repair().sockets.is_ok());
        for pin in &pins {
            node.link(pin);
            assert!(node.ballast().join("refused").join(pin).is_dir(), "{pin}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn device_with_reused_index_gets_programs() {
    on_node(|node| {
        let device = veth("v0");
        let agent = node.serve(device);
        run(&format!(
            "unshare --net sleep 60 >/dev/null 2>&1 & other=$!; sleep 0.2; ip link set v0 netns $other; \
             ip link add w0 index {device} type veth peer name w0p"
        ));
        assert_eq!(links_on_device(device), [0u32; 0]);
        assert_eq!(Programs::attached(&agent.look().unwrap()).get(&device), Some(&false));
        agent.attach_device(device, false).unwrap();
        assert_eq!(links_on_device(device).len(), 2);
    });
}
