//! The address argument of a socket call, for both families and for IPv4 written as IPv6.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie};
use aya_ebpf::programs::{SockAddrContext, SockContext};
use proxy_common::{Family, V4, V6};

/// An address that a hook may read and replace.
pub trait Sockaddr {
    /// Its family.
    type Family: Family;
    /// What all forms share.
    fn raw(&self) -> Raw;
    /// The address.
    fn addr(&self) -> <Self::Family as Family>::Words;
    /// Replaces the address.
    fn set_addr(&self, addr: <Self::Family as Family>::Words);

    /// Whether the kernel runs the hook of the other family next, with the address that this one leaves.
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

/// The context of a call on a socket.
#[derive(Clone, Copy)]
pub struct Raw {
    context: *mut bpf_sock_addr,
}

impl Raw {
    #[inline(always)]
    fn new(context: &SockAddrContext) -> Self {
        Self { context: context.as_ptr().cast() }
    }

    /// The port, host byte order.
    #[inline(always)]
    pub fn port(self) -> u16 {
        // SAFETY: the kernel hands every program a valid context. The port is in the low half, network order.
        u16::from_be(unsafe { (*self.context).user_port } as u16)
    }

    #[inline(always)]
    fn set_port(self, port: u16) {
        // SAFETY: as in `port`.
        unsafe { (*self.context).user_port = u32::from(port.to_be()) };
    }

    /// The socket's protocol number. That of MPTCP, 262, is TCP's in its low byte, and so are its packets.
    #[inline(always)]
    pub fn proto(self) -> u8 {
        // SAFETY: as in `port`.
        unsafe { (*self.context).protocol as u8 }
    }

    /// A number that no other socket has while the machine runs.
    #[inline(always)]
    pub fn cookie(self) -> u64 {
        // SAFETY: as in `port`.
        unsafe { bpf_get_socket_cookie(self.context.cast()) }
    }

    /// The number of its network namespace; no other one has it while the machine runs.
    #[inline(always)]
    pub fn netns(self) -> u64 {
        // SAFETY: as in `port`.
        unsafe { bpf_get_netns_cookie(self.context.cast()) }
    }

    /// The socket.
    #[inline(always)]
    pub fn socket(self) -> *mut bpf_sock {
        // SAFETY: as in `port`.
        unsafe { (*self.context).__bindgen_anon_1.sk }
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
    /// The address of a call on an IPv4 socket.
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

/// The third word of `::ffff:a.b.c.d`, as it stands in memory.
const MAPPED: u32 = 0xffffu32.to_be();

/// The IPv4 address that an IPv6 address stands for (RFC 4291, 2.5.5.2).
#[inline(always)]
pub fn mapped(words: [u32; 4]) -> Option<[u32; 1]> {
    (words[0] == 0 && words[1] == 0 && words[2] == MAPPED).then_some([words[3]])
}

impl Sockaddr6 {
    /// The address of a call on an IPv6 socket.
    #[inline(always)]
    pub fn new(context: &SockAddrContext) -> Self {
        Self(Raw::new(context))
    }

    /// The same call as one to an IPv4 address, if that is what the address stands for.
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

/// The socket of a hook that is no call on an address: it was just bound, or it is being closed.
pub struct Bound(*mut bpf_sock);

impl Bound {
    /// The socket of a `post_bind` or `sock_release` hook.
    #[inline(always)]
    pub fn new(context: &SockContext) -> Self {
        Self(context.sock)
    }

    /// The socket itself.
    #[inline(always)]
    pub fn raw(&self) -> *mut bpf_sock {
        self.0
    }

    /// The IPv4 address it is bound to; only in the hook of IPv4 sockets.
    #[inline(always)]
    pub fn addr4(&self) -> [u32; 1] {
        // SAFETY: the kernel hands every program a valid context.
        [unsafe { (*self.0).src_ip4 }]
    }

    /// The IPv6 address it is bound to; only in the hook of IPv6 sockets.
    #[inline(always)]
    pub fn addr6(&self) -> [u32; 4] {
        // SAFETY: as in `addr4`; volatile, because the kernel lets a word be read, and not two at once.
        let word = |at| unsafe { (&raw const (*self.0).src_ip6).cast::<u32>().add(at).read_volatile() };
        [word(0), word(1), word(2), word(3)]
    }

    /// The port, host byte order.
    #[inline(always)]
    pub fn port(&self) -> u16 {
        // SAFETY: as in `addr4`.
        unsafe { (*self.0).src_port as u16 }
    }

    /// The socket's protocol number, as [`Raw::proto`].
    #[inline(always)]
    pub fn proto(&self) -> u8 {
        // SAFETY: as in `addr4`.
        unsafe { (*self.0).protocol as u8 }
    }

    /// The number of its network namespace.
    #[inline(always)]
    pub fn netns(&self) -> u64 {
        // SAFETY: as in `addr4`.
        unsafe { bpf_get_netns_cookie(self.0.cast()) }
    }
}
