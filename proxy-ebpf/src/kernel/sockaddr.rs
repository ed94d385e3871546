//! The contexts of socket calls, for both families and for IPv4-mapped IPv6 addresses.

use core::net::Ipv4Addr;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie};
use aya_ebpf::programs::{SockAddrContext, SockContext};
use proxy_common::config::MESH_PORTS;
use proxy_common::socket::{SocketPeers, SocketStorage};
use proxy_common::{Family as _, V4, V6};

use super::lookup;
use super::sockets::{context_storage, peers, storage};
use crate::sock::{self, Bound, ESTABLISHED, Sock, Sockaddr};

/// The context of a socket call.
#[derive(Clone, Copy)]
struct Raw {
    context: *mut bpf_sock_addr,
}

impl Raw {
    #[inline(always)]
    fn new(context: &SockAddrContext) -> Self {
        Self { context: context.as_ptr().cast() }
    }

    #[inline(always)]
    fn port(self) -> u16 {
        // SAFETY: the kernel hands every program a valid context. The port is in the low half, in network byte order.
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
    fn netns(self) -> u64 {
        // SAFETY: as in `port`.
        unsafe { bpf_get_netns_cookie(self.context.cast()) }
    }

    #[inline(always)]
    fn socket(self) -> *mut bpf_sock {
        // SAFETY: as in `port`.
        unsafe { (*self.context).__bindgen_anon_1.sk }
    }

    #[inline(always)]
    fn is_connected(self) -> bool {
        // SAFETY: the kernel passes a socket with each call.
        unsafe { (*self.socket()).state == ESTABLISHED }
    }

    #[inline(always)]
    fn is_bound(self) -> bool {
        // SAFETY: the kernel passes a socket with each call.
        unsafe { (*self.socket()).src_port != 0 }
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

/// Defines the subprogram of [`Sockaddr::has_listener`] for a family, for room on the stack.
macro_rules! has_listener {
    ($name:ident, $loopback:expr) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(context: *mut bpf_sock_addr, ports: *const [u16; MESH_PORTS]) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(ports) = (unsafe { ports.as_ref() }) else { return 0 };
            let mut number = 0;
            while number < MESH_PORTS {
                let port = ports[number];
                // SAFETY: the verifier lets callers pass their context only.
                if port != 0 && unsafe { lookup::has_listener(context.cast(), $loopback, port) } {
                    return 1;
                }
                number += 1;
            }
            0
        }
    };
}

has_listener!(has_listener4, [u32::from(Ipv4Addr::LOCALHOST).to_be()]);
has_listener!(has_listener6, [0, 0, 0, 1u32.to_be()]);

/// A `sockaddr_in`.
pub struct Sockaddr4(Raw);

impl Sockaddr4 {
    /// Returns the address of a call on an IPv4 socket.
    #[inline(always)]
    pub fn new(context: &SockAddrContext) -> Self {
        Self(Raw::new(context))
    }
}

/// A `sockaddr_in6`.
pub struct Sockaddr6(Raw);

impl Sockaddr6 {
    /// Returns the address of a call on an IPv6 socket.
    #[inline(always)]
    pub fn new(context: &SockAddrContext) -> Self {
        Self(Raw::new(context))
    }

    /// Returns the call as a call to an IPv4 address, if the address is IPv4-mapped.
    #[inline(always)]
    pub fn mapped(&self) -> Option<Mapped> {
        sock::mapped(self.addr()).map(|_| Mapped(self.0))
    }
}

/// An IPv4 address that an IPv6 socket uses: `::ffff:a.b.c.d`.
pub struct Mapped(Raw);

macro_rules! sockaddr {
    ($name:ty, $family:ty, $addr:expr, $set_addr:expr) => {
        impl Sock for $name {
            #[inline(always)]
            fn netns(&self) -> u64 {
                self.0.netns()
            }

            #[inline(always)]
            fn storage(&self, create: bool) -> Option<*mut SocketStorage> {
                storage(self.0.socket(), create)
            }
        }

        impl Sockaddr for $name {
            type Family = $family;

            #[inline(always)]
            fn addr(&self) -> <$family as proxy_common::Family>::Words {
                $addr(self.0)
            }

            #[inline(always)]
            fn set_addr(&self, addr: <$family as proxy_common::Family>::Words) {
                $set_addr(self.0, addr);
            }

            #[inline(always)]
            fn port(&self) -> u16 {
                self.0.port()
            }

            #[inline(always)]
            fn set_port(&self, port: u16) {
                self.0.set_port(port);
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
            fn is_connected(&self) -> bool {
                self.0.is_connected()
            }

            #[inline(always)]
            fn is_bound(&self) -> bool {
                self.0.is_bound()
            }

            #[inline(always)]
            fn has_listener(&self, ports: &[u16; MESH_PORTS]) -> bool {
                let is_v6 = <$family>::INDEX == V6::INDEX;
                let found = if is_v6 { has_listener6 } else { has_listener4 };
                found(self.0.context, ports) != 0
            }

            #[inline(always)]
            fn peers(&self, create: bool) -> Option<*mut SocketPeers> {
                peers(self.0.socket(), create)
            }
        }
    };
}

sockaddr! {
    Sockaddr4, V4,
    // SAFETY: the kernel hands every program a valid context.
    |raw: Raw| [unsafe { (*raw.context).user_ip4 }],
    // SAFETY: as above.
    |raw: Raw, [addr]: [u32; 1]| unsafe { (*raw.context).user_ip4 = addr }
}
sockaddr! {
    Sockaddr6, V6,
    |raw: Raw| [raw.word(0), raw.word(1), raw.word(2), raw.word(3)],
    |raw: Raw, words: [u32; 4]| {
        raw.set_word(0, words[0]);
        raw.set_word(1, words[1]);
        raw.set_word(2, words[2]);
        raw.set_word(3, words[3]);
    }
}
sockaddr! {
    Mapped, V4,
    |raw: Raw| [raw.word(3)],
    |raw: Raw, [addr]: [u32; 1]| raw.set_word(3, addr)
}

/// The socket of a hook without an address argument: the socket was just bound, or is being closed.
pub struct BareSock(*mut bpf_sock);

impl BareSock {
    /// Returns the socket of a `post_bind` or `sock_release` hook.
    #[inline(always)]
    pub fn new(context: &SockContext) -> Self {
        Self(context.sock)
    }
}

impl Sock for BareSock {
    #[inline(always)]
    fn netns(&self) -> u64 {
        // SAFETY: as in `addr4`.
        unsafe { bpf_get_netns_cookie(self.0.cast()) }
    }

    #[inline(always)]
    fn storage(&self, create: bool) -> Option<*mut SocketStorage> {
        // SAFETY: the socket of the hook's context.
        unsafe { context_storage(self.0, create) }
    }
}

impl Bound for BareSock {
    #[inline(always)]
    fn addr4(&self) -> [u32; 1] {
        // SAFETY: the kernel hands every program a valid context.
        [unsafe { (*self.0).src_ip4 }]
    }

    #[inline(always)]
    fn addr6(&self) -> [u32; 4] {
        // SAFETY: as in `addr4`. Volatile, because the kernel allows a program to read one word at a time, not two.
        let word = |at| unsafe { (&raw const (*self.0).src_ip6).cast::<u32>().add(at).read_volatile() };
        [word(0), word(1), word(2), word(3)]
    }

    #[inline(always)]
    fn port(&self) -> u16 {
        // SAFETY: as in `addr4`.
        unsafe { (*self.0).src_port as u16 }
    }

    #[inline(always)]
    fn proto(&self) -> u8 {
        // SAFETY: as in `addr4`.
        unsafe { (*self.0).protocol as u8 }
    }
}
