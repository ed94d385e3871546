//! What the command line and the metrics read from the kernel's maps, also with the default capacities.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "figures for people")]

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use aya::maps::{Array, Map, MapData, SkStorage};
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE, BackendEntry};
use proxy_common::conntrack::{ASSURED, FIN_CLIENT, SEEN_REPLY};
use proxy_common::flow::{FlowEntry, STATE_CLAIMED, STATE_USED};
use proxy_common::service::{KIND_ADDRESS, KIND_CLUSTER_IP, KIND_NODE_PORT, ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey, SocketStorage, TO_BACKEND, TO_FRONTEND};
use proxy_core::model::FlowState;
use proxy_testbed::attach::{Node, on_node, run, veth};
use proxy_user::driver::Status;
use proxy_user::maps::segments;
use proxy_user::maps::view::{BackendState, View};
use proxy_user::metrics::{Format, Metrics};
use proxy_user::programs::hooks::SOCKET_HOOKS;
use proxy_user::programs::{
    Capacities, Cleanup, Iterated, PacketHook, Programs, Settings, attachments, cleanup, dry_run,
};

fn maps_of(node: &Node) -> PathBuf {
    node.ballast().join(format!("v{}", proxy_common::version::ABI_VERSION))
}

fn array<V: aya::Pod>(node: &Node, name: &str) -> Array<MapData, V> {
    let pin = segments::first_segment(&maps_of(node), name);
    Map::Array(MapData::from_pin(pin).unwrap()).try_into().unwrap()
}

fn start_at_full_size(node: &Node) -> Programs {
    Programs::start(&Settings { capacities: Capacities::default(), ..node.settings() }).unwrap()
}

fn flow(bits: u32, last_seen: u32) -> FlowEntry<[u8; 4]> {
    // SAFETY: an entry of zero bytes is valid.
    let empty: FlowEntry<[u8; 4]> = unsafe { std::mem::zeroed() };
    FlowEntry {
        client: [10, 0, 0, 9],
        proto: 6,
        state: u64::from(bits),
        last_seen,
        created: last_seen,
        ..empty
    }
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn socket_is_stale_if_its_endpoint_left_the_service() {
    on_node(|node| {
        let _agent = node.start();
        let entry = BackendEntry {
            addr: [10, 0, 0, 1],
            port: 53,
            proto: 17,
            state: BACKEND_ACTIVE,
            service: 3,
            flags: 0,
        };
        let gone = BackendEntry { state: BACKEND_GONE, ..entry };
        let mut backends = array::<BackendEntry<[u8; 4]>>(node, "backends");
        // Id 3 was reused for another endpoint; id 4 for the same endpoint, but of another Service.
        let reused = BackendEntry { port: 54, ..entry };
        let others = BackendEntry { service: 4, ..entry };
        for (id, row) in [(1, entry), (2, gone), (3, reused), (4, others)] {
            backends.set(id, row, 0).unwrap();
        }
        let map = Map::HashMap(MapData::from_pin(node.ballast().join("sockets")).unwrap());
        let mut sockets: aya::maps::HashMap<_, SocketKey<[u8; 4]>, SocketEntry<[u8; 4]>> =
            map.try_into().unwrap();
        let mut put = |cookie, proto, direction, backend_id| {
            let key = SocketKey::new(cookie, [10, 0, 0, 1], 53, proto, direction);
            let value = SocketEntry {
                addr: [10, 96, 0, 1],
                port: 53,
                reserved: 0,
                service: 3,
                backend_id,
                last_used: 0,
            };
            sockets.insert(key, value, 0).unwrap();
        };
        for id in 1..=4 {
            put(100 + u64::from(id), 17, TO_FRONTEND, id);
        }
        put(200, 6, TO_FRONTEND, 2);
        put(201, 17, TO_BACKEND, 2);
        let stale = View::open(&node.bpffs).unwrap().stale().unwrap();
        let found: Vec<_> = stale.iter().map(|one| (one.cookie, one.backend_id)).collect();
        assert_eq!(found, [(102, 2), (103, 3), (104, 4)]);
        assert!(stale.iter().all(|one| one.endpoint == "10.0.0.1:53".parse().unwrap()));
    });
}

fn storages(node: &Node) -> SkStorage<MapData, SocketStorage> {
    let map = Map::SkStorage(MapData::from_pin(node.ballast().join("socket_storage")).unwrap());
    map.try_into().unwrap()
}

/// Returns a socket connected to `to`, whose storage says that a Service was translated to it; and the socket's cookie.
fn led(node: &Node, to: &str, storage: SocketStorage) -> (UdpSocket, u64) {
    let to: SocketAddr = to.parse().unwrap();
    let socket = UdpSocket::bind(if to.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" }).unwrap();
    socket.connect(to).unwrap();
    storages(node).insert(&socket, storage, 0).unwrap();
    let cookie = rustix::net::sockopt::socket_cookie(&socket).unwrap();
    (socket, cookie)
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn iterators_list_the_translated_sockets_of_their_network_namespace() {
    on_node(|node| {
        let agent = node.start();
        let iterator = agent.socket_iterator(Iterated::Udp).unwrap();
        assert_eq!(iterator.list().unwrap(), []);
        let v4 = SocketStorage {
            backend: [u32::from_ne_bytes([127, 0, 0, 1]), 0, 0, 0],
            backend_port: 53,
            service: 3,
            backend_id: 1,
            family: 4,
            ..SocketStorage::default()
        };
        let v6 = SocketStorage { backend: [0, 0, 0, 1u32.to_be()], backend_id: 2, family: 6, ..v4 };
        let sockets = [
            led(node, "127.0.0.1:53", v4),
            led(node, "[::1]:53", v6),
            // Later, this socket was connected directly, to an address of no Service.
            led(node, "127.0.0.1:53", SocketStorage { family: 0, ..v4 }),
        ];
        let _direct = UdpSocket::bind("127.0.0.1:0").unwrap();
        let list = || {
            let mut found = iterator.list().unwrap();
            found.sort_by_key(|socket| socket.storage.backend_id);
            found
        };
        let found = list();
        let expected = [(sockets[0].1, v4), (sockets[1].1, v6)];
        assert_eq!(found.iter().map(|one| (one.cookie, one.storage)).collect::<Vec<_>>(), expected);
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        storages(node).insert(&stream, v4, 0).unwrap();
        let found = agent.socket_iterator(Iterated::Tcp).unwrap().list().unwrap();
        let cookie = rustix::net::sockopt::socket_cookie(&stream).unwrap();
        assert_eq!(found.iter().map(|one| (one.cookie, one.storage)).collect::<Vec<_>>(), [(cookie, v4)]);
        drop(stream);
        // A thread in another network namespace lists the sockets of that namespace.
        let elsewhere = std::thread::scope(|scope| {
            let look = || {
                // SAFETY: only this thread changes its network namespace.
                assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
                iterator.list().unwrap().len()
            };
            scope.spawn(look).join().unwrap()
        });
        assert_eq!(elsewhere, 0);

        let view = View::open(&node.bpffs).unwrap();
        let stale = || {
            let serving = view.serving_endpoints().unwrap();
            list().iter().filter_map(|led| serving.stale(led)).map(|one| one.endpoint).collect::<Vec<_>>()
        };
        let both: [SocketAddr; 2] = ["127.0.0.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()];
        assert_eq!(stale(), both, "no endpoint serves");
        let (state, service) = (BACKEND_ACTIVE, 3);
        let row = BackendEntry { addr: [127u8, 0, 0, 1], port: 53, proto: 17, state, service, flags: 0 };
        let row6 = BackendEntry {
            addr: std::net::Ipv6Addr::LOCALHOST.octets(),
            port: 53,
            proto: 17,
            state,
            service,
            flags: 0,
        };
        array(node, "backends").set(1, row, 0).unwrap();
        array(node, "backends6").set(2, row6, 0).unwrap();
        assert_eq!(stale(), []);
        array(node, "backends").set(1, BackendEntry { service: 4, ..row }, 0).unwrap();
        assert_eq!(stale(), both[..1], "the endpoint is another Service's");
        drop(sockets);
        assert_eq!(list(), [], "a storage goes with its socket");

        let usage = view.usage().unwrap();
        let row = usage.iter().find(|row| row.name == "socket_storage").unwrap();
        assert_eq!((&*row.kind, row.capacity, row.used), ("sk_storage", 0, None));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn every_entry_is_found_wherever_it_is_and_a_scrape_is_cheap() {
    on_node(|node| {
        let agent = start_at_full_size(node);
        agent.attach_sockets().unwrap();
        let last = Capacities::default().backends - 1;
        segments::grow(&maps_of(node), "backends", last as usize + 1).unwrap();
        let mut backends = array::<BackendEntry<[u8; 4]>>(node, "backends");
        let entry = BackendEntry {
            addr: [10, 0, 0, 1],
            port: 80,
            proto: 6,
            state: BACKEND_ACTIVE,
            service: 3,
            flags: 0,
        };
        backends.set(1, entry, 0).unwrap();
        let per = backends.len();
        let mut end = array::<BackendEntry<[u8; 4]>>(node, &format!("segments/backends_{}", last / per));
        end.set(last % per, BackendEntry { state: BACKEND_GONE, ..entry }, 0).unwrap();
        let mut backends6 = array::<BackendEntry<[u8; 16]>>(node, "backends6");
        let addr = std::net::Ipv6Addr::LOCALHOST.octets();
        let entry6 = BackendEntry { addr, port: 81, proto: 17, state: BACKEND_ACTIVE, service: 4, flags: 1 };
        backends6.set(2, entry6, 0).unwrap();
        let map = Map::HashMap(MapData::from_pin(node.ballast().join("services")).unwrap());
        let mut services: aya::maps::HashMap<_, ServiceKey<[u8; 4]>, ServiceEntry> = map.try_into().unwrap();
        // A node port, a cluster address with a port, and the cluster address alone.
        for (addr, port, kind) in [
            ([0; 4], 30_080, KIND_NODE_PORT),
            ([10, 96, 0, 1], 80, KIND_CLUSTER_IP),
            ([10, 96, 0, 1], 0, KIND_ADDRESS),
        ] {
            let key = ServiceKey::internal(addr, port, 6);
            services
                .insert(key, ServiceEntry { tag: key.tag(), kind, ..ServiceEntry::default() }, 0)
                .unwrap();
        }
        // User space estimates the kernel's jiffies: a time after the estimate, by up to half the 32-bit range, counts as now.
        let mut flows = array::<FlowEntry<[u8; 4]>>(node, "flows");
        let now = now(agent.hz());
        flows.set(0, flow(STATE_USED | SEEN_REPLY | ASSURED, now), 0).unwrap();
        flows.set(77, flow(STATE_USED, now), 0).unwrap();
        flows.set(78, flow(SEEN_REPLY, now), 0).unwrap();
        let last_flow = flows.len() - 1;
        flows.set(last_flow, flow(STATE_USED | SEEN_REPLY | ASSURED | FIN_CLIENT, now), 0).unwrap();

        let view = View::open(&node.bpffs).unwrap();
        let rows = view.backends().unwrap();
        assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [1, 2, last]);
        assert_eq!(
            (rows[&1].socket.to_string(), rows[&1].state),
            ("10.0.0.1:80".into(), BackendState::Active)
        );
        assert_eq!((rows[&2].socket.to_string(), rows[&2].local), ("[::1]:81".into(), true));
        assert_eq!(rows[&last].state, BackendState::Gone);

        let begun = cpu_time();
        let overview = view.overview().unwrap();
        println!("everything in {:?} of processor time", cpu_time().saturating_sub(begun));
        assert_eq!((overview.flows.v4, overview.flows.v6, overview.flows.live()), (3, 0, 3));
        assert_eq!(
            overview.flows.states,
            [(FlowState::Unreplied, 1), (FlowState::Established, 1), (FlowState::Closing, 1)].into()
        );
        let listed = view.flows().unwrap();
        let counted = |state| listed.iter().filter(|row| row.state == state).count() as u64;
        assert!(overview.flows.states.iter().all(|(state, count)| counted(*state) == *count));
        assert_eq!(listed.len(), 3, "an entry that is not in use is none");
        let used = |name: &str| overview.maps.iter().find(|row| row.name == name).unwrap().used;
        assert_eq!((used("backends"), used("backends6"), used("flows")), (Some(2), Some(1), Some(3)));
        assert_eq!((used("sockets"), used("config")), (Some(0), None));
        assert_eq!((used("services"), used("services6")), (Some(3), Some(0)));
        assert_eq!((used("src_ranges"), used("src_ranges6"), used("maglev")), (Some(0), Some(0), Some(0)));
        assert_eq!(view.services().unwrap().len(), 2, "an address alone is no frontend");
        // An empty LPM trie uses no memory.
        let takes_none = |name| ["src_ranges", "src_ranges6"].contains(&name);
        assert!(
            overview.maps.iter().all(|row| row.memory.is_some_and(|bytes| bytes > 0 || takes_none(row.name)))
        );

        let status = tokio::sync::watch::Sender::new(Status::default());
        let metrics = Metrics::new(&node.bpffs, status.subscribe(), true);
        let begun = cpu_time();
        let text = metrics.encode(Format::Plain).unwrap();
        println!("a scrape in {:?} of processor time", cpu_time().saturating_sub(begun));
        for line in [
            "ballast_maps_readable 1",
            "ballast_map_entries{map=\"flows\"} 3",
            "ballast_flows{state=\"closing\"} 1",
            "ballast_backends{state=\"gone\"} 1",
            "ballast_program_attached{hook=\"sock_connect4\",program=\"sock_connect4\",device=\"\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in {text}");
        }
        drop(agent);
        // The view does not need the agent.
        assert_eq!(View::open(&node.bpffs).unwrap().backends().unwrap(), rows);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn flows_that_expired_long_ago_are_removed() {
    on_node(|node| {
        let agent = start_at_full_size(node);
        let mut flows = array::<FlowEntry<[u8; 4]>>(node, "flows");
        let (now, hour) = (now(agent.hz()), 3_600 * agent.hz());
        let established = STATE_USED | SEEN_REPLY | ASSURED;
        flows.set(0, flow(established, now), 0).unwrap();
        flows.set(1, flow(established, now.wrapping_sub(25 * hour)), 0).unwrap();
        flows.set(2, flow(STATE_USED, now.wrapping_sub(hour)), 0).unwrap();
        let view = View::open(&node.bpffs).unwrap();
        assert_eq!((view.flows().unwrap().len(), view.delete_expired().unwrap()), (3, 1));
        assert_eq!(view.flows().unwrap().len(), 2, "the one that expired within the last day stays");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn claimed_entry_is_freed_after_process_ended() {
    on_node(|node| {
        let agent = start_at_full_size(node);
        let mut flows = array::<FlowEntry<[u8; 4]>>(node, "flows");
        let now = now(agent.hz());
        let claimed = STATE_USED | STATE_CLAIMED;
        flows.set(3, flow(claimed, now), 0).unwrap();
        flows.set(4, flow(claimed, now), 0).unwrap();
        let view = View::open(&node.bpffs).unwrap();
        let before = view.claimed().unwrap();
        let other = FlowEntry { state: 1 << 32 | u64::from(claimed), ..flow(claimed, now) };
        flows.set(4, other, 0).unwrap();
        assert_eq!(
            view.free_claimed(&before).unwrap(),
            1,
            "another process or CPU has the second one by now"
        );
        assert_eq!((flows.get(&3, 0).unwrap().bits(), flows.get(&4, 0).unwrap().bits()), (0, claimed));
        assert_eq!(view.free_claimed(&before).unwrap(), 0);
    });
}

/// Returns the CPU time of this thread so far, which does not depend on other load.
fn cpu_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Returns the kernel's jiffies as the view estimates them.
fn now(hz: u32) -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec.cast_unsigned() * u64::from(hz)) as u32 - 300 * hz
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn programs_are_found_by_link_and_by_filter_and_missed_when_gone() {
    on_node(|node| {
        let (v0, v1) = (veth("v0"), veth("v1"));
        let agent = node.start_with(PacketHook::Tcx);
        agent.attach_sockets().unwrap();
        agent.attach_device(v0, false).unwrap();
        agent.attach_device(v1, false).unwrap();
        let at = |hook: String| {
            let found = attachments(&node.bpffs).into_iter().find(|one| one.hook == hook);
            found.map(|one| (one.program, one.ifindex, one.place.clone(), one.is_attached()))
        };
        assert_eq!(attachments(&node.bpffs).len(), SOCKET_HOOKS.len() + 4);
        let tcx = format!("tcx_ingress_{v0}");
        assert_eq!(at(tcx.clone()), Some(("tc_ingress", Some(v0), Some("v0".into()), true)));
        run("ip link del v0");
        assert_eq!(at(tcx), Some(("tc_ingress", Some(v0), None, false)), "its device is gone");
        agent.detach_device(v0).unwrap();
        drop(agent);

        let agent = node.start_with(PacketHook::Clsact);
        agent.attach_device(v1, false).unwrap();
        let (ingress, egress) = (format!("clsact_ingress_{v1}"), format!("clsact_egress_{v1}"));
        assert_eq!(at(ingress.clone()), Some(("tc_ingress", Some(v1), Some("v1".into()), true)));
        assert_eq!(at(format!("tcx_ingress_{v1}")), None);
        run("tc filter del dev v1 ingress");
        assert_eq!(at(ingress.clone()), Some(("tc_ingress", Some(v1), Some("v1".into()), false)));
        assert_eq!(at(egress).map(|found| found.3), Some(true));
        run("ip link del v1");
        assert_eq!(at(ingress), Some(("tc_ingress", Some(v1), None, false)));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_dry_run_says_what_cleanup_does_and_does_nothing() {
    for hook in [PacketHook::Tcx, PacketHook::Clsact] {
        on_node(|node| {
            let device = veth("v0");
            let agent = node.start_with(hook);
            agent.attach_sockets().unwrap();
            agent.attach_device(device, false).unwrap();
            assert!(dry_run(&node.bpffs, None).is_err(), "as cleanup: an agent runs");
            drop(agent);
            // One link has lost its pin.
            std::fs::remove_file(node.ballast().join("links/sock_peer4")).unwrap();
            let before = attachments(&node.bpffs);
            let said = dry_run(&node.bpffs, Some(&node.cgroup)).unwrap();
            assert_eq!(attachments(&node.bpffs), before);
            assert!(node.ballast().join("services").exists());
            assert_eq!(dry_run(&node.bpffs, Some(&node.cgroup)).unwrap(), said);
            let done = cleanup(&node.bpffs, Some(&node.cgroup)).unwrap();
            assert_eq!(said, done);
            assert!(done.removed.len() > 10 && done.left.is_empty(), "{done:?}");
            assert_eq!(dry_run(&node.bpffs, Some(&node.cgroup)).unwrap(), Cleanup::default());
        });
    }
}
