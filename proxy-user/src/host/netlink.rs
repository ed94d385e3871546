//! Blocking netlink requests; the kernel answers each of them at once.

use std::io;

use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{Socket, SocketAddr};

/// A netlink socket, in the network namespace of the thread that opened it.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket for route netlink.
    pub fn open() -> io::Result<Self> {
        Self::to(NETLINK_ROUTE)
    }

    /// Opens a socket for the protocol with this number.
    pub fn to(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Requests a list.
    pub fn dump(&mut self, message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.exchange(message, NLM_F_DUMP)
    }

    /// Requests a change; `flags` are `NLM_F_*` bits.
    pub fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.exchange::<_, RouteNetlinkMessage>(message, NLM_F_ACK | flags).map(drop)
    }

    /// Sends a request with these `NLM_F_*` bits, and returns the answers.
    pub fn exchange<Q: NetlinkSerializable, A: NetlinkDeserializable>(
        &mut self,
        message: Q,
        flags: u16,
    ) -> io::Result<Vec<A>> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut answers = Vec::new();
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while let Some(length) = message_length(rest) {
                let (one, following) = rest.split_at(length);
                // Messages are aligned to four bytes.
                rest = following.get(length.next_multiple_of(4) - length..).unwrap_or_default();
                // The decoder may not know a message of a newer kernel; the other messages are still used.
                let Ok(message) = NetlinkMessage::<A>::deserialize(one) else { continue };
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(answer) => answers.push(answer),
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(error) => {
                        return if error.code.is_none() { Ok(answers) } else { Err(error.to_io()) };
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Returns the length of the message at the start of `bytes`, if the message is complete.
fn message_length(bytes: &[u8]) -> Option<usize> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    (16..=bytes.len()).contains(&length).then_some(length)
}
