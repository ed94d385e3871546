//! The socket hooks, with real sockets: a client in this netns and this cgroup, a server in another netns behind a veth
//! pair. Sides that are compared are measured in blocks, in the order ABBA.

use std::fs;
use std::io::{Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use proxy_core::store::Store as _;
use proxy_user::maps::KernelStore;
use proxy_user::programs::{
    Capacities, ClsactPriority, EMBEDDED, PacketHook, Programs, Settings, TcxOrder, Xdp, cleanup,
};
use rustix::net::{AddressFamily, SocketType, sockopt};

use proxy_testbed::harness::Service;
use proxy_testbed::one_cpu::OneCpu;
use proxy_testbed::packet::{TCP, UDP};
use proxy_testbed::report::{Row, Sample};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
const FRONTEND: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Ports of the server: it accepts and closes connections at the first, and echoes TCP and UDP at the second.
const ACCEPT: u16 = 8080;
const ECHO: u16 = 8081;
/// Measurements in a block, and number of blocks for each side.
const BLOCK: usize = 250;
const BLOCKS: usize = 100;

static ACCEPTED: AtomicU32 = AtomicU32::new(0);

/// A cgroup with our programs, and this process after [`Node::join`].
struct Node {
    bpffs: PathBuf,
    root: PathBuf,
    cgroup: PathBuf,
    programs: Option<Programs>,
}

impl Node {
    /// Attaches the programs to a new cgroup; [`Node::join`] moves this process into it.
    fn new(bpffs: &Path, connect_latency: bool) -> Self {
        let bpffs = &bpffs.join(if connect_latency { "sockets-latency" } else { "sockets" });
        fs::create_dir(bpffs).unwrap();
        let root = proxy_user::host::cgroup::find(None).unwrap().path;
        let cgroup = root.join(format!("ballast-bench-{}-{connect_latency}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let settings = Settings {
            object: EMBEDDED,
            bpffs: bpffs.to_owned(),
            cgroup: cgroup.clone(),
            capacities: Capacities { connect_latency, ..Capacities::default() },
            packet_hook: PacketHook::Auto,
            tcx_order: TcxOrder::default(),
            clsact_priority: ClsactPriority::default(),
            xdp: Xdp::default(),
        };
        let programs = Programs::start(&settings).unwrap();
        let service = |id, proto, port, to| {
            let [frontend, pod] = [(FRONTEND, port), (SERVER, to)].map(SocketAddr::from);
            Service::new(id, proto, frontend, &[pod])
        };
        let services = [service(1, TCP, 80, ACCEPT), service(2, TCP, 81, ECHO), service(3, UDP, 81, ECHO)];
        let writes: Vec<_> = services.iter().flat_map(Service::writes).collect();
        KernelStore::open(&programs.pin_dir()).unwrap().write(&writes).unwrap();
        programs.attach_sockets().unwrap();
        Self { bpffs: bpffs.clone(), root, cgroup, programs: Some(programs) }
    }

    /// Moves this process into the cgroup with the hooks, or out of it.
    fn join(&self, hooked: bool) {
        let cgroup = if hooked { &self.cgroup } else { &self.root };
        fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.join(false);
        self.programs = None;
        let _ = cleanup(&self.bpffs, Some(&self.cgroup));
        let _ = fs::remove_dir(&self.cgroup);
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Accepts connections and closes them, for ever; [`connects`] relies on this.
pub fn accept_all(listener: TcpListener) {
    rustix::net::listen(&listener, 4096).unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            drop(stream);
            ACCEPTED.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Starts the server in its own netns, and connects it by a veth pair.
fn serve() {
    let (ready, is_ready) = mpsc::channel();
    let (connect, is_connected) = mpsc::channel::<()>();
    thread::spawn(move || {
        // SAFETY: only this thread, and the threads that it starts, change their network namespace.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
        ready.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
        is_connected.recv().unwrap();
        ip("link set lo up");
        ip(&format!("addr add {SERVER}/24 dev bench1"));
        ip("link set bench1 up");
        let accept = TcpListener::bind((SERVER, ACCEPT)).unwrap();
        let echo = TcpListener::bind((SERVER, ECHO)).unwrap();
        let udp = UdpSocket::bind((SERVER, ECHO)).unwrap();
        accept_all(accept);
        thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((length, from)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(&buffer[..length], from);
            }
        });
        ready.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
        while let Ok((mut stream, _)) = echo.accept() {
            thread::spawn(move || {
                stream.set_nodelay(true).unwrap();
                let mut buffer = [0; 64];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    let _ = stream.write_all(&buffer[..length]);
                }
            });
        }
    });
    let server = is_ready.recv().unwrap();
    ip("link set lo up");
    ip(&format!("link add bench0 type veth peer name bench1 netns {server}"));
    ip(&format!("addr add {CLIENT}/24 dev bench0"));
    ip("link set bench0 up");
    connect.send(()).unwrap();
    is_ready.recv().unwrap();
}

/// Returns the microseconds of one connect(2); the connection is reset, so that its port is free at once.
fn connect(to: SocketAddrV4) -> f64 {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    let begun = Instant::now();
    rustix::net::connect(&socket, &to).unwrap();
    begun.elapsed().as_nanos() as f64 / 1e3
}

/// Returns the microseconds of each connection of a block to a listener of [`accept_all`].
pub fn connects(to: SocketAddrV4) -> Vec<f64> {
    let before = ACCEPTED.load(Ordering::Relaxed);
    let times = (0..BLOCK).map(|_| connect(to)).collect();
    // The next block must not find a full accept queue; a reset may remove a connection from it.
    let end = Instant::now() + Duration::from_millis(50);
    while ACCEPTED.load(Ordering::Relaxed).wrapping_sub(before) < BLOCK as u32 && Instant::now() < end {
        thread::yield_now();
    }
    times
}

fn ask(stream: &mut TcpStream) -> f64 {
    let begun = Instant::now();
    stream.write_all(b"?").unwrap();
    stream.read_exact(&mut [0]).unwrap();
    begun.elapsed().as_nanos() as f64 / 1e3
}

fn ask_udp(socket: &UdpSocket, to: SocketAddrV4) -> f64 {
    let begun = Instant::now();
    socket.send_to(b"?", to).unwrap();
    let (_, from) = socket.recv_from(&mut [0; 8]).unwrap();
    let time = begun.elapsed().as_nanos() as f64 / 1e3;
    assert_eq!(from, SocketAddr::from(to), "the reply comes from where the question went");
    time
}

/// Returns the median of each side, which `block` measures in the order ABBA.
pub fn alternate<const SIDES: usize>(mut block: impl FnMut(usize) -> Vec<f64>) -> [Sample; SIDES] {
    let mut times = [const { Vec::new() }; SIDES];
    for round in 0..BLOCKS {
        for at in 0..SIDES {
            let side = if round % 2 == 0 { at } else { SIDES - 1 - at };
            times[side].extend(block(side));
        }
    }
    times.map(Sample::median)
}

/// Measures all figures of this file.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    let _pinned = OneCpu::pin();
    serve();
    let [node, measured] = [false, true].map(|connect_latency| Node::new(bpffs, connect_latency));
    let pod = |port| SocketAddrV4::new(SERVER, port);
    let frontend = |port| SocketAddrV4::new(FRONTEND, port);

    let [bare, direct, through, with_latency] = alternate(|side| {
        if side == 3 {
            measured.join(true);
        } else {
            node.join(side != 0);
        }
        connects(if side >= 2 { frontend(80) } else { pod(ACCEPT) })
    });
    node.join(true);
    let mut streams = [pod(ECHO), frontend(81)].map(|to| TcpStream::connect(to).unwrap());
    for stream in &streams {
        stream.set_nodelay(true).unwrap();
    }
    let [ask_direct, ask_through] = alternate(|side| (0..BLOCK).map(|_| ask(&mut streams[side])).collect());
    let sockets = [0, 1].map(|_| UdpSocket::bind((CLIENT, 0)).unwrap());
    let targets = [pod(ECHO), frontend(81)];
    let [udp_direct, udp_through] =
        alternate(|side| (0..BLOCK).map(|_| ask_udp(&sockets[side], targets[side])).collect());

    let row = |what: &str, value: Sample, unit, target| Row::new("Sockets, IPv4", what, value, unit, target);
    let ratio = |one: Sample, other: Sample| Sample::from(one.value / other.value);
    // Converts microseconds to nanoseconds.
    let cost = |one: Sample, other: Sample| Sample::from((one.value - other.value) * 1e3);
    vec![
        row("TCP connect to the pod, no hooks", bare, "us", None),
        row("TCP connect to the pod", direct, "us", None),
        row("TCP connect through the ClusterIP", through, "us", None),
        row("TCP connect, ClusterIP to pod", ratio(through, direct), "x", Some(1.01)),
        row("cost of the hook to others' connects", cost(direct, bare), "ns", None),
        row("cost of the hook to our connects", cost(through, bare), "ns", None),
        row("--connect-latency adds to our connects", cost(with_latency, through), "ns", None),
        row("request and response, pod", ask_direct, "us", None),
        row("request and response, ClusterIP to pod", ratio(ask_through, ask_direct), "x", None),
        row("UDP sendto and recvfrom, pod", udp_direct, "us", None),
        row("UDP sendto and recvfrom, ClusterIP to pod", ratio(udp_through, udp_direct), "x", None),
    ]
}
