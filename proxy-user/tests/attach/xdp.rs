//! The XDP program on uplinks: restarts keep it, a changed setting removes it, and foreign programs stay attached.

use std::thread::sleep;
use std::time::{Duration, Instant};

use aya::programs::XdpMode as AyaMode;
use proxy_common::map_names;
use proxy_common::node::DEVICE_UPLINK;
use proxy_user::host::devices::{self, XdpMode, XdpProgram};
use proxy_user::host::manager::DeviceHooks as _;
use proxy_user::host::seen::Seen;
use proxy_user::programs::bpf::{Hook, Link};
use proxy_user::programs::{AttachedXdp, EMBEDDED, Programs, Settings, Xdp, XdpDevice, cleanup};

use proxy_testbed::attach::{on_node, run, veth};

/// Creates a veth pair, and marks `up0` as an uplink in the map `devices`; returns the ifindex of `up0`.
fn uplink(programs: &Programs) -> u32 {
    let ifindex = veth("up0");
    run("ip link set up0 up");
    let map = aya::maps::MapData::from_pin(programs.pin_dir().join(map_names::DEVICES)).unwrap();
    let mut map: aya::maps::HashMap<_, u32, u64> = aya::maps::Map::HashMap(map).try_into().unwrap();
    map.insert(ifindex, DEVICE_UPLINK, 0).unwrap();
    ifindex
}

/// Does one pass of the device manager over `up0`, and returns the XDP state of the device.
fn pass(programs: &Programs, ifindex: u32) -> Option<XdpDevice> {
    programs.attach_device(ifindex, false).unwrap();
    programs.after_pass(
        &Seen::start(devices::list).unwrap().present(),
        &programs.look().unwrap(),
        true,
        true,
    );
    programs.xdp_devices().list().pop()
}

fn xdp_on(ifindex: u32) -> Option<XdpProgram> {
    devices::list().unwrap().into_iter().find(|device| device.ifindex == ifindex).unwrap().xdp
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn xdp_stays_in_its_link_over_restarts_and_goes_when_it_is_not_wanted() {
    on_node(|node| {
        let start = |xdp| Programs::start(&Settings { xdp, ..node.settings() }).unwrap();
        let first = start(Xdp::Native);
        let ifindex = uplink(&first);
        assert_eq!(pass(&first, ifindex).unwrap().mode, AttachedXdp::Native);
        let pin = node.bpffs.join("ballast/links").join(format!("xdp_{ifindex}"));
        let before = Link::pinned(&pin).unwrap().unwrap().info().unwrap();
        assert_eq!(before.hook, Hook::Xdp { ifindex });
        drop(first);
        assert_eq!(xdp_on(ifindex).map(|xdp| xdp.program), Some(before.program), "it outlives its agent");
        let second = start(Xdp::Native);
        assert_eq!(pass(&second, ifindex).unwrap().mode, AttachedXdp::Native);
        let after = Link::pinned(&pin).unwrap().unwrap().info().unwrap();
        assert_eq!(after.id, before.id, "the link stays");
        assert_ne!(after.program, before.program, "the program is the new agent's");
        // Another tool removes the pin: the kernel detaches the program a moment later, and the next pass attaches it again.
        std::fs::remove_file(&pin).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while xdp_on(ifindex).is_some() && Instant::now() < end {
            sleep(Duration::from_millis(5));
        }
        assert!(xdp_on(ifindex).is_none(), "the link has gone with its pin");
        assert_eq!(pass(&second, ifindex).unwrap().mode, AttachedXdp::Native);
        assert!(pin.exists() && xdp_on(ifindex).is_some());
        drop(second);
        let third = start(Xdp::Generic);
        assert_eq!(pass(&third, ifindex).unwrap().mode, AttachedXdp::Generic);
        assert_eq!(xdp_on(ifindex).unwrap().mode, Some(XdpMode::Generic));
        drop(third);
        let last = start(Xdp::Auto);
        let state = pass(&last, ifindex).unwrap();
        assert!(state.mode == AttachedXdp::None && state.reason.contains("virtual"), "{state:?}");
        assert!(xdp_on(ifindex).is_none() && !pin.exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_foreign_xdp_program_is_left_alone() {
    on_node(|node| {
        let programs = Programs::start(&Settings { xdp: Xdp::Native, ..node.settings() }).unwrap();
        let ifindex = uplink(&programs);
        let mut other = aya::EbpfLoader::new().btf(None).load(EMBEDDED).unwrap();
        let foreign: &mut aya::programs::Xdp = other.program_mut("xdp_nop").unwrap().try_into().unwrap();
        foreign.load().unwrap();
        let link = foreign.attach_to_if_index(ifindex, AyaMode::Driver).unwrap();
        let id = foreign.info().unwrap().id();
        for _ in 0..2 {
            let state = pass(&programs, ifindex).unwrap();
            assert!(
                state.mode == AttachedXdp::None && state.reason.contains("does not replace it"),
                "{state:?}"
            );
            assert_eq!(xdp_on(ifindex).map(|xdp| xdp.program), Some(id));
        }
        foreign.detach(link).unwrap();
        assert_eq!(pass(&programs, ifindex).unwrap().mode, AttachedXdp::Native, "it has gone");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn device_that_refuses_xdp_is_reported_and_cleanup_detaches_the_others() {
    on_node(|node| {
        let programs = Programs::start(&Settings { xdp: Xdp::Native, ..node.settings() }).unwrap();
        let ifindex = uplink(&programs);
        run("ip link add br0 type bridge");
        run("ip link set up0 master br0");
        let state = pass(&programs, ifindex).unwrap();
        assert!(
            state.mode == AttachedXdp::None && state.reason.contains("port of another device"),
            "{state:?}"
        );
        run("ip link set up0 nomaster");
        assert_eq!(pass(&programs, ifindex).unwrap().mode, AttachedXdp::Native);
        drop(programs);
        let done = cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
        assert!(done.removed.iter().any(|what| what == &format!("link xdp_{ifindex}")), "{done:?}");
        assert!(xdp_on(ifindex).is_none());
    });
}
