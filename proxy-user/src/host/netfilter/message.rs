//! Messages of nfnetlink, as far as they are needed: headers, attributes, and batches of changes
//! (`include/uapi/linux/netfilter/nfnetlink.h`).

use std::io;

use rtnetlink::packet_core::{NetlinkDeserializable, NetlinkHeader, NetlinkSerializable};
use rtnetlink::sys::{Socket, SocketAddr};

/// `NETLINK_NETFILTER`.
pub(super) const PROTOCOL: isize = 12;
/// `NFPROTO_UNSPEC`: every family.
pub(super) const ANY_FAMILY: u8 = 0;
/// `NFPROTO_INET`: IPv4 and IPv6.
pub(super) const INET: u8 = 1;
/// `NFPROTO_IPV4`.
pub(super) const IPV4: u8 = 2;
/// `NFPROTO_NETDEV`: packets of a device.
pub(super) const NETDEV: u8 = 5;
/// `NFPROTO_IPV6`.
pub(super) const IPV6: u8 = 10;

/// `NFNL_SUBSYS_NFTABLES`.
pub(super) const NFTABLES: u16 = 10;
/// `NFNL_SUBSYS_CTNETLINK`.
pub(super) const CONNTRACK: u16 = 1;

/// `NFTA_CHAIN_TABLE`, `_NAME`, `_HOOK` (with number and priority), `_TYPE`.
pub(super) const CHAIN_TABLE: u16 = 1;
pub(super) const CHAIN_NAME: u16 = 3;
pub(super) const CHAIN_HOOK: u16 = 4;
pub(super) const CHAIN_TYPE: u16 = 7;
/// `NFTA_HOOK_HOOKNUM`.
pub(super) const HOOK_NUMBER: u16 = 1;
/// `IPPROTO_TCP`.
pub(super) const TCP: u8 = 6;

/// `NLMSG_ERROR`, which is also the answer to a successful request.
const ERROR: u16 = 2;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// The mask of an attribute's type; the bits `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER` are not needed.
const TYPE_MASK: u16 = 0x3fff;
/// `NLA_F_NESTED`, the bit of attributes that contain other attributes.
pub(in crate::host) const NESTED: u16 = 0x8000;
/// The length of nfnetlink's header in bytes: family, version, resource.
const HEADER: usize = 4;

/// A message of nfnetlink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Subsystem and command.
    pub kind: u16,
    /// Address family.
    pub family: u8,
    /// Attributes.
    pub body: Vec<u8>,
}

impl Message {
    pub(super) const fn new(subsystem: u16, command: u16, family: u8) -> Self {
        Self { kind: subsystem << 8 | command, family, body: Vec::new() }
    }

    /// Returns the command within the subsystem.
    #[cfg(test)]
    pub(super) const fn command(&self) -> u16 {
        self.kind & 0xff
    }

    /// Adds an attribute.
    #[must_use]
    pub(super) fn with(mut self, kind: u16, payload: &[u8]) -> Self {
        put(&mut self.body, kind, payload);
        self
    }

    /// Adds an attribute with a string.
    #[must_use]
    pub(super) fn with_text(self, kind: u16, text: &str) -> Self {
        self.with(kind, &[text.as_bytes(), &[0]].concat())
    }
}

/// Appends an attribute.
fn put(body: &mut Vec<u8>, kind: u16, payload: &[u8]) {
    body.extend((payload.len() as u16 + 4).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(payload);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// Encodes attributes.
pub(in crate::host) fn nested(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    attributes.iter().for_each(|(kind, payload)| put(&mut bytes, *kind, payload));
    bytes
}

/// Returns the attributes in `bytes`, up to the first one that is malformed.
pub(in crate::host) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u16::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & TYPE_MASK;
        let payload = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    })
}

/// Returns the payload of the first attribute of this type.
pub(super) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, payload)| payload)
}

/// Returns the payload at the end of a path of nested attributes.
pub(super) fn find_below<'a>(bytes: &'a [u8], path: &[u16]) -> Option<&'a [u8]> {
    path.iter().try_fold(bytes, |bytes, kind| find(bytes, *kind))
}

/// Returns a string, without its final zero.
pub(super) fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        HEADER + self.body.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer[..HEADER].copy_from_slice(&[self.family, 0, 0, 0]);
        buffer[HEADER..].copy_from_slice(&self.body);
    }
}

impl NetlinkDeserializable for Message {
    type Error = io::Error;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, io::Error> {
        let family = *payload.first().ok_or(io::ErrorKind::UnexpectedEof)?;
        let body = payload.get(HEADER..).ok_or(io::ErrorKind::UnexpectedEof)?.to_vec();
        Ok(Self { kind: header.message_type, family, body })
    }
}

/// Opens a socket for netfilter, in the network namespace of the calling thread.
pub(super) fn open() -> io::Result<Socket> {
    let mut socket = Socket::new(PROTOCOL)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// Applies all of `changes`, each with its `NLM_F_*` bits, or none of them.
pub(super) fn transact(changes: &[(Message, u16)]) -> io::Result<()> {
    transact_by(&open()?, changes)
}

/// Like [`transact`], with a socket that stays open.
pub(super) fn transact_by(socket: &Socket, changes: &[(Message, u16)]) -> io::Result<()> {
    const REQUEST: u16 = 1;
    const ACK: u16 = 4;
    let mut bytes = Vec::new();
    let mut append = |kind: u16, flags: u16, sequence: u32, family: u8, resource: u16, body: &[u8]| {
        let length = 16 + HEADER + body.len();
        bytes.extend((length as u32).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((REQUEST | flags).to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend([family, 0]);
        bytes.extend(resource.to_be_bytes());
        bytes.extend(body);
    };
    append(BATCH_BEGIN, 0, 0, ANY_FAMILY, NFTABLES, &[]);
    let last = changes.len();
    for (number, (message, flags)) in (1..).zip(changes) {
        // The kernel reports every error; the acknowledgement of the last message ends the wait.
        let flags = if number == last { flags | ACK } else { *flags };
        append(message.kind, flags, number as u32, message.family, 0, &message.body);
    }
    append(BATCH_END, 0, 0, ANY_FAMILY, NFTABLES, &[]);

    // A batch is one datagram, and the rules of a large cluster take megabytes.
    let size = bytes.len().saturating_mul(2).min(i32::MAX as usize);
    rustix::net::sockopt::set_socket_send_buffer_size_force(socket, size)?;
    socket.send(&bytes, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        // The netlink header, then the error code, then the message that the error is about.
        let (Some(kind), Some(sequence), Some(code)) =
            (word16(&datagram, 4), word32(&datagram, 8), word32(&datagram, 16))
        else {
            continue;
        };
        if kind != ERROR {
            continue;
        }
        match code.cast_signed() {
            0 if sequence == last as u32 => return Ok(()),
            0 => {}
            code => return Err(io::Error::from_raw_os_error(-code)),
        }
    }
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|word| u16::from_ne_bytes(*word))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let message = Message::new(NFTABLES, 4, IPV4).with_text(1, "kube-proxy").with(2, &7u32.to_be_bytes());
        assert_eq!(find(&message.body, 1).map(text).as_deref(), Some("kube-proxy"));
        assert_eq!(find(&message.body, 2), Some(&[0, 0, 0, 7][..]));
        assert_eq!(find(&message.body, 3), None);
        let outer = Message::new(NFTABLES, 4, IPV4).with(5 | 0x8000, &message.body);
        assert_eq!(find_below(&outer.body, &[5, 2]), Some(&[0, 0, 0, 7][..]));
        let mut bytes = vec![0; outer.buffer_len()];
        outer.serialize(&mut bytes);
        let mut header = NetlinkHeader::default();
        header.message_type = outer.kind;
        assert_eq!(Message::deserialize(&header, &bytes).unwrap(), outer);
    }

    #[test]
    fn what_makes_no_sense_ends_the_list() {
        for bytes in [&[][..], &[9], &[0, 0, 0, 0], &[3, 0, 1, 0], &[200, 0, 1, 0, 1, 2, 3, 4]] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
        }
    }
}
