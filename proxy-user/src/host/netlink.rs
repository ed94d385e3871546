//! Blocking netlink requests; the kernel answers each of them at once.

use std::io;
use std::thread::sleep;
use std::time::Duration;

use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{Socket, SocketAddr};

/// How often a list is requested that changes interrupt.
const ATTEMPTS: u32 = 5;
/// The pause after the first attempt; later ones are longer.
const PAUSE: Duration = Duration::from_millis(10);

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

    /// Opens a socket for route netlink whose lists contain only what the request names.
    pub fn open_strict() -> io::Result<Self> {
        let netlink = Self::open()?;
        netlink.socket.set_netlink_get_strict_chk(true)?;
        Ok(netlink)
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

    /// Requests a list, which may be long, and returns the answers for which `keeps` is true.
    pub fn dump_some(
        &mut self,
        message: RouteNetlinkMessage,
        keeps: impl Fn(&RouteNetlinkMessage) -> bool,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.exchange_some(message, NLM_F_DUMP, keeps)
    }

    /// Requests a change; `flags` are `NLM_F_*` bits.
    pub fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.exchange::<_, RouteNetlinkMessage>(message, NLM_F_ACK | flags).map(drop)
    }

    /// Sends a request with these `NLM_F_*` bits, and returns the answers. A list that was interrupted by a change is
    /// requested again; the error is [`io::ErrorKind::Interrupted`] if changes interrupt it each time.
    pub fn exchange<Q: NetlinkSerializable, A: NetlinkDeserializable>(
        &mut self,
        message: Q,
        flags: u16,
    ) -> io::Result<Vec<A>> {
        self.exchange_some(message, flags, |_| true)
    }

    fn exchange_some<Q: NetlinkSerializable, A: NetlinkDeserializable>(
        &mut self,
        message: Q,
        flags: u16,
        keeps: impl Fn(&A) -> bool,
    ) -> io::Result<Vec<A>> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        undisturbed(|| self.attempt(&mut request, &keeps))
    }

    fn attempt<Q: NetlinkSerializable, A: NetlinkDeserializable>(
        &mut self,
        request: &mut NetlinkMessage<Q>,
        keeps: &impl Fn(&A) -> bool,
    ) -> io::Result<Answers<A>> {
        self.sequence += 1;
        request.header.sequence_number = self.sequence;
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut answers = Answers::new(self.sequence);
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            if answers.take(&datagram, keeps)? {
                return Ok(answers);
            }
        }
    }
}

/// Repeats a list until no change interrupts it.
fn undisturbed<A>(mut list: impl FnMut() -> io::Result<Answers<A>>) -> io::Result<Vec<A>> {
    for attempt in 1..=ATTEMPTS {
        let answers = list()?;
        if !answers.is_interrupted {
            return Ok(answers.messages);
        }
        sleep(PAUSE * attempt);
    }
    Err(io::Error::new(io::ErrorKind::Interrupted, "changes have interrupted each attempt to list"))
}

/// The answers to a request so far.
struct Answers<A> {
    sequence: u32,
    messages: Vec<A>,
    /// Whether a change has interrupted the list: an entry may be missing.
    is_interrupted: bool,
}

impl<A: NetlinkDeserializable> Answers<A> {
    const fn new(sequence: u32) -> Self {
        Self { sequence, messages: Vec::new(), is_interrupted: false }
    }

    /// Takes the messages of a datagram of the kernel for which `keeps` is true; returns whether it was the last datagram.
    fn take(&mut self, datagram: &[u8], keeps: &impl Fn(&A) -> bool) -> io::Result<bool> {
        let mut rest = datagram;
        while let Some(length) = message_length(rest) {
            let (one, following) = rest.split_at(length);
            // Messages are aligned to four bytes.
            rest = following.get(length.next_multiple_of(4) - length..).unwrap_or_default();
            // The decoder may not know a message of a newer kernel; the other messages are still used.
            let Ok(message) = NetlinkMessage::<A>::deserialize(one) else { continue };
            if message.header.sequence_number != self.sequence {
                continue;
            }
            self.is_interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
            match message.payload {
                NetlinkPayload::InnerMessage(answer) => self.messages.extend(Some(answer).filter(keeps)),
                // A dump that failed ends with its error (`netlink_dump_done` of `net/netlink/af_netlink.c`).
                NetlinkPayload::Done(done) if done.code < 0 && done.code != -libc::EINTR => {
                    return Err(io::Error::from_raw_os_error(-done.code));
                }
                NetlinkPayload::Done(done) => {
                    self.is_interrupted |= done.code != 0;
                    return Ok(true);
                }
                NetlinkPayload::Error(error) => {
                    return if error.code.is_none() { Ok(true) } else { Err(error.to_io()) };
                }
                _ => {}
            }
        }
        Ok(false)
    }
}

/// Returns the length of the message at the start of `bytes`, if the message is complete.
fn message_length(bytes: &[u8]) -> Option<usize> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    (16..=bytes.len()).contains(&length).then_some(length)
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::DoneMessage;
    use rtnetlink::packet_route::link::LinkMessage;

    use super::*;

    /// Returns a datagram with one device, with these flags, and the end of the list with this code.
    fn datagram(sequence: u32, flags: u16, code: i32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let link = NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(LinkMessage::default()));
        let mut done = DoneMessage::default();
        done.code = code;
        for payload in [link, NetlinkPayload::Done(done)] {
            let mut header = NetlinkHeader::default();
            (header.sequence_number, header.flags) = (sequence, flags);
            let mut message = NetlinkMessage::new(header, payload);
            message.finalize();
            let mut one = vec![0; message.buffer_len()];
            message.serialize(&mut one);
            bytes.extend(one);
        }
        bytes
    }

    fn answers(flags: u16) -> Answers<RouteNetlinkMessage> {
        let mut answers = Answers::new(7);
        assert!(
            !answers.take(&datagram(6, NLM_F_DUMP_INTR, 0), &|_| true).unwrap(),
            "the answer to an earlier request"
        );
        assert!(answers.take(&datagram(7, flags, 0), &|_| true).unwrap());
        answers
    }

    #[test]
    fn answers_that_are_not_needed_are_not_kept() {
        let mut answers = Answers::<RouteNetlinkMessage>::new(7);
        let keeps = |answer: &_| matches!(answer, RouteNetlinkMessage::NewRoute(_));
        assert!(answers.take(&datagram(7, NLM_F_DUMP_INTR, 0), &keeps).unwrap());
        assert!(answers.messages.is_empty() && answers.is_interrupted, "it counts all the same");
    }

    #[test]
    fn a_list_that_ends_with_an_error_is_an_error() {
        let take = |code: i32| {
            let mut answers = Answers::<RouteNetlinkMessage>::new(7);
            answers.take(&datagram(7, 0, code), &|_| true).map(|_| answers.is_interrupted)
        };
        assert_eq!(take(-libc::ENOENT).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!((take(-libc::EINTR).unwrap(), take(0).unwrap()), (true, false));
    }

    #[test]
    fn an_interrupted_list_is_requested_again() {
        let mut lists = vec![answers(0), answers(NLM_F_DUMP_INTR), answers(NLM_F_DUMP_INTR)];
        let found = undisturbed(|| Ok(lists.pop().unwrap())).unwrap();
        assert_eq!((found.len(), lists.len()), (1, 0));
        let mut attempts = 0;
        let error = undisturbed(|| {
            attempts += 1;
            Ok(answers(NLM_F_DUMP_INTR))
        });
        assert_eq!((error.unwrap_err().kind(), attempts), (io::ErrorKind::Interrupted, ATTEMPTS));
    }
}
