//! Forged packets aimed at live TCP connections: resets, FINs and ICMP errors of an attacker who knows their addresses.
//!
//! To add a forgery, add a row to [`OUT_OF_WINDOW`] or [`IN_WINDOW`] and to [`Connection::forge`], or a case if the
//! connection may end.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use socket2::{Domain, Socket, Type};

use super::attack::{Scene, few_flows};
use super::{Case, client_ip, held};
use crate::fixture::{Fixture, Wish};
use crate::peer::tcp_info;
use crate::raw::{self, ACK, FIN, RST, Segment, Wire};
use proxy_testbed::Family;
use proxy_testbed::manifest::pod_ip;

const WISH: Wish = few_flows!();

pub const CASES: &[Case] = &[
    Case {
        name: "forged::resets_and_fins_out_of_the_window_change_nothing",
        wish: few_flows!("--flow-timeout-tcp-close", "5s", "--flow-timeout-tcp-time-wait", "5s"),
        run: |fixture| continue_after(fixture, &OUT_OF_WINDOW),
    },
    Case {
        name: "forged::a_reset_in_the_window_ends_no_connection",
        wish: WISH,
        run: |fixture| continue_after(fixture, &IN_WINDOW),
    },
    Case { name: "forged::a_reset_that_fits_ends_the_connection", wish: WISH, run: believed },
    Case { name: "forged::icmp_errors_end_no_connection", wish: WISH, run: icmp_errors },
];

/// Number of connections of each kind: a single one could be with the right one of two endpoints by chance.
const EACH: usize = 6;
/// How long the connections are silent after a forged segment: longer than the timeouts of a closed flow in the first case.
const SILENCE: Duration = Duration::from_secs(11);

/// A connection of the client, whose socket is in this process.
struct Connection {
    stream: TcpStream,
    /// Name of the server that answers.
    server: String,
    from: SocketAddr,
    to: SocketAddr,
    /// The forgery that is sent for this connection.
    what: &'static str,
}

impl Connection {
    fn open(fixture: &Fixture, family: Family, what: &'static str) -> Result<Self> {
        let to = held::node_port(family, true);
        let stream: TcpStream = fixture.client_space.inside(|| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            // connect() alone can take a port that another connection has to another address, which is then in use for bind().
            socket.bind(&SocketAddr::new(family.unspecified(), 0).into())?;
            socket.connect_timeout(&to.into(), Duration::from_secs(30))?;
            Ok(socket.into())
        })?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let from = stream.local_addr()?;
        let mut connection = Self { stream, server: String::new(), from, to, what };
        connection.server = connection.ask()?;
        Ok(connection)
    }

    fn ask(&mut self) -> Result<String> {
        self.stream.write_all(b"hello\n")?;
        let mut text = String::new();
        BufReader::new(&self.stream).read_line(&mut text)?;
        Ok(text.split_once('|').with_context(|| format!("answer {text:?}"))?.0.to_owned())
    }

    /// Sends the forgery of this connection.
    fn forge(&self, scene: &Scene<'_>, endpoints: &[Wire]) -> Result<()> {
        let (sends, expects) = tcp_info::sequences(&self.stream).context("TCP_REPAIR")?;
        let far = sends.wrapping_add(0x4000_0000);
        let ours = Segment { from: self.from, to: self.to, flags: RST, seq: far, ack: expects };
        let family = Family::of(self.to.ip());
        let pod: u8 = self.server.parse()?;
        let answers = expects.wrapping_add(0x4000_0000);
        let theirs = Segment {
            from: (pod_ip(family, pod), held::TARGETS[0]).into(),
            to: self.from,
            flags: RST,
            seq: answers,
            ack: sends,
        };
        let endpoint = &endpoints[usize::from(pod)];
        match self.what {
            "nothing" => Ok(()),
            "client's reset out of window" => scene.wire.send(&ours.packet()),
            "client's reset in the window" => {
                scene.wire.send(&Segment { seq: sends.wrapping_add(100), ..ours }.packet())
            }
            "client's FIN out of window" => scene.wire.send(&Segment { flags: FIN | ACK, ..ours }.packet()),
            "endpoint's reset out of window" => endpoint.send(&theirs.packet()),
            "both ends' FINs out of window" => {
                scene.wire.send(&Segment { flags: FIN | ACK, ..ours }.packet())?;
                endpoint.send(&Segment { flags: FIN | ACK, ..theirs }.packet())
            }
            other => bail!("unknown forgery {other}"),
        }
    }
}

/// Segments that change nothing in Ballast.
const OUT_OF_WINDOW: [&str; 5] = [
    "nothing",
    "client's reset out of window",
    "client's FIN out of window",
    "endpoint's reset out of window",
    "both ends' FINs out of window",
];
/// Segments that Ballast believes, and the endpoint does not: the flow stays for `tcp-close`, and the next segment of the sender
/// removes the mark of the reset.
const IN_WINDOW: [&str; 1] = ["client's reset in the window"];

/// Returns senders from each endpoint's pod to the node.
fn endpoints(fixture: &Fixture) -> Result<Vec<Wire>> {
    [0, 1]
        .into_iter()
        .map(|pod: u8| {
            fixture.in_pod_space(pod, |space| Wire::new(space, "eth0", (&fixture.node, &format!("p{pod}"))))
        })
        .collect()
}

/// Checks that both ends discard or challenge such segments, and that the connection continues after a silence.
fn continue_after(fixture: &Fixture, forgeries: &[&'static str]) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true), (1, true)], 50)?;
    let endpoints = endpoints(fixture)?;
    let mut connections = Vec::new();
    for family in Family::BOTH {
        for what in forgeries {
            for _ in 0..EACH {
                connections.push(Connection::open(fixture, family, what)?);
            }
        }
    }
    connections.iter().try_for_each(|connection| connection.forge(&scene, &endpoints))?;
    std::thread::sleep(SILENCE);
    let mut wrong = Vec::new();
    for connection in &mut connections {
        let answer = connection.ask();
        if answer.as_ref().ok() != Some(&connection.server) {
            let Connection { what, from, server, .. } = connection;
            let answer = answer.map_err(|error| error.to_string());
            wrong.push(format!("{what}: {from} with endpoint {server} had {answer:?}"));
        }
    }
    ensure!(wrong.is_empty(), "{} of {} lost:\n{}", wrong.len(), connections.len(), wrong.join("\n"));
    held::nothing_is_lost(fixture, "after forged segments").map(drop)
}

/// Checks that a RST with the right sequence number ends the connection, and that its client port can be used again.
fn believed(fixture: &Fixture) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true), (1, true)], 50)?;
    for family in Family::BOTH {
        for round in 0..EACH {
            let mut connection = Connection::open(fixture, family, "nothing")?;
            let (seq, ack) = tcp_info::sequences(&connection.stream)?;
            let Connection { from, to, .. } = connection;
            scene.wire.send(&Segment { from, to, flags: RST, seq, ack }.packet())?;
            let answer = connection.ask();
            let error = answer.as_ref().err().and_then(|error| error.downcast_ref::<std::io::Error>());
            let errno = error.and_then(std::io::Error::raw_os_error);
            ensure!(errno == Some(libc::ECONNRESET), "{family:?}: the endpoint has not reset: {answer:?}");
            drop(connection);
            let again = crate::peer::Attempt::new(crate::peer::SocketKind::Tcp, to).at_port(from.port());
            let seen =
                fixture.client.reach(again).with_context(|| format!("{family:?}, round {round}: again"))?;
            ensure!(seen.syn_retransmits == 0, "{family:?}: a SYN of the new connection was lost");
        }
    }
    held::nothing_is_lost(fixture, "after resets of others").map(drop)
}

/// Sends errors about replies of each connection from an unknown router, and errors about connections that do not exist.
fn icmp_errors(fixture: &Fixture) -> Result<()> {
    let scene = Scene::new(fixture, &[(0, true), (1, true)], 50)?;
    let mut connections = Vec::new();
    for family in Family::BOTH {
        let (router, kinds): (&str, [(u8, u8); 5]) = match family {
            Family::V4 => ("198.18.0.1", [(3, 3), (3, 1), (3, 4), (11, 0), (12, 0)]),
            Family::V6 => ("2001:db8::1", [(1, 4), (1, 0), (2, 0), (3, 0), (4, 0)]),
        };
        let router: IpAddr = router.parse()?;
        // Only "too big" errors use the MTU; the other errors ignore it.
        let mtu = if family == Family::V4 { 576 } else { 1280 };
        let node = held::node_port(family, true);
        for _ in 0..2 * EACH {
            let connection = Connection::open(fixture, family, "nothing")?;
            let (_, expects) = tcp_info::sequences(&connection.stream)?;
            for kind in kinds {
                for seq in [expects.wrapping_add(0x4000_0000), expects.wrapping_sub(1)] {
                    let reply = Segment { from: node, to: connection.from, flags: ACK, seq, ack: 1 };
                    scene.wire.send(&raw::icmp_error(router, node.ip(), kind, mtu, &reply.packet()))?;
                }
            }
            connections.push(connection);
        }
        for number in 0..200 {
            let unknown = (client_ip(family), 50_000 + number).into();
            let reply = Segment { from: node, to: unknown, flags: ACK, seq: 1, ack: 1 };
            let kind = kinds[usize::from(number) % kinds.len()];
            scene.wire.send(&raw::icmp_error(router, node.ip(), kind, mtu, &reply.packet()))?;
        }
    }
    for connection in &mut connections {
        let answer = connection.ask();
        ensure!(answer.as_ref().ok() == Some(&connection.server), "{}: {answer:?}", connection.from);
    }
    held::nothing_is_lost(fixture, "after ICMP errors").map(drop)
}
