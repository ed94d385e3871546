//! The address argument of a socket call, for both families and for IPv4 written as IPv6.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::helpers::generated::bpf_get_socket_cookie;
use aya_ebpf::programs::SockAddrContext;
use proxy_common::{V4, V6};

use crate::maps::Tables;

/// An address that a hook may read and replace.
pub trait Sockaddr {
    /// Its family.
    type Family: Tables;
    /// The address.
    fn addr(&self) -> <Self::Family as proxy_common::Family>::Words;
    /// The port, host byte order.
    fn port(&self) -> u16;
    /// The socket's protocol number.
    fn proto(&self) -> u8;
    /// A number that no other socket has while the machine runs.
    fn cookie(&self) -> u64;
    /// Whether the kernel runs the hook of the other family next, with the address that this one leaves.
    fn is_mapped(&self) -> bool {
        false
    }
    /// Replaces address and port.
    fn set(&self, addr: <Self::Family as proxy_common::Family>::Words, port: u16);
}

/// The context that all forms share.
#[derive(Clone, Copy)]
struct Raw {
    context: *mut bpf_sock_addr,
}

impl Raw {
    #[inline(always)]
    fn port(self) -> u16 {
        // SAFETY: the kernel hands every program a valid context. The port is in the low half, network order.
        u16::from_be(unsafe { (*self.context).user_port } as u16)
    }

    #[inline(always)]
    fn set_port(self, port: u16) {
        // SAFETY: as in `port`.
        unsafe { (*self.context).user_port = u32::from(port.to_be()) };
    }

    #[inline(always)]
    fn proto(self) -> u8 {
        // SAFETY: as in `port`.
        unsafe { (*self.context).protocol as u8 }
    }

    #[inline(always)]
    fn cookie(self) -> u64 {
        // SAFETY: as in `port`.
        unsafe { bpf_get_socket_cookie(self.context.cast()) }
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
        Self(Raw { context: context.as_ptr().cast() })
    }
}

impl Sockaddr for Sockaddr4 {
    type Family = V4;

    #[inline(always)]
    fn addr(&self) -> [u32; 1] {
        // SAFETY: the kernel hands every program a valid context.
        [unsafe { (*self.0.context).user_ip4 }]
    }

    #[inline(always)]
    fn port(&self) -> u16 {
        self.0.port()
    }

    #[inline(always)]
    fn proto(&self) -> u8 {
        self.0.proto()
    }

    #[inline(always)]
    fn cookie(&self) -> u64 {
        self.0.cookie()
    }

    #[inline(always)]
    fn set(&self, [addr]: [u32; 1], port: u16) {
        // SAFETY: as in `addr`.
        unsafe { (*self.0.context).user_ip4 = addr };
        self.0.set_port(port);
    }
}

/// A `sockaddr_in6`.
pub struct Sockaddr6(Raw);

/// The third word of `::ffff:a.b.c.d`, as it stands in memory.
const MAPPED: u32 = 0xffffu32.to_be();

impl Sockaddr6 {
    /// The address of a call on an IPv6 socket.
    #[inline(always)]
    pub fn new(context: &SockAddrContext) -> Self {
        Self(Raw { context: context.as_ptr().cast() })
    }

    /// The same call as one to an IPv4 address, if that is what the address stands for (RFC 4291, 2.5.5.2).
    #[inline(always)]
    pub fn mapped(&self) -> Option<Mapped> {
        let raw = self.0;
        (raw.word(0) == 0 && raw.word(1) == 0 && raw.word(2) == MAPPED).then_some(Mapped(raw))
    }
}

impl Sockaddr for Sockaddr6 {
    type Family = V6;

    #[inline(always)]
    fn addr(&self) -> [u32; 4] {
        let raw = self.0;
        [raw.word(0), raw.word(1), raw.word(2), raw.word(3)]
    }

    #[inline(always)]
    fn port(&self) -> u16 {
        self.0.port()
    }

    #[inline(always)]
    fn proto(&self) -> u8 {
        self.0.proto()
    }

    #[inline(always)]
    fn cookie(&self) -> u64 {
        self.0.cookie()
    }

    #[inline(always)]
    fn set(&self, words: [u32; 4], port: u16) {
        self.0.set_word(0, words[0]);
        self.0.set_word(1, words[1]);
        self.0.set_word(2, words[2]);
        self.0.set_word(3, words[3]);
        self.0.set_port(port);
    }
}

/// An IPv4 address that an IPv6 socket uses: `::ffff:a.b.c.d`.
pub struct Mapped(Raw);

impl Sockaddr for Mapped {
    type Family = V4;

    #[inline(always)]
    fn is_mapped(&self) -> bool {
        true
    }

    #[inline(always)]
    fn addr(&self) -> [u32; 1] {
        [self.0.word(3)]
    }

    #[inline(always)]
    fn port(&self) -> u16 {
        self.0.port()
    }

    #[inline(always)]
    fn proto(&self) -> u8 {
        self.0.proto()
    }

    #[inline(always)]
    fn cookie(&self) -> u64 {
        self.0.cookie()
    }

    #[inline(always)]
    fn set(&self, [addr]: [u32; 1], port: u16) {
        self.0.set_word(3, addr);
        self.0.set_port(port);
    }
}
