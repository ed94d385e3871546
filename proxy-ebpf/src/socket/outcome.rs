//! Results of TCP connections that `connect` has translated: a refusal or an unanswered SYN is a failure of the backend
//! ([`proxy_common::health`]), for all clients only if the socket is the node's own. The kernel calls the program for every TCP
//! socket of the cgroup that sends a SYN; it reports retransmissions and state changes only of watched sockets.

use proxy_common::health::{Failure, socket_client};
use proxy_common::latency::SocketExample;
use proxy_common::reason::Reason;
use proxy_common::socket::{SocketStorage, TIMED};

use super::client::{is_host, learn};
use crate::env::{ConnectLatency, ConnectOutcome, Counters, Health, OpenConnections, Pods};
use crate::report;
use crate::select::{health, load};
use crate::sock::{CLOSE, ESTABLISHED, SYN_SENT, TcpEvent, TcpEventKind};

/// Return value: the kernel proceeds as it would without the program.
const GO_ON: u32 = 1;

/// What an event of a TCP socket needs.
pub trait EventMaps: Health + Counters + Pods + ConnectLatency + OpenConnections {}

impl<M: Health + Counters + Pods + ConnectLatency + OpenConnections> EventMaps for M {}

/// Handles an event of a TCP socket.
#[inline(always)]
pub fn handle_event<M: EventMaps, E: TcpEvent>(maps: M, event: &E) -> u32 {
    // For sockets that accept connections, the program executes nothing more than this.
    match event.kind() {
        TcpEventKind::Connect => {
            let (v4, v6) = event.local();
            learn(maps, event.netns(), v4, v6);
            if observed_storage(maps, event).is_none() {
                return GO_ON;
            }
            if maps.measures_latency() {
                event.begin_measurement();
            }
            event.watch();
        }
        TcpEventKind::Timeout if event.state() == SYN_SENT => {
            note_failure(maps, event, ConnectOutcome::Retransmitted);
        }
        TcpEventKind::StateChange if event.old_state() == SYN_SENT => {
            changed(maps, event, event.new_state());
        }
        _ => {}
    }
    GO_ON
}

/// Handles a state change of a socket that has sent a SYN.
#[inline(always)]
fn changed<M: EventMaps, E: TcpEvent>(maps: M, event: &E, new: u32) {
    if new == ESTABLISHED {
        if let Some(storage) = observed_storage(maps, event) {
            if storage.watched != 0 {
                let number = client(maps, event);
                if is_host(maps, event.netns()) {
                    health::answered(maps, storage.backend_id, number);
                } else {
                    health::reached(maps, storage.backend_id, number);
                }
            }
            if storage.counted == TIMED {
                load::answered_within(maps, storage.backend_id, event.rtt());
            }
            if maps.measures_latency()
                && let Some((begun, took)) = event.since_connect()
            {
                maps.note_outcome(storage.service, storage.backend_id, ConnectOutcome::Answered(took));
                maps.keep_example(storage.service, &example(event, &storage, begun, took));
            }
        }
    } else if new == CLOSE && event.segments_in() != 0 {
        // A RST closed the socket. Without a received segment, the application has closed it.
        note_failure(maps, event, ConnectOutcome::Refused);
    }
}

#[inline(always)]
fn example<E: TcpEvent>(event: &E, storage: &SocketStorage, begun: u64, took: u64) -> SocketExample {
    let ([v4], v6) = event.local();
    SocketExample {
        begun,
        took,
        client: if storage.family == 4 { [v4, 0, 0, 0] } else { v6 },
        backend: storage.backend,
        client_port: event.local_port(),
        backend_port: storage.backend_port,
        family: storage.family.into(),
    }
}

/// Notes a failed connection of the socket's backend.
#[inline(always)]
fn note_failure<M: EventMaps, E: TcpEvent>(maps: M, event: &E, outcome: ConnectOutcome) {
    let Some(storage) = observed_storage(maps, event) else { return };
    if maps.measures_latency() {
        maps.note_outcome(storage.service, storage.backend_id, outcome);
    }
    if storage.watched == 0 {
        return;
    }
    let failure = match outcome {
        ConnectOutcome::Refused if is_host(maps, event.netns()) => Failure::Refusal,
        ConnectOutcome::Refused => Failure::RefusalInside,
        _ => Failure::Silence,
    };
    if maps.note_failure(storage.backend_id, client(maps, event), failure as u32) != 0 {
        report::refusal(maps, storage.service, Reason::EndpointEjected);
    }
}

/// Returns the client number of a socket.
#[inline(always)]
fn client<M: EventMaps, E: TcpEvent>(maps: M, event: &E) -> u32 {
    socket_client(event.netns(), maps.config().map_or(0, |config| config.flow_seed))
}

/// Returns the storage of a socket whose connection is watched or timed.
#[inline(always)]
fn observed_storage<M: EventMaps, E: TcpEvent>(maps: M, event: &E) -> Option<SocketStorage> {
    let storage = event.storage(false)?;
    // SAFETY: the socket's own storage, which only its connects change.
    let storage = unsafe { storage.read() };
    let is_observed = storage.watched != 0 || storage.counted == TIMED || maps.measures_latency();
    (storage.family != 0 && is_observed).then_some(storage)
}
