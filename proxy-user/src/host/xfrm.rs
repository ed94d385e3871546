//! The IPsec policies of the kernel (xfrm), and the loopback device by which the programs give packets to the stack.
//!
//! The layouts are those of `include/uapi/linux/xfrm.h`.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable,
};
use rtnetlink::sys::protocols::{NETLINK_ROUTE, NETLINK_XFRM};
use rtnetlink::sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket};

use super::devices::LOOPBACK;
use super::netfilter::message::{NESTED, attributes, nested};
use super::netlink::Netlink;
use proxy_core::model::IpsecPolicy;

/// `XFRM_MSG_NEWPOLICY`, `XFRM_MSG_GETPOLICY`, `XFRM_MSG_GETDEFAULT`.
const NEW_POLICY: u16 = 0x13;
const GET_POLICY: u16 = 0x15;
const GET_DEFAULT: u16 = 0x28;
/// `XFRMNLGRP_POLICY`.
const POLICY_GROUP: u32 = 4;
/// `XFRM_POLICY_OUT`.
const OUT: u8 = 1;
/// `XFRM_USERPOLICY_BLOCK`.
const BLOCK: u8 = 1;
/// `XFRMA_IF_ID`: the policy applies to packets that leave by this xfrm device, which looks for policies itself.
const IF_ID: u16 = 31;
/// Size of `struct xfrm_userpolicy_info`, and the offset of its direction.
const POLICY: usize = 168;
const DIRECTION: usize = 160;
/// Offsets in `struct xfrm_selector`, with which the structure begins.
const SOURCE: usize = 16;
const FAMILY: usize = 40;
const DESTINATION_LENGTH: usize = 42;
const SOURCE_LENGTH: usize = 43;

/// A message: its type, and everything after the header.
#[derive(Debug)]
struct Raw {
    kind: u16,
    body: Vec<u8>,
}

impl NetlinkSerializable for Raw {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.body.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.body);
    }
}

impl NetlinkDeserializable for Raw {
    type Error = io::Error;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> io::Result<Self> {
        Ok(Self { kind: header.message_type, body: payload.to_vec() })
    }
}

/// Returns the policies for outgoing packets; none if the kernel has no IPsec.
pub(super) fn policies() -> io::Result<BTreeSet<IpsecPolicy>> {
    let mut netlink = match Netlink::to(NETLINK_XFRM) {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(BTreeSet::new()),
        netlink => netlink?,
    };
    let dump = Raw { kind: GET_POLICY, body: vec![0; POLICY] };
    let answers: Vec<Raw> = netlink.exchange(dump, NLM_F_DUMP)?;
    let mut found: BTreeSet<_> = answers.iter().filter_map(read).collect();
    // Linux 5.14 and newer can block what no policy allows.
    let default: io::Result<Vec<Raw>> =
        netlink.exchange(Raw { kind: GET_DEFAULT, body: vec![0; 4] }, NLM_F_ACK);
    let is_blocked = |answer: &Raw| answer.body.get(2) == Some(&BLOCK);
    if default.is_ok_and(|answers| answers.iter().any(is_blocked)) {
        found.extend(
            [IpNet::V4(ipnet::Ipv4Net::default()), IpNet::V6(ipnet::Ipv6Net::default())]
                .map(|all| IpsecPolicy { src: all, dst: all }),
        );
    }
    Ok(found)
}

/// Reads a policy; `None` if it does not concern packets that leave by an ordinary device.
fn read(message: &Raw) -> Option<IpsecPolicy> {
    let (policy, rest) = message.body.split_at_checked(POLICY)?;
    let of_device =
        attributes(rest).any(|(kind, value)| kind == IF_ID && value.iter().any(|byte| *byte != 0));
    if message.kind != NEW_POLICY || policy[DIRECTION] != OUT || of_device {
        return None;
    }
    let family = u16::from_ne_bytes([policy[FAMILY], policy[FAMILY + 1]]);
    let range = |at: usize, length: usize| {
        let octets: [u8; 16] = policy.get(at..at + 16)?.try_into().ok()?;
        let address = match libc::c_int::from(family) {
            libc::AF_INET => IpAddr::from([octets[0], octets[1], octets[2], octets[3]]),
            libc::AF_INET6 => IpAddr::from(octets),
            _ => return None,
        };
        Some(IpNet::new(address, policy[length]).ok()?.trunc())
    };
    Some(IpsecPolicy { src: range(SOURCE, SOURCE_LENGTH)?, dst: range(0, DESTINATION_LENGTH)? })
}

/// A subscription to changes of policies.
pub(super) struct Changes(TokioSocket);

impl Changes {
    /// Subscribes; `None` if the kernel has no IPsec.
    pub(super) fn new() -> io::Result<Option<Self>> {
        let mut socket = match TokioSocket::new(NETLINK_XFRM) {
            Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(None),
            socket => socket?,
        };
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_mut().add_membership(POLICY_GROUP)?;
        Ok(Some(Self(socket)))
    }

    /// Waits for the next change. A lost notification (`ENOBUFS`) is a change, too.
    pub(super) async fn next(&mut self) -> io::Result<()> {
        match self.0.recv_from_full().await {
            Err(error) if error.raw_os_error() != Some(libc::ENOBUFS) => Err(error),
            _ => Ok(()),
        }
    }
}

/// `net.ipv4.conf.lo.accept_local`.
const ACCEPT_LOCAL: &str = "/proc/sys/net/ipv4/conf/lo/accept_local";
/// With the number 1 (strict), packets from a frontend that is no address of the node would be dropped on the loopback device.
const RP_FILTERS: [&str; 2] =
    ["/proc/sys/net/ipv4/conf/all/rp_filter", "/proc/sys/net/ipv4/conf/lo/rp_filter"];
/// The number of `rp_filter` that accepts a source to which any device has a route.
const LOOSE: u32 = 2;

/// Whether the kernel accepts packets of this node's own addresses that arrive on the loopback device. With `opens`, lets
/// them in first: by netlink, since `/proc/sys` is read-only in containers.
pub(super) fn is_loopback_open(opens: bool) -> bool {
    let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u32>().ok();
    // The kernel uses the higher number of both.
    let is_strict = || RP_FILTERS.iter().filter_map(|path| read(path)).max() == Some(1);
    let is_open = || read(ACCEPT_LOCAL).is_some_and(|value| value != 0) && !is_strict();
    if is_open() || !opens {
        return is_open();
    }
    if let Err(error) = accept_local() {
        tracing::debug!(%error, "cannot set accept_local of the loopback device");
    }
    is_open()
}

/// Sends the request of `ip link set lo` with the attributes `IPV4_DEVCONF_ACCEPT_LOCAL` and `IPV4_DEVCONF_RP_FILTER`.
fn accept_local() -> io::Result<()> {
    const SET_LINK: u16 = 19;
    const AF_SPEC: u16 = 26;
    const INET_CONF: u16 = 1;
    const DEVCONF_RP_FILTER: u16 = 8;
    const DEVCONF_ACCEPT_LOCAL: u16 = 23;
    let nest = |kind: u16, inner: &[u8]| nested(&[(kind | NESTED, inner)]);
    let setting =
        nested(&[(DEVCONF_ACCEPT_LOCAL, &1u32.to_ne_bytes()), (DEVCONF_RP_FILTER, &LOOSE.to_ne_bytes())]);
    let mut body = vec![0; 16];
    body[4..8].copy_from_slice(&LOOPBACK.to_ne_bytes());
    body.extend(nest(AF_SPEC, &nest(libc::AF_INET as u16, &nest(INET_CONF, &setting))));
    Netlink::to(NETLINK_ROUTE)?.exchange::<_, Raw>(Raw { kind: SET_LINK, body }, NLM_F_ACK).map(drop)
}

#[cfg(test)]
mod tests;
