//! The address argument of a socket call, for both families and for IPv4-mapped IPv6 addresses.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie};
use aya_ebpf::programs::{SockAddrContext, SockContext};
use proxy_common::{Family, V4, V6};

/// An address that a hook may read and replace.
pub trait Sockaddr {
    /// The address family.
    type Family: Family;
    /// Returns the context of the call.
    fn raw(&self) -> Raw;
    /// Returns the address.
    fn addr(&self) -> <Self::Family as Family>::Words;
    /// Replaces the address.
    fn set_addr(&self, addr: <Self::Family as Family>::Words);

    /// Whether the address is IPv4-mapped: the kernel runs the hook of the other family next, with the address that this hook
    /// writes.
    #[inline(always)]
    fn is_mapped(&self) -> bool {
        false
    }

    /// Replaces address and port.
    #[inline(always)]
    fn set(&self, addr: <Self::Family as Family>::Words, port: u16) {
        self.set_addr(addr);
        self.raw().set_port(port);
    }
}

/// The context of a socket call.
#[derive(Clone, Copy)]
pub struct Raw {
    context: *mut bpf_sock_addr,
}

impl Raw {
    #[inline(always)]
    fn new(context: &SockAddrContext) -> Self {
        Self { context: context.as_ptr().cast() }
    }

    /// Returns the port, host byte order.
    #[inline(always)]
    pub fn port(self) -> u16 {
        // SAFETY: the kernel hands every program a valid context. The port is in the low half, in network byte order.
        u16::from_be(unsafe { (*self.context).user_port } as u16)
    }

    #[inline(always)]
    fn set_port(self, port: u16) {
        // SAFETY: as in `port`.
        unsafe { (*self.context).user_port = u32::from(port.to_be()) };
    }

    /// Returns the socket's protocol number. The low byte of MPTCP's number, 262, is TCP's number, and MPTCP packets are TCP
    /// packets.
    #[inline(always)]
    pub fn proto(self) -> u8 {
        // SAFETY: as in `port`.
        unsafe { (*self.context).protocol as u8 }
    }

    /// Returns a number that is unique to the socket until the machine reboots.
    #[inline(always)]
    pub fn cookie(self) -> u64 {
        // SAFETY: as in `port`.
        unsafe { bpf_get_socket_cookie(self.context.cast()) }
    }

    /// Returns the number of the socket's network namespace, which is unique until the machine reboots.
    #[inline(always)]
    pub fn netns(self) -> u64 {
        // SAFETY: as in `port`.
        unsafe { bpf_get_netns_cookie(self.context.cast()) }
    }

    /// Returns the socket.
    #[inline(always)]
    pub fn socket(self) -> *mut bpf_sock {
        // SAFETY: as in `port`.
        unsafe { (*self.context).__bindgen_anon_1.sk }
    }

    /// Whether the socket is connected.
    #[inline(always)]
    pub fn is_connected(self) -> bool {
        /// `TCP_ESTABLISHED`, which the kernel also sets for UDP (`net/ipv4/datagram.c`).
        const ESTABLISHED: u32 = 1;
        // SAFETY: the kernel passes a socket with each call.
        unsafe { (*self.socket()).state == ESTABLISHED }
    }

    #[inline(always)]
    fn word(self, index: usize) -> u32 {
        // SAFETY: as in `port`; indexes are constants below four.
        unsafe { (&raw const (*self.context).user_ip6).cast::<u32>().add(index).read_volatile() }
    }

    #[inline(always)]
    fn set_word(self, index: usize, value: u32) {
        // SAFETY: as in `word`.
        unsafe { (&raw mut (*self.context).user_ip6).cast::<u32>().add(index).write_volatile(value) };
    }
}

/// A `sockaddr_in`.
pub struct Sockaddr4(Raw);

impl Sockaddr4 {
    /// Returns the address of a call on an IPv4 socket.
    #[inline(always)]
    pub fn new(context: &SockAddrContext) -> Self {
        Self(Raw::new(context))
    }
}

impl Sockaddr for Sockaddr4 {
    type Family = V4;

    #[inline(always)]
    fn raw(&self) -> Raw {
        self.0
    }

    #[inline(always)]
    fn addr(&self) -> [u32; 1] {
        // SAFETY: the kernel hands every program a valid context.
        [unsafe { (*self.0.context).user_ip4 }]
    }

    #[inline(always)]
    fn set_addr(&self, [addr]: [u32; 1]) {
        // SAFETY: as in `addr`.
        unsafe { (*self.0.context).user_ip4 = addr };
    }
}

/// A `sockaddr_in6`.
pub struct Sockaddr6(Raw);

/// The third word of `::ffff:a.b.c.d`, in network byte order.
const MAPPED: u32 = 0xffffu32.to_be();

/// Returns the IPv4 address of an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2).
#[inline(always)]
pub fn mapped(words: [u32; 4]) -> Option<[u32; 1]> {
    (words[0] == 0 && words[1] == 0 && words[2] == MAPPED).then_some([words[3]])
}

impl Sockaddr6 {
    /// Returns the address of a call on an IPv6 socket.
    #[inline(always)]
    pub fn new(context: &SockAddrContext) -> Self {
        Self(Raw::new(context))
    }

    /// Returns the call as a call to an IPv4 address, if the address is IPv4-mapped.
    #[inline(always)]
    pub fn mapped(&self) -> Option<Mapped> {
        mapped(self.addr()).map(|_| Mapped(self.0))
    }
}

impl Sockaddr for Sockaddr6 {
    type Family = V6;

    #[inline(always)]
    fn raw(&self) -> Raw {
        self.0
    }

    #[inline(always)]
    fn addr(&self) -> [u32; 4] {
        let raw = self.0;
        [raw.word(0), raw.word(1), raw.word(2), raw.word(3)]
    }

    #[inline(always)]
    fn set_addr(&self, words: [u32; 4]) {
        self.0.set_word(0, words[0]);
        self.0.set_word(1, words[1]);
        self.0.set_word(2, words[2]);
        self.0.set_word(3, words[3]);
    }
}

/// An IPv4 address that an IPv6 socket uses: `::ffff:a.b.c.d`.
pub struct Mapped(Raw);

impl Sockaddr for Mapped {
    type Family = V4;

    #[inline(always)]
    fn raw(&self) -> Raw {
        self.0
    }

    #[inline(always)]
    fn is_mapped(&self) -> bool {
        true
    }

    #[inline(always)]
    fn addr(&self) -> [u32; 1] {
        [self.0.word(3)]
    }

    #[inline(always)]
    fn set_addr(&self, [addr]: [u32; 1]) {
        self.0.set_word(3, addr);
    }
}

/// The socket of a hook without an address argument: the socket was just bound, or is being closed.
pub struct Bound(*mut bpf_sock);

impl Bound {
    /// Returns the socket of a `post_bind` or `sock_release` hook.
    #[inline(always)]
    pub fn new(context: &SockContext) -> Self {
        Self(context.sock)
    }

    /// Returns the socket itself.
    #[inline(always)]
    pub fn raw(&self) -> *mut bpf_sock {
        self.0
    }

    /// Returns the IPv4 address to which the socket is bound; only in the hook of IPv4 sockets.
    #[inline(always)]
    pub fn addr4(&self) -> [u32; 1] {
        // SAFETY: the kernel hands every program a valid context.
        [unsafe { (*self.0).src_ip4 }]
    }

    /// Returns the IPv6 address to which the socket is bound; only in the hook of IPv6 sockets.
    #[inline(always)]
    pub fn addr6(&self) -> [u32; 4] {
        // SAFETY: as in `addr4`. Volatile, because the kernel allows a program to read one word at a time, not two.
        let word = |at| unsafe { (&raw const (*self.0).src_ip6).cast::<u32>().add(at).read_volatile() };
        [word(0), word(1), word(2), word(3)]
    }

    /// Returns the port, host byte order.
    #[inline(always)]
    pub fn port(&self) -> u16 {
        // SAFETY: as in `addr4`.
        unsafe { (*self.0).src_port as u16 }
    }

    /// Returns the socket's protocol number, as [`Raw::proto`].
    #[inline(always)]
    pub fn proto(&self) -> u8 {
        // SAFETY: as in `addr4`.
        unsafe { (*self.0).protocol as u8 }
    }

    /// Returns the number of the socket's network namespace.
    #[inline(always)]
    pub fn netns(&self) -> u64 {
        // SAFETY: as in `addr4`.
        unsafe { bpf_get_netns_cookie(self.0.cast()) }
    }
}
