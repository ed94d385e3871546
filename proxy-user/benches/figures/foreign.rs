//! Traffic between two pods that uses no Service, through a node with the packet programs on the pods' devices and through
//! a node without them.
//!
//! ```text
//! pod eth0 10.98.0.2 --- c0 node p0 --- eth0 10.99.0.2 pod
//! ```
//!
//! A third node runs an empty program on the same hooks, which shows the cost of any tc program. The benchmark measures the
//! nodes in turn; each round gives the ratios of consecutive measurements. If a packet socket is open on the node (as with
//! `tcpdump`), every packet that a program sees is a clone.
//!
//! The same traffic is measured to an endpoint: a socket program has translated such a connection, or the client connects to
//! the endpoint itself. No packet of it is translated.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aya::programs::{SchedClassifier, TcAttachType};
use proxy_core::store::Store as _;
use proxy_user::host::devices;
use proxy_user::maps::KernelStore;
use proxy_user::programs::{
    Capacities, ClsactPriority, EMBEDDED, PacketHook, Programs, Settings, TcxOrder, Xdp, cleanup,
};
use socket2::{Domain, Protocol, Socket, Type};

use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Service};
use proxy_testbed::one_cpu::OneCpu;
use proxy_testbed::packet::{TCP, UDP};
use proxy_testbed::report::{Row, Sample, median};
use proxy_testbed::space::Space;

const POD: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
const SINK: u16 = 8080;
const ECHO: u16 = 8081;
/// Ports of the same servers as endpoints of a Service, and of a server of UDP.
const ENDPOINT_SINK: u16 = 8082;
const ENDPOINT_ECHO: u16 = 8083;
const ENDPOINT_UDP: u16 = 8084;
/// Services in the maps, so that the prefilter is not empty.
const SERVICES: u32 = 1000;
/// Rounds of bulk traffic, and the duration of each measurement in them.
const BULK_ROUNDS: usize = 40;
const BULK: Duration = Duration::from_millis(250);
/// Rounds of requests, and requests in each measurement.
const ASK_ROUNDS: usize = 100;
const ASKS: usize = 250;
/// `ETH_P_ALL` (`uapi/linux/if_ether.h`).
const ETH_P_ALL: u16 = 3;

/// The devices of a node: to the client, and to the other pod.
const DEVICES: [&str; 2] = ["c0", "p0"];
/// Nodes: without programs, with an empty program, with ours.
const SIDES: usize = 3;

/// Bytes that the sinks have read.
static RECEIVED: AtomicU64 = AtomicU64::new(0);

/// Two pods and the node between them.
struct Node {
    space: Space,
    client: Space,
    _server: Space,
}

impl Node {
    fn new() -> Self {
        let [space, client, server] = ["node", "client", "server"].map(|name| Space::new(name).unwrap());
        let [to_client, to_server] = DEVICES;
        space.join(&client, to_client, "10.98.0", "fd98:").unwrap();
        space.join(&server, to_server, "10.99.0", "fd99:").unwrap();
        let listen = |port| server.inside(|| Ok(TcpListener::bind((POD, port))?)).unwrap();
        for sink in [SINK, ENDPOINT_SINK].map(listen) {
            thread::spawn(move || sink.incoming().for_each(|stream| read_all(stream.unwrap())));
        }
        for echo in [ECHO, ENDPOINT_ECHO].map(listen) {
            thread::spawn(move || echo.incoming().for_each(|stream| answer(stream.unwrap())));
        }
        let datagrams = server.inside(|| Ok(UdpSocket::bind((POD, ENDPOINT_UDP))?)).unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((length, from)) = datagrams.recv_from(&mut buffer) {
                let _ = datagrams.send_to(&buffer[..length], from);
            }
        });
        Self { space, client, _server: server }
    }

    fn connect(&self, port: u16) -> TcpStream {
        let stream = self.client.inside(|| Ok(TcpStream::connect((POD, port))?)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Node {
    fn udp(&self) -> UdpSocket {
        let socket = self.client.inside(|| Ok(UdpSocket::bind(("0.0.0.0", 0))?)).unwrap();
        socket.connect((POD, ENDPOINT_UDP)).unwrap();
        socket
    }
}

fn read_all(mut stream: TcpStream) {
    thread::spawn(move || {
        let mut buffer = vec![0; 256 << 10];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            RECEIVED.fetch_add(length as u64, Ordering::Relaxed);
        }
    });
}

fn answer(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            let _ = stream.write_all(&buffer[..length]);
        }
    });
}

/// The packet programs on both devices of a node, and maps with Services.
struct Attached {
    bpffs: PathBuf,
    cgroup: PathBuf,
    programs: Option<Programs>,
}

impl Attached {
    fn new(bpffs: &Path, node: &Node) -> Self {
        let root = proxy_user::host::cgroup::find(None).unwrap().path;
        let cgroup = root.join(format!("ballast-bench-foreign-{}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let bpffs = bpffs.join("foreign");
        fs::create_dir(&bpffs).unwrap();
        let settings = Settings {
            object: EMBEDDED,
            bpffs: bpffs.clone(),
            cgroup: cgroup.clone(),
            capacities: Capacities::default(),
            packet_hook: PacketHook::Auto,
            tcx_order: TcxOrder::default(),
            clsact_priority: ClsactPriority::default(),
            xdp: Xdp::Off,
        };
        let programs = Programs::start(&settings).unwrap();
        let service = |id: u32| {
            let [frontend, pod] = [Family::V4.frontend(id as u16, 80), Family::V4.pod(id as u16, 8080)];
            Service::new(id, TCP, frontend, &[pod]).writes()
        };
        let endpoint = |(id, proto, port): (u32, u8, u16)| {
            let frontend = Family::V4.frontend(id as u16, 80);
            Service::new(id, proto, frontend, &[(POD, port).into()]).writes()
        };
        let endpoints = [(TCP, ENDPOINT_SINK), (TCP, ENDPOINT_ECHO), (UDP, ENDPOINT_UDP)];
        let endpoints = (SERVICES + 1..).zip(endpoints).map(|(id, (proto, port))| (id, proto, port));
        let writes: Vec<_> = (1..=SERVICES).flat_map(service).chain(endpoints.flat_map(endpoint)).collect();
        KernelStore::open(&programs.pin_dir()).unwrap().write(&writes).unwrap();
        node.space
            .inside(|| {
                for device in devices::list()? {
                    if DEVICES.contains(&device.name.as_str()) {
                        programs.attach_device(device.ifindex, false)?;
                    }
                }
                Ok(())
            })
            .unwrap();
        Self { bpffs, cgroup, programs: Some(programs) }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.programs = None;
        let _ = cleanup(&self.bpffs, Some(&self.cgroup));
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Attaches an empty program to both hooks of both devices of a node, as long as the harness exists.
fn attach_empty(bpffs: &Path, node: &Node) -> Harness {
    let mut harness = Harness::new(bpffs, 64);
    let program: &mut SchedClassifier = harness.ebpf.program_mut("nop").unwrap().try_into().unwrap();
    node.space
        .inside(|| {
            for device in DEVICES {
                for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
                    program.attach(device, hook)?;
                }
            }
            Ok(())
        })
        .unwrap();
    harness
}

/// Sends bulk traffic, and returns the nanoseconds per byte.
fn bulk(stream: &mut TcpStream) -> f64 {
    let buffer = vec![0; 64 << 10];
    let (begun, before) = (Instant::now(), RECEIVED.load(Ordering::Relaxed));
    while begun.elapsed() < BULK {
        stream.write_all(&buffer).unwrap();
    }
    let (time, after) = (begun.elapsed(), RECEIVED.load(Ordering::Relaxed));
    // Bytes that are still in flight must not be counted for the next node.
    thread::sleep(Duration::from_millis(5));
    time.as_nanos() as f64 / (after - before) as f64
}

/// Returns the microseconds of the median request.
fn ask(mut request: impl FnMut()) -> f64 {
    let one = |_| {
        let begun = Instant::now();
        request();
        begun.elapsed().as_nanos() as f64 / 1e3
    };
    median((0..ASKS).map(one).collect())
}

fn ask_tcp(stream: &mut TcpStream) {
    stream.write_all(b"?").unwrap();
    stream.read_exact(&mut [0]).unwrap();
}

fn ask_udp(socket: &UdpSocket) {
    socket.send(b"?").unwrap();
    socket.recv(&mut [0]).unwrap();
}

/// Results of the node without programs, the ratios of the other nodes to it, and of ours to the one with an empty program.
struct Compared {
    bare: Sample,
    empty: Sample,
    ours: Sample,
    ours_to_empty: Sample,
}

fn compare(rounds: usize, mut measure: impl FnMut(usize) -> f64) -> Compared {
    let (mut bare, mut ratios) = (Vec::new(), [const { Vec::new() }; 3]);
    for round in 0..rounds {
        let mut times = [0.0; SIDES];
        for at in 0..SIDES {
            let side = (round + at) % SIDES;
            times[side] = measure(side);
        }
        bare.push(times[0]);
        let [none, empty, ours] = times;
        for (ratios, ratio) in ratios.iter_mut().zip([empty / none, ours / none, ours / empty]) {
            ratios.push(ratio);
        }
    }
    let [empty, ours, ours_to_empty] = ratios.map(Sample::median);
    Compared { bare: Sample::median(bare), empty, ours, ours_to_empty }
}

/// As long as this exists, a packet socket receives the first bytes of each packet on all devices of a node.
struct Capture(Vec<thread::JoinHandle<()>>);

static CAPTURES: AtomicBool = AtomicBool::new(false);

impl Capture {
    fn start(nodes: &[Node; SIDES]) -> Self {
        CAPTURES.store(true, Ordering::Relaxed);
        let open = |node: &Node| {
            let protocol = Protocol::from(i32::from(ETH_P_ALL.to_be()));
            let socket =
                node.space.inside(|| Ok(Socket::new(Domain::PACKET, Type::RAW, Some(protocol))?)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            thread::spawn(move || {
                let mut buffer = [std::mem::MaybeUninit::uninit(); 96];
                while CAPTURES.load(Ordering::Relaxed) {
                    let _ = socket.recv(&mut buffer);
                }
            })
        };
        Self(nodes.iter().map(open).collect())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        CAPTURES.store(false, Ordering::Relaxed);
        self.0.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn rows(nodes: &[Node; SIDES], how: &str) -> Vec<Row> {
    let row = |what: String, value: Sample, unit, target| {
        Row::new("Foreign traffic, IPv4", what, value, unit, target)
    };
    let rate = |time: f64| 8.0 / time;
    let bulk_rate = |byte: Sample| Sample {
        value: rate(byte.value),
        quartiles: byte.quartiles.map(|[low, high]| [rate(high), rate(low)]),
    };
    let ratios = |what: &str, Compared { empty, ours, .. }: &Compared| {
        [
            row(format!("{what}, with programs to without{how}"), *ours, "x", Some(1.01)),
            row(format!("{what}, with an empty program to none{how}"), *empty, "x", None),
        ]
    };
    let mut streams = [0, 1, 2].map(|side: usize| nodes[side].connect(SINK));
    let byte = compare(BULK_ROUNDS, |side| bulk(&mut streams[side]));
    let mut echoes = [0, 1, 2].map(|side: usize| nodes[side].connect(ECHO));
    let request = compare(ASK_ROUNDS, |side| ask(|| ask_tcp(&mut echoes[side])));
    let mut all = vec![row(format!("bulk TCP, no programs{how}"), bulk_rate(byte.bare), "Gbit/s", None)];
    all.extend(ratios("time for a byte", &byte));
    all.push(row(format!("request and response, no programs{how}"), request.bare, "us", None));
    all.extend(ratios("request and response", &request));
    all
}

/// Returns the rows of traffic to an endpoint that no program translates, beside an empty program.
fn endpoint_rows(nodes: &[Node; SIDES], how: &str) -> Vec<Row> {
    let row = |what: &str, compared: &Compared| {
        let what = format!("{what}, to an empty program{how}");
        Row::new("To an endpoint, not translated, IPv4", what, compared.ours_to_empty, "x", Some(1.02))
    };
    let sides = [0, 1, 2];
    let mut streams = sides.map(|side: usize| nodes[side].connect(ENDPOINT_SINK));
    let mut echoes = sides.map(|side: usize| nodes[side].connect(ENDPOINT_ECHO));
    let sockets = sides.map(|side: usize| nodes[side].udp());
    vec![
        row("time for a byte of TCP", &compare(BULK_ROUNDS, |side| bulk(&mut streams[side]))),
        row(
            "request and reply of a socket-translated connection",
            &compare(ASK_ROUNDS, |side| ask(|| ask_tcp(&mut echoes[side]))),
        ),
        row("request and reply, UDP", &compare(ASK_ROUNDS, |side| ask(|| ask_udp(&sockets[side])))),
    ]
}

/// Measures all figures of this file.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    let _pinned = OneCpu::pin();
    let nodes = [Node::new(), Node::new(), Node::new()];
    let _empty = attach_empty(bpffs, &nodes[1]);
    let _attached = Attached::new(bpffs, &nodes[2]);
    let mut all = rows(&nodes, "");
    all.extend(endpoint_rows(&nodes, ""));
    let capture = Capture::start(&nodes);
    all.extend(rows(&nodes, ", packets captured"));
    all.extend(endpoint_rows(&nodes, ", packets captured"));
    drop(capture);
    all
}
