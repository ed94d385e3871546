//! Whether packets that this node sends to the address of a Service are translated: a process of the node whose socket is not
//! translated reaches the Service only then. The routes alone do not show it: the next hop may be dead, and rules of netfilter may
//! drop packets to addresses of Services, which they never see while sockets are translated.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

/// `discard`: a port that hardly any Service has. At the port of a Service, the datagram proves nothing.
const PORT: u16 = 9;
/// How long an answer may take. The programs answer at once; only a busy machine, or one that has to ask for the next hop's MAC
/// address, takes longer than a tenth of a millisecond.
const LIMIT: Duration = Duration::from_millis(50);
/// How long a family in which there was no answer is not asked again.
const PAUSE: Duration = Duration::from_secs(10);
/// How long an answer counts for all addresses of the family: it shows the path of the node, and the programs answer 50 datagrams at
/// once, clients' included.
const COUNTS: Duration = Duration::from_secs(1);

/// The time of a question, and whether it was answered.
type Answer = (Instant, bool);

/// Asks the programs, by a datagram to a port that the Service does not have: they refuse it.
#[derive(Debug, Default)]
pub struct NodePath {
    /// The last answers, IPv4 and IPv6.
    last: [Option<Answer>; 2],
}

impl NodePath {
    /// Whether the programs have refused a datagram to this address of a Service, or to another one within the last second. Blocks for
    /// at most 50 ms, once in ten seconds for each family.
    pub fn is_translated(&mut self, address: IpAddr) -> bool {
        let [v4, v6] = &mut self.last;
        let last = if address.is_ipv4() { v4 } else { v6 };
        match *last {
            Some((at, answered)) if at.elapsed() < if answered { COUNTS } else { PAUSE } => answered,
            _ => {
                let is_refused = is_refused(address).unwrap_or_default();
                *last = Some((Instant::now(), is_refused));
                is_refused
            }
        }
    }
}

fn is_refused(address: IpAddr) -> io::Result<bool> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // A refusal of this call is one of the socket programs, which see no packet (`--socket-drop fail`).
    socket.connect((address, PORT))?;
    socket.set_read_timeout(Some(LIMIT))?;
    socket.send(&[])?;
    let answer = socket.recv(&mut [0; 1]);
    Ok(answer.is_err_and(|error| error.raw_os_error() == Some(libc::ECONNREFUSED)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_is_asked_again_after_its_pause() {
        let silent = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9));
        let Ok(_socket) = UdpSocket::bind((silent, PORT)) else { return };
        let mut path = NodePath::default();
        let closed = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert!(path.is_translated(closed), "a closed port refuses");
        assert!(path.is_translated(silent), "the answer counts for all addresses");
        path.last[0] = Instant::now().checked_sub(COUNTS).map(|at| (at, true));
        assert!(!path.is_translated(silent));
        assert!(!path.is_translated(closed), "it is not asked");
    }
}
