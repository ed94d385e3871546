//! Hand-made packets that no socket would send: forged sources, single segments, fragments, ICMP errors.
//!
//! To add a kind of packet, add a function here that returns its bytes from the IP header on.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use proxy_testbed::space::Space;

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

const ICMP: u8 = 1;
const IPIP: u8 = 4;
const TCP: u8 = 6;
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;
const ICMP6: u8 = 58;

/// Sends frames unchanged by a device of a namespace.
pub struct Wire {
    socket: OwnedFd,
    index: i32,
    own: [u8; 6],
    to: [u8; 6],
}

/// Returns the Ethernet address and the index of a device.
pub fn device(space: &Space, name: &str) -> Result<([u8; 6], i32)> {
    let output = space.command("ip").args(["-j", "link", "show", "dev", name]).output()?;
    let links: serde_json::Value = serde_json::from_slice(&output.stdout).context("ip says no JSON")?;
    let text = links[0]["address"].as_str().with_context(|| format!("no device {name}"))?;
    let octets = text.split(':').map(|octet| u8::from_str_radix(octet, 16));
    let octets: Vec<u8> = octets.collect::<Result<_, _>>()?;
    let index = links[0]["ifindex"].as_i64().context("no index")?;
    Ok((octets.try_into().map_err(|octets| anyhow::anyhow!("{octets:?}"))?, index as i32))
}

/// Opens a socket that sends whole frames from this thread's namespace.
pub fn link_socket() -> Result<OwnedFd> {
    // SAFETY: the call has no pointers.
    let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
    ensure!(socket >= 0, "AF_PACKET: {}", io::Error::last_os_error());
    // SAFETY: the descriptor was just opened, and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// Sends a frame unchanged by the device with this index. Waits while the queue at the other end of a veth is full:
/// then `veth_xmit` drops the frame and returns `ENOBUFS`.
pub fn send_frame(socket: &OwnedFd, index: i32, frame: &[u8]) -> Result<()> {
    // SAFETY: all fields are plain integers.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_ifindex = index;
    to.sll_halen = 6;
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        // SAFETY: both pointers are to memory of the size that is passed.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if sent == frame.len().cast_signed() {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        let is_full = error.raw_os_error() == Some(libc::ENOBUFS);
        ensure!(is_full && Instant::now() < deadline, "sendto: {error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Wire {
    /// Opens the socket for frames from a device to the device at its other end.
    pub fn new(space: &Space, name: &str, to: (&Space, &str)) -> Result<Self> {
        let ((own, index), (to, _)) = (device(space, name)?, device(to.0, to.1)?);
        Ok(Self { socket: space.inside(link_socket)?, index, own, to })
    }

    /// Sends a packet, given from its IP header on.
    pub fn send(&self, packet: &[u8]) -> Result<()> {
        let kind: u16 = if packet.first().is_some_and(|first| first >> 4 == 4) { 0x0800 } else { 0x86dd };
        let frame = [&self.to[..], &self.own, &kind.to_be_bytes(), packet].concat();
        send_frame(&self.socket, self.index, &frame)
    }
}

/// Returns the Internet checksum of these bytes, taken as one sequence.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let bytes = parts.concat();
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or_default());
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Returns an IP packet with this payload; both addresses have the same family.
fn ip(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    ip4_fragment(from, to, protocol, payload, (0, 0))
}

/// Returns an IPv4 fragment; `place` is the identification, and the flags with the offset. For IPv6 it returns a whole
/// packet, and ignores `place`.
fn ip4_fragment(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8], place: (u16, u16)) -> Vec<u8> {
    let mut head = if from.is_ipv4() {
        let length = (20 + payload.len() as u16).to_be_bytes();
        let (id, offset) = (place.0.to_be_bytes(), place.1.to_be_bytes());
        [&[0x45, 0][..], &length, &id, &offset, &[64, protocol, 0, 0]].concat()
    } else {
        [&[0x60, 0, 0, 0][..], &(payload.len() as u16).to_be_bytes(), &[protocol, 64]].concat()
    };
    head.extend(octets(from));
    head.extend(octets(to));
    if from.is_ipv4() {
        let sum = checksum(&[&head]);
        head[10..12].copy_from_slice(&sum);
    }
    [head, payload.to_vec()].concat()
}

/// Returns the checksum of a transport header with its data and the pseudo-header.
fn transport_sum(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> [u8; 2] {
    let length = (payload.len() as u32).to_be_bytes();
    checksum(&[&octets(from), &octets(to), &length, &[0, 0, 0, protocol], payload])
}

fn ports(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    [from.port().to_be_bytes(), to.port().to_be_bytes()].concat()
}

/// A TCP segment without options.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
}

impl Segment {
    pub fn packet(self) -> Vec<u8> {
        ip(self.from.ip(), self.to.ip(), TCP, &self.payload())
    }

    fn payload(self) -> Vec<u8> {
        let Self { from, to, flags, seq, ack } = self;
        let mut payload = ports(from, to);
        payload.extend(seq.to_be_bytes());
        payload.extend(ack.to_be_bytes());
        payload.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        let sum = transport_sum(from.ip(), to.ip(), TCP, &payload);
        payload[16..18].copy_from_slice(&sum);
        payload
    }
}

fn datagram(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Vec<u8> {
    let mut payload = ports(from, to);
    payload.extend((8 + data.len() as u16).to_be_bytes());
    payload.extend([0, 0]);
    payload.extend(data);
    let sum = transport_sum(from.ip(), to.ip(), UDP, &payload);
    payload[6..8].copy_from_slice(&sum);
    payload
}

/// Returns a UDP datagram.
pub fn udp(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Vec<u8> {
    ip(from.ip(), to.ip(), UDP, &datagram(from, to, data))
}

/// Returns a UDP datagram in two fragments. The second one begins at byte `at` of the UDP header, a multiple of eight.
/// The first one never ends before byte 32, so that the fragments overlap if `at` is less than 32.
pub fn udp_fragments(from: SocketAddr, to: SocketAddr, data: &[u8], id: u16, at: usize) -> [Vec<u8>; 2] {
    let whole = datagram(from, to, data);
    let first = at.max(32).min(whole.len() / 8 * 8);
    let piece = |part: &[u8], offset: usize, has_more: bool| {
        if from.is_ipv4() {
            let place = (offset / 8) as u16 | if has_more { 0x2000 } else { 0 };
            return ip4_fragment(from.ip(), to.ip(), UDP, part, (id, place));
        }
        let place = (offset as u16 | u16::from(has_more)).to_be_bytes();
        let head = [&[UDP, 0][..], &place, &u32::from(id).to_be_bytes()].concat();
        ip(from.ip(), to.ip(), FRAGMENT, &[head, part.to_vec()].concat())
    };
    [piece(&whole[..first], 0, true), piece(&whole[at..], at, false)]
}

/// Returns an IPv4 or IPv6 packet that contains an IPv4 packet.
pub fn encapsulated(from: IpAddr, to: IpAddr, inner: &[u8]) -> Vec<u8> {
    ip(from, to, IPIP, inner)
}

/// Returns an ICMP error from `router` to `to`, which quotes the first bytes of the packet `about`.
pub fn icmp_error(router: IpAddr, to: IpAddr, kind: (u8, u8), word: u32, about: &[u8]) -> Vec<u8> {
    let quoted = &about[..about.len().min(128)];
    let mut payload = [&[kind.0, kind.1, 0, 0][..], &word.to_be_bytes(), quoted].concat();
    let sum = if to.is_ipv4() { checksum(&[&payload]) } else { transport_sum(router, to, ICMP6, &payload) };
    payload[2..4].copy_from_slice(&sum);
    ip(router, to, if to.is_ipv4() { ICMP } else { ICMP6 }, &payload)
}

/// Counts packets that arrive on a device: behind XDP, and before tc.
pub struct Tap(OwnedFd);

impl Tap {
    /// Opens a tap on a device of a namespace.
    pub fn new(space: &Space, name: &str) -> Result<Self> {
        let (_, index) = device(space, name)?;
        let all = (libc::ETH_P_ALL as u16).to_be();
        let open = || {
            // SAFETY: the call has no pointers.
            let socket = unsafe {
                libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, i32::from(all))
            };
            ensure!(socket >= 0, "AF_PACKET: {}", io::Error::last_os_error());
            // SAFETY: the descriptor was just opened, and has no other owner.
            Ok(unsafe { OwnedFd::from_raw_fd(socket) })
        };
        let socket = space.inside(open)?;
        // SAFETY: all fields are plain integers.
        let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        at.sll_family = libc::AF_PACKET as u16;
        at.sll_protocol = all;
        at.sll_ifindex = index;
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the pointer is to memory of the size that is passed.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const at).cast(), length) };
        ensure!(bound == 0, "bind: {}", io::Error::last_os_error());
        Ok(Self(socket))
    }

    /// Returns how many TCP and UDP packets to this port have arrived since the last call.
    pub fn count(&self, port: u16) -> usize {
        let (mut count, mut packet) = (0, [0u8; 128]);
        loop {
            // SAFETY: all fields are plain integers.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            // SAFETY: the pointers are to memory of the sizes that are passed.
            let read = unsafe {
                libc::recvfrom(
                    self.0.as_raw_fd(),
                    packet.as_mut_ptr().cast(),
                    packet.len(),
                    0,
                    (&raw mut from).cast(),
                    &raw mut length,
                )
            };
            if read <= 0 {
                return count;
            }
            let ports = if packet[0] >> 4 == 4 { 20 } else { 40 };
            let to = u16::from_be_bytes([packet[ports + 2], packet[ports + 3]]);
            count += usize::from(from.sll_pkttype != libc::PACKET_OUTGOING && to == port);
        }
    }
}
