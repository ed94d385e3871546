//! Calls on sockets, of which the kernel would run the hooks.

mod affinity;
mod bind;
mod client;
mod connect;
mod outcome;
mod refused;
mod unconnected;

use proxy_common::select::Algorithm;
use proxy_common::service::SERVICE_EJECTS;

use super::*;
use crate::env::EventKind;
use crate::host::sock::{HostCall, HostSock};
use crate::sock::{CLOSE, ESTABLISHED, Sockaddr as _};
use crate::socket::{call, release};

/// Network namespaces.
const NODE: u64 = 10;
const POD_A: u64 = 11;
const POD_B: u64 = 12;
const FOREIGN: u64 = 13;
/// The cgroup of all pods.
const PODS: u64 = 100;

const EPERM: i32 = 1;
const ETIMEDOUT: i32 = 110;
const ECONNREFUSED: i32 = 111;

/// Returns the maps of a node with Service 1, which has one endpoint for each protocol, and pods that are known by their cgroup.
fn socket_maps<F: Net>() -> HostMaps<F> {
    let maps = maps::<F>(BACKEND_LOCAL);
    maps.edit_config(|config| (config.host_netns, config.pod_cgroups) = (NODE, [PODS, 0]));
    maps
}

/// Makes a process in this network namespace the current one, and returns a new socket of it.
fn socket<F: Net>(maps: HostMaps<F>, netns: u64, proto: u8) -> HostSock {
    let cgroups: &[u64] = match netns {
        POD_A | POD_B => &[50, PODS, 101, 102],
        _ => &[50, 51],
    };
    maps.set_cgroups(cgroups);
    HostSock::new(netns, u64::from(maps.random()), proto)
}

/// Returns the address that a call leads to, or the error.
fn result<F: Net>(maps: HostMaps<F>, call: &HostCall<'_, F>, verdict: i32) -> Result<End<F>, i32> {
    let errno = maps.take_errno();
    if verdict == 1 {
        assert_eq!(errno, None, "the call does not fail");
        return Ok((call.addr(), call.port()));
    }
    assert_eq!(verdict, 0);
    Err(errno.unwrap_or(EPERM))
}

/// connect(2). Returns the address that the kernel connects to.
fn connect<F: Net>(maps: HostMaps<F>, socket: &HostSock, (addr, port): End<F>) -> Result<End<F>, i32> {
    let call = socket.call::<F>(addr, port);
    let verdict = call::connect(maps, &call);
    let result = result(maps, &call, verdict);
    if result.is_ok() {
        socket.state.set(ESTABLISHED);
    }
    result
}

/// sendto(2) of a UDP socket. Returns the address that the kernel sends to.
fn send<F: Net>(maps: HostMaps<F>, socket: &HostSock, (addr, port): End<F>) -> Result<End<F>, i32> {
    let call = socket.call::<F>(addr, port);
    let verdict = call::send(maps, &call);
    result(maps, &call, verdict)
}

/// recvfrom(2), for which the kernel returns this address. Returns the address that the application sees.
fn seen<F: Net>(maps: HostMaps<F>, socket: &HostSock, (addr, port): End<F>) -> End<F> {
    let call = socket.call::<F>(addr, port);
    let verdict = call::restore(maps, &call);
    result(maps, &call, verdict).unwrap()
}

/// getpeername(2), in the same way.
fn peer_name<F: Net>(maps: HostMaps<F>, socket: &HostSock, (addr, port): End<F>) -> End<F> {
    let call = socket.call::<F>(addr, port);
    let verdict = call::peer_name(maps, &call);
    result(maps, &call, verdict).unwrap()
}

/// Adds a frontend of Service `id` whose endpoints are in these slots.
fn add_frontend<F: Net>(
    maps: HostMaps<F>,
    (addr, port): End<F>,
    proto: u8,
    (slot_base, ids): (u32, &[u32]),
    entry: ServiceEntry,
) {
    maps.set_slots(slot_base, ids);
    let slot_count = ids.len() as u32;
    maps.add_service(
        ServiceKey::internal(addr, port, proto),
        ServiceEntry { slot_base, slot_count, ..entry },
    );
}

/// The entry of a cluster address of Service 1.
const CLUSTER: ServiceEntry = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };

/// Returns the endpoint with this number.
fn endpoint<F: Net>(number: u8) -> End<F> {
    (F::addr(number), 8080)
}

/// The ids of three endpoints, which are also the numbers of their addresses.
const THREE: [u32; 3] = [20, 21, 22];

/// Replaces the endpoint of Service 1 by three endpoints.
fn three_endpoints<F: Net>(maps: HostMaps<F>, proto: u8, entry: ServiceEntry) {
    for id in THREE {
        add_endpoint(maps, id, endpoint::<F>(id as u8), proto);
    }
    add_frontend(maps, frontend::<F>(), proto, (60, &THREE), entry);
}

/// Returns the id of one of the three endpoints.
fn id_of<F: Net>(end: End<F>) -> u32 {
    THREE.into_iter().find(|id| endpoint::<F>(*id as u8) == end).expect("an endpoint")
}
