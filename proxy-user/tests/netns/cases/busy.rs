//! A busy client outside uses few source ports for connections through a Service, through its node port, and directly to the
//! endpoint, which is on this node. It also uses the ports that were chosen for it, as the endpoint has seen them. Connections
//! end by FIN or RST of either side, in any order, and their ports are used again at once. None may hang.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, SockRef, Socket, Type};

use super::exposed::open_up;
use super::held::{self, TARGETS, node_port};
use super::{Case, client_ip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use proxy_testbed::Family;
use proxy_testbed::manifest::{cluster_ip, pod_ip};

const WISH: Wish = Wish { pods: 1, services: &[], flags: SMALL };

pub const CASES: &[Case] = &[
    Case { name: "busy::a_source_port_that_the_endpoint_saw_can_be_reused", wish: WISH, run: chosen },
    Case {
        name: "busy::port_of_a_direct_connection_in_time_wait_connects_to_a_service_at_once",
        wish: WISH,
        run: after_direct,
    },
    Case {
        name: "busy::connections_work_with_few_ports_on_all_paths_in_any_order",
        wish: WISH,
        run: any_order,
    },
];

/// Longest time that a connection may take to answer: a SYN that meets another connection is sent again after one second.
const PATIENCE: Duration = Duration::from_secs(12);
/// Linux sends a SYN again after one second.
const BEFORE_RETRANSMIT: Duration = Duration::from_millis(800);
/// Duration of the random part, for each family.
const LASTS: Duration = Duration::from_secs(15);
/// Ports of the client; the others are those that the endpoint has seen.
const PORTS: [u16; 2] = [41_000, 41_001];
/// Number of connections that are open at the same time.
const OPEN: usize = 6;
/// Number of ports that the endpoint has seen, and that the client uses.
const SEEN: usize = 6;

/// Ways to end a connection.
const ENDS: [End; 4] = [End::ClientFin, End::ClientReset, End::ServerFin, End::ServerReset];

#[derive(Clone, Copy, Debug)]
enum End {
    ClientFin,
    ClientReset,
    ServerFin,
    ServerReset,
}

/// Requests to the server.
const WHO: u8 = b'?';
const CLOSE: u8 = b'F';
const RESET: u8 = b'R';

/// Accepts connections until `is_over` is set.
fn serve(listener: &TcpListener, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, from)) => drop(thread::spawn(move || answer(stream, from))),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Answers each request with the client's port.
fn answer(mut stream: TcpStream, from: SocketAddr) -> Option<()> {
    stream.set_nonblocking(false).ok()?;
    let mut request = [0];
    loop {
        stream.read_exact(&mut request).ok()?;
        match request[0] {
            WHO => stream.write_all(&from.port().to_be_bytes()).ok()?,
            RESET => {
                SockRef::from(&stream).set_linger(Some(Duration::ZERO)).ok()?;
                return None;
            }
            _ => return None,
        }
    }
}

/// An open connection of the client.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    port: u16,
    to: SocketAddr,
    /// The client's port, as the endpoint sees it.
    seen: u16,
}

impl Connection {
    /// Connects from a port, and asks the endpoint which port it sees. Returns `None` if the client's own kernel still has a
    /// connection with these ports.
    fn open(from: IpAddr, port: u16, to: SocketAddr) -> Result<Option<Self>> {
        let connect = || -> io::Result<TcpStream> {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::new(from, port).into())?;
            socket.connect_timeout(&to.into(), PATIENCE)?;
            Ok(socket.into())
        };
        let stream = match connect() {
            Err(error) if matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable) => {
                return Ok(None);
            }
            connected => connected.with_context(|| format!("{port} connects to {to}"))?,
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let mut connection = Self { stream, port, to, seen: 0 };
        connection.seen = connection.ask()?;
        Ok(Some(connection))
    }

    /// Returns the port that the endpoint sees.
    fn ask(&mut self) -> Result<u16> {
        let mut seen = [0; 2];
        let asked = self.stream.write_all(&[WHO]).and_then(|()| self.stream.read_exact(&mut seen));
        asked.with_context(|| format!("{} asks {}, as {}", self.port, self.to, self.seen))?;
        Ok(u16::from_be_bytes(seen))
    }

    fn is_still_answered(&mut self) -> Result<()> {
        let (before, seen) = (self.seen, self.ask()?);
        ensure!(seen == before, "{self:?} is answered as {seen}");
        Ok(())
    }

    fn end(mut self, how: End) -> Result<()> {
        let mut rest = [0];
        match how {
            End::ClientFin => self.stream.shutdown(Shutdown::Write)?,
            End::ClientReset => {
                SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))?;
                return Ok(());
            }
            End::ServerFin => self.stream.write_all(&[CLOSE])?,
            End::ServerReset => self.stream.write_all(&[RESET])?,
        }
        let read = self.stream.read(&mut rest);
        let is_right = match how {
            End::ServerReset => read.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset),
            _ => matches!(read, Ok(0)),
        };
        ensure!(is_right, "{self:?} ends by {how:?}: {read:?}");
        Ok(())
    }
}

/// Runs the client with a server in the pod.
fn run(fixture: &Fixture, client: fn(Family, [SocketAddr; 3]) -> Result<()>) -> Result<()> {
    open_up(fixture)?;
    held::put(fixture, &[(0, true)])?;
    for family in Family::BOTH {
        let endpoint: SocketAddr = (pod_ip(family, 0), TARGETS[0]).into();
        let paths = [(cluster_ip(family, held::NUMBER), 80).into(), node_port(family, true), endpoint];
        let listener = fixture.in_pod(0, || Ok(TcpListener::bind(endpoint)?))?;
        listener.set_nonblocking(true)?;
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| serve(&listener, &is_over));
            let run = || {
                for to in paths {
                    eventually(SOON, || {
                        fixture.client_space.inside(|| Connection::open(client_ip(family), 0, to).map(drop))
                    })?;
                }
                fixture.client_space.inside(|| client(family, paths))
            };
            let result = run();
            is_over.store(true, Ordering::Relaxed);
            result
        })?;
    }
    Ok(())
}

/// While a connection through the Service exists, a direct one from the same port gets another port at the endpoint. Both
/// end, and the client connects to the endpoint from that port.
fn chosen(fixture: &Fixture) -> Result<()> {
    run(fixture, |family, [cluster, node, direct]| {
        for (service, port) in [(cluster, 42_000), (node, 42_100)] {
            for (how, port) in ENDS.into_iter().zip(port..) {
                let open =
                    |port, to| Connection::open(client_ip(family), port, to)?.context("the ports are in use");
                let [first, second] = [open(port, service)?, open(port, direct)?];
                let chosen = second.seen;
                ensure!(first.seen == port && chosen != port, "{first:?} {second:?}");
                first.end(how)?;
                second.end(how)?;
                let mut third = open(chosen, direct)?;
                for _ in 0..10 {
                    third.is_still_answered().with_context(|| format!("after {how:?}"))?;
                }
                third.end(how)?;
            }
        }
        Ok(())
    })
}

/// The endpoint closes a direct connection first, and keeps a socket in `TIME_WAIT`. The client connects to the Service from the
/// same port: the endpoint answers the SYN with an ACK of the first connection, since the client's kernel derives the initial
/// number from the destination that it knows. Without timestamps, half of the SYNs have a number that the endpoint does not accept.
fn after_direct(fixture: &Fixture) -> Result<()> {
    fixture.client_space.sysctl("net/ipv4/tcp_timestamps", "0")?;
    run(fixture, |family, [cluster, node, direct]| {
        let mut moved = 0;
        for (service, first) in [(cluster, 43_000), (node, 43_100)] {
            for port in first..first + 20 {
                let open = |to| Connection::open(client_ip(family), port, to)?.context("the port is in use");
                open(direct)?.end(End::ServerFin)?;
                let begun = Instant::now();
                let connection = open(service)?;
                let took = begun.elapsed();
                ensure!(took < BEFORE_RETRANSMIT, "{connection:?} took {took:?}");
                moved += usize::from(connection.seen != port);
                connection.end(End::ClientFin)?;
            }
        }
        ensure!(moved > 0, "no endpoint has answered with an ACK");
        Ok(())
    })
}

/// A generator of random numbers, which a seed repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % limit
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

fn any_order(fixture: &Fixture) -> Result<()> {
    run(fixture, |family, paths| {
        let seed = u64::from(std::process::id());
        in_any_order(family, paths, &mut Random(seed)).with_context(|| format!("{family:?}, seed {seed}"))
    })
}

fn in_any_order(family: Family, paths: [SocketAddr; 3], random: &mut Random) -> Result<()> {
    let (mut open, mut seen) = (Vec::<Connection>::new(), VecDeque::new());
    let (mut opened, mut moved, mut from_seen, begun) = (0, 0, 0, Instant::now());
    while begun.elapsed() < LASTS {
        if open.len() < OPEN && random.below(3) != 0 {
            let ports: Vec<u16> = PORTS.into_iter().chain(seen.iter().copied()).collect();
            let (port, to) = (random.pick(&ports), random.pick(&paths));
            let Some(connection) = Connection::open(client_ip(family), port, to)? else { continue };
            (opened, from_seen) = (opened + 1, from_seen + usize::from(!PORTS.contains(&port)));
            if connection.seen != port {
                moved += 1;
                seen.push_back(connection.seen);
                if seen.len() > SEEN {
                    seen.pop_front();
                }
            }
            open.push(connection);
        } else if !open.is_empty() {
            let at = random.below(open.len());
            if random.below(2) == 0 {
                open[at].is_still_answered()?;
            } else {
                open.swap_remove(at).end(random.pick(&ENDS))?;
            }
        }
    }
    open.iter_mut().try_for_each(Connection::is_still_answered)?;
    ensure!(
        opened > 50 && moved > 5 && from_seen > 10,
        "{opened} connections, {moved} of them as another port, {from_seen} from such a port"
    );
    Ok(())
}
