//! The way back to netfilter: moves connections that Ballast's packet programs translate to `nf_conntrack`.
//!
//! A program translates a packet before conntrack sees it, so conntrack knows these connections by the endpoint's
//! address, if at all. Without the program, conntrack would see packets to the Service in the middle of a connection,
//! create a new entry and select an endpoint again; and replies would leave with the endpoint's address. Each
//! connection therefore needs an entry with its translation, as netfilter would have created it; and no packet of the
//! connection may pass between the last one that the program translates and the creation of this entry.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rtnetlink::packet_core::NLM_F_ACK;
use rtnetlink::sys::Socket;

use super::connections::{
    ADDRESSES, IS_ASSURED, IS_CONFIRMED, NUMBER, ORIGINAL, PORT_TO, PROTOCOL, SEEN_REPLY, STATE, STATUS,
    V4_TO, V6_TO,
};
use super::expressions::drop_unknown_tcp;
use super::message::{self, CONNTRACK, IPV4, IPV6, Message, NESTED, TCP, nested, transact_by};
use super::rules::{APPEND, CREATE, base_chain, new_own_table, rule_of};
use crate::host::netlink::Netlink;

/// `NFPROTO_INET`: both families.
const BOTH_FAMILIES: u8 = 1;
const TABLE: &str = "ballast-handover";
/// `NF_INET_PRE_ROUTING`; after conntrack (-200), before all translations (-100).
const HOOK: (&str, u32, i32) = ("standstill", 0, -150);

/// `IPCTNL_MSG_CT_NEW`, `IPCTNL_MSG_CT_DELETE`; `NLM_F_CREATE | NLM_F_EXCL`.
const NEW: u16 = 0;
const DELETE: u16 = 2;
const CREATE_ONLY: u16 = 0x600;
/// `CTA_TUPLE_REPLY`, `CTA_NAT_SRC`, `CTA_TIMEOUT`, `CTA_NAT_DST`.
const REPLY: u16 = 2;
const NAT_SOURCE: u16 = 6;
const TIMEOUT: u16 = 7;
const NAT_DESTINATION: u16 = 13;
/// `CTA_IP_V4_SRC`, `CTA_IP_V6_SRC`, `CTA_PROTO_SRC_PORT`.
const V4_FROM: u16 = 1;
const V6_FROM: u16 = 3;
const PORT_FROM: u16 = 2;
/// `CTA_NAT_V4_MINIP`, `CTA_NAT_V6_MINIP`, `CTA_NAT_PROTO` with `CTA_PROTONAT_PORT_MIN` and `_MAX`.
const NAT_V4: u16 = 1;
const NAT_V6: u16 = 4;
const NAT_PROTOCOL: u16 = 3;
const NAT_PORTS: [u16; 2] = [1, 2];
/// `CTA_PROTOINFO_TCP_FLAGS_ORIGINAL`, `_REPLY`: flags and their mask.
const TCP_FLAGS: [u16; 2] = [4, 5];
/// `IP_CT_TCP_FLAG_BE_LIBERAL`: no window checks, because the windows are unknown.
const LIBERAL: u8 = 1 << 3;

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Unreplied.
    Opening,
    /// Packets were sent in both directions.
    Established,
    /// One side has closed.
    Closing,
}

impl Stage {
    /// Returns conntrack's state (`TCP_CONNTRACK_SYN_SENT`, `_ESTABLISHED`, `_FIN_WAIT`), its status bits, and its
    /// timeout in seconds: netfilter's own timeouts, and a day for established connections, as kube-proxy sets it.
    const fn facts(self) -> (u8, u32, u32) {
        match self {
            Self::Opening => (1, IS_CONFIRMED, 120),
            Self::Established => (3, IS_CONFIRMED | SEEN_REPLY | IS_ASSURED, 86_400),
            Self::Closing => (4, IS_CONFIRMED | SEEN_REPLY | IS_ASSURED, 120),
        }
    }
}

/// A TCP connection as a packet program translates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The client.
    pub client: SocketAddr,
    /// The original destination.
    pub frontend: SocketAddr,
    /// The backend that answers.
    pub backend: SocketAddr,
    /// The source address that the backend sees.
    pub source: SocketAddr,
    /// The state of the connection.
    pub stage: Stage,
}

/// While this exists, the node drops every TCP packet in the middle of a connection that conntrack does not know; its
/// sender retransmits it. SYNs pass. Ends when dropped, and when this process dies.
#[derive(Debug)]
pub struct UnknownTcpDrop {
    _socket: Socket,
}

impl UnknownTcpDrop {
    /// Starts the standstill in the network namespace of the calling thread.
    pub fn begin() -> io::Result<Self> {
        let socket = message::open()?;
        let table = new_own_table(BOTH_FAMILIES, TABLE);
        let chain = base_chain(BOTH_FAMILIES, TABLE, HOOK, "filter");
        let rule = rule_of(BOTH_FAMILIES, TABLE, HOOK.0, &drop_unknown_tcp());
        transact_by(&socket, &[(table, CREATE), (chain, CREATE), (rule, APPEND)])?;
        Ok(Self { _socket: socket })
    }
}

/// netfilter's connection table.
pub struct Conntrack(Netlink);

impl Conntrack {
    /// Opens a netlink socket in the network namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        Netlink::to(message::PROTOCOL).map(Self)
    }

    /// Deletes the entries that conntrack has of a connection by the endpoint's address.
    pub fn forget(&mut self, connection: &Connection) -> io::Result<()> {
        for from in [connection.client, connection.source] {
            let message = Message::new(CONNTRACK, DELETE, family(from))
                .with(ORIGINAL | NESTED, &tuple(from, connection.backend));
            match self.0.exchange::<_, Message>(message, NLM_F_ACK) {
                Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Creates an entry that translates a connection as the program did.
    pub fn adopt(&mut self, connection: &Connection) -> io::Result<()> {
        self.0.exchange::<_, Message>(entry(connection), NLM_F_ACK | CREATE_ONLY).map(drop)
    }
}

fn family(of: SocketAddr) -> u8 {
    if of.is_ipv4() { IPV4 } else { IPV6 }
}

fn octets(of: SocketAddr) -> Vec<u8> {
    match of.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Encodes the addresses and ports of a packet.
fn tuple(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let kinds = if from.is_ipv4() { [V4_FROM, V4_TO] } else { [V6_FROM, V6_TO] };
    let addresses = nested(&[(kinds[0], &octets(from)), (kinds[1], &octets(to))]);
    let ports = nested(&[
        (NUMBER, &[TCP]),
        (PORT_FROM, &from.port().to_be_bytes()),
        (PORT_TO, &to.port().to_be_bytes()),
    ]);
    nested(&[(ADDRESSES | NESTED, &addresses), (PROTOCOL | NESTED, &ports)])
}

/// Encodes the address and port to which a packet is translated.
fn translation(to: SocketAddr) -> Vec<u8> {
    let port = to.port().to_be_bytes();
    let ports = nested(&NAT_PORTS.map(|kind| (kind, &port[..])));
    let kind = if to.is_ipv4() { NAT_V4 } else { NAT_V6 };
    nested(&[(kind, &octets(to)), (NAT_PROTOCOL | NESTED, &ports)])
}

fn entry(connection: &Connection) -> Message {
    let Connection { client, frontend, backend, source, stage } = *connection;
    let (state, status, seconds) = stage.facts();
    let flags = [LIBERAL, LIBERAL];
    let [info_kind, tcp_kind, state_kind] = STATE;
    let tcp = nested(&[(state_kind, &[state]), (TCP_FLAGS[0], &flags), (TCP_FLAGS[1], &flags)]);
    let info = nested(&[(tcp_kind | NESTED, &tcp)]);
    let message = Message::new(CONNTRACK, NEW, family(client))
        .with(ORIGINAL | NESTED, &tuple(client, frontend))
        // The kernel changes it to the translated tuple.
        .with(REPLY | NESTED, &tuple(frontend, client))
        .with(STATUS, &status.to_be_bytes())
        .with(TIMEOUT, &seconds.to_be_bytes())
        .with(info_kind | NESTED, &info)
        .with(NAT_DESTINATION | NESTED, &translation(backend));
    if source == client { message } else { message.with(NAT_SOURCE | NESTED, &translation(source)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::netfilter::message::{find, find_below};

    fn connection(source: &str) -> Connection {
        Connection {
            client: "192.0.2.7:40000".parse().unwrap(),
            frontend: "10.96.0.1:80".parse().unwrap(),
            backend: "10.0.1.2:8080".parse().unwrap(),
            source: source.parse().unwrap(),
            stage: Stage::Established,
        }
    }

    #[test]
    fn an_entry_holds_both_translations() {
        let body = entry(&connection("10.0.0.1:61000")).body;
        assert_eq!(find_below(&body, &[ORIGINAL, ADDRESSES, V4_TO]), Some(&[10, 96, 0, 1][..]));
        assert_eq!(find_below(&body, &[REPLY, ADDRESSES, V4_TO]), Some(&[192, 0, 2, 7][..]));
        assert_eq!(find_below(&body, &[NAT_DESTINATION, NAT_V4]), Some(&[10, 0, 1, 2][..]));
        let port = find_below(&body, &[NAT_SOURCE, NAT_PROTOCOL, NAT_PORTS[0]]);
        assert_eq!(port, Some(&61_000u16.to_be_bytes()[..]));
        assert_eq!(find_below(&body, &STATE), Some(&[3][..]));
    }

    #[test]
    fn connection_without_snat_has_one_translation() {
        assert_eq!(find(&entry(&connection("192.0.2.7:40000")).body, NAT_SOURCE), None);
    }
}
