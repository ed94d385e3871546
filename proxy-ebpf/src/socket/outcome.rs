//! Results of TCP connections that `connect` has translated: a refusal or an unanswered SYN is a failure of the backend
//! ([`proxy_common::health`]), for all clients only if the socket is the node's own. The kernel calls the program for every TCP
//! socket of the cgroup that sends a SYN; it reports retransmissions and state changes only of watched sockets.

use aya_ebpf::bindings::{
    BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE, BPF_TCP_ESTABLISHED, BPF_TCP_SYN_SENT, bpf_sock,
};
use aya_ebpf::helpers::generated::bpf_get_netns_cookie;
use aya_ebpf::programs::SockOpsContext;
use proxy_common::V4;
use proxy_common::health::{Failure, socket_client};
use proxy_common::latency::SocketExample;
use proxy_common::reason::Reason;
use proxy_common::socket::SocketStorage;

use crate::env::{Health as _, Node as _};
use crate::kernel::handle::Kernel;
use crate::kernel::latency::{self, ConnectOutcome};
use crate::kernel::sockets::{is_host, learn, storage};
use crate::report;
use crate::select::health;

/// Return value: the kernel proceeds as it would without the program.
const GO_ON: u32 = 1;
/// Flags of the callbacks for watched sockets.
const WATCH: u32 = BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG;

/// Handles an event of a TCP socket.
#[inline(always)]
pub fn handle_event(context: &SockOpsContext) -> u32 {
    // For sockets that accept connections, the program executes nothing more than this.
    match context.op() {
        BPF_SOCK_OPS_TCP_CONNECT_CB => {
            let (v4, v6) = local(context);
            learn(netns(context), v4, v6);
            if observed_storage(context).is_none() {
                return GO_ON;
            }
            if latency::is_measured() {
                latency::socket_connects(socket(context));
            }
            // If this fails, the result of the connection is not noted.
            // The flags are never cleared: other programs of the socket's cgroups may have set the same ones.
            let _ = context.set_cb_flags((context.cb_flags() | WATCH).cast_signed());
        }
        BPF_SOCK_OPS_RTO_CB if state(context) == BPF_TCP_SYN_SENT => {
            note_failure(context, ConnectOutcome::Retransmitted);
        }
        BPF_SOCK_OPS_STATE_CB if context.arg(0) == BPF_TCP_SYN_SENT => changed(context, context.arg(1)),
        _ => {}
    }
    GO_ON
}

/// Handles a state change of a socket that has sent a SYN.
#[inline(always)]
fn changed(context: &SockOpsContext, new: u32) {
    if new == BPF_TCP_ESTABLISHED {
        if let Some(storage) = observed_storage(context) {
            let maps = Kernel::<V4>::new();
            if storage.watched != 0 && is_host(netns(context)) {
                health::answered(maps, storage.backend_id);
            } else if storage.watched != 0 {
                health::reached(maps, storage.backend_id);
            }
            if latency::is_measured()
                && let Some((begun, took)) = latency::since_connect(socket(context))
            {
                latency::note(storage.service, storage.backend_id, ConnectOutcome::Answered(took));
                latency::keep_example(storage.service, &example(context, &storage, begun, took));
            }
        }
    } else if new == BPF_TCP_CLOSE && segments_in(context) != 0 {
        // A RST closed the socket. Without a received segment, the application has closed it.
        note_failure(context, ConnectOutcome::Refused);
    }
}

/// Returns the socket's own address in both families; the one of the other family has no meaning.
#[inline(always)]
fn local(context: &SockOpsContext) -> ([u32; 1], [u32; 4]) {
    // The words are read one by one, whatever the family is: the verifier rejects a load whose offset is computed at run
    // time.
    // SAFETY: the kernel passes a valid context to every program.
    unsafe {
        let ip6 = &raw const (*context.ops).local_ip6;
        (
            [(&raw const (*context.ops).local_ip4).read_volatile()],
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
fn netns(context: &SockOpsContext) -> u64 {
    // SAFETY: the kernel hands every program a valid context.
    unsafe { bpf_get_netns_cookie(context.ops.cast()) }
}

#[inline(always)]
fn example(context: &SockOpsContext, storage: &SocketStorage, begun: u64, took: u64) -> SocketExample {
    let ([v4], v6) = local(context);
    SocketExample {
        begun,
        took,
        client: if storage.family == 4 { [v4, 0, 0, 0] } else { v6 },
        backend: storage.backend,
        client_port: context.local_port() as u16,
        backend_port: storage.backend_port,
        family: storage.family.into(),
    }
}

/// Notes a failed connection of the socket's backend.
#[inline(always)]
fn note_failure(context: &SockOpsContext, outcome: ConnectOutcome) {
    let Some(storage) = observed_storage(context) else { return };
    if latency::is_measured() {
        latency::note(storage.service, storage.backend_id, outcome);
    }
    if storage.watched == 0 {
        return;
    }
    let maps = Kernel::<V4>::new();
    let failure = match outcome {
        ConnectOutcome::Refused if is_host(netns(context)) => Failure::Refusal,
        ConnectOutcome::Refused => Failure::RefusalInside,
        _ => Failure::Silence,
    };
    let seed = maps.config().map_or(0, |config| config.flow_seed);
    if maps.note_failure(storage.backend_id, socket_client(netns(context), seed), failure as u32) != 0 {
        report::refusal(maps, storage.service, Reason::EndpointEjected);
    }
}

#[inline(always)]
fn socket(context: &SockOpsContext) -> *mut bpf_sock {
    // SAFETY: the kernel hands every program a valid context.
    unsafe { (*context.ops).__bindgen_anon_2.sk }
}

/// Returns the storage of a socket whose connection is watched or measured.
#[inline(always)]
fn observed_storage(context: &SockOpsContext) -> Option<SocketStorage> {
    let storage = storage(socket(context), false)?;
    // SAFETY: the socket's own storage. The socket must be closed before it can connect again.
    let storage = unsafe { storage.read() };
    (storage.family != 0 && (storage.watched != 0 || latency::is_measured())).then_some(storage)
}

#[inline(always)]
fn state(context: &SockOpsContext) -> u32 {
    // SAFETY: as in `socket`.
    unsafe { (*context.ops).state }
}

#[inline(always)]
fn segments_in(context: &SockOpsContext) -> u32 {
    // SAFETY: as in `socket`.
    unsafe { (*context.ops).segs_in }
}
