//! The context of an event of a TCP socket.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock,
};
use aya_ebpf::helpers::generated::bpf_get_netns_cookie;
use aya_ebpf::programs::SockOpsContext;
use proxy_common::socket::SocketStorage;

use super::latency;
use super::sockets::storage;
use crate::sock::{Sock, TcpEvent, TcpEventKind};

/// Flags of the callbacks for watched sockets.
const WATCH: u32 = BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG;

/// An event of a TCP socket.
pub struct SockOps<'a>(pub &'a SockOpsContext);

impl SockOps<'_> {
    #[inline(always)]
    fn socket(&self) -> *mut bpf_sock {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { (*self.0.ops).__bindgen_anon_2.sk }
    }
}

impl Sock for SockOps<'_> {
    #[inline(always)]
    fn netns(&self) -> u64 {
        // SAFETY: as in `socket`.
        unsafe { bpf_get_netns_cookie(self.0.ops.cast()) }
    }

    #[inline(always)]
    fn storage(&self, create: bool) -> Option<*mut SocketStorage> {
        storage(self.socket(), create)
    }
}

impl TcpEvent for SockOps<'_> {
    #[inline(always)]
    fn kind(&self) -> TcpEventKind {
        match self.0.op() {
            BPF_SOCK_OPS_TCP_CONNECT_CB => TcpEventKind::Connect,
            BPF_SOCK_OPS_RTO_CB => TcpEventKind::Timeout,
            BPF_SOCK_OPS_STATE_CB => TcpEventKind::StateChange,
            _ => TcpEventKind::Other,
        }
    }

    #[inline(always)]
    fn old_state(&self) -> u32 {
        self.0.arg(0)
    }

    #[inline(always)]
    fn new_state(&self) -> u32 {
        self.0.arg(1)
    }

    #[inline(always)]
    fn state(&self) -> u32 {
        // SAFETY: as in `socket`.
        unsafe { (*self.0.ops).state }
    }

    #[inline(always)]
    fn segments_in(&self) -> u32 {
        // SAFETY: as in `socket`.
        unsafe { (*self.0.ops).segs_in }
    }

    #[inline(always)]
    fn rtt(&self) -> u32 {
        // The kernel keeps eighths.
        // SAFETY: as in `socket`.
        unsafe { (*self.0.ops).srtt_us >> 3 }
    }

    #[inline(always)]
    fn local(&self) -> ([u32; 1], [u32; 4]) {
        // The words are read one by one, whatever the family is: the verifier rejects a load whose offset is computed at run
        // time.
        // SAFETY: as in `socket`.
        unsafe {
            let ip6 = &raw const (*self.0.ops).local_ip6;
            (
                [(&raw const (*self.0.ops).local_ip4).read_volatile()],
                [
                    (&raw const (*ip6)[0]).read_volatile(),
                    (&raw const (*ip6)[1]).read_volatile(),
                    (&raw const (*ip6)[2]).read_volatile(),
                    (&raw const (*ip6)[3]).read_volatile(),
                ],
            )
        }
    }

    #[inline(always)]
    fn local_port(&self) -> u16 {
        self.0.local_port() as u16
    }

    #[inline(always)]
    fn watch(&self) {
        // The flags are never cleared: other programs of the socket's cgroups may have set the same ones.
        let _ = self.0.set_cb_flags((self.0.cb_flags() | WATCH).cast_signed());
    }

    #[inline(always)]
    fn begin_measurement(&self) {
        latency::socket_connects(self.socket());
    }

    #[inline(always)]
    fn since_connect(&self) -> Option<(u64, u64)> {
        latency::since_connect(self.socket())
    }
}
