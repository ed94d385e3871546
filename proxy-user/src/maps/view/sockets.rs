//! The endpoints to which socket load balancing has translated sockets.

use std::collections::BTreeSet;
use std::fmt;
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};

use aya::maps::MapType;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_RESET, BackendEntry};
use proxy_common::map_names as map;
use proxy_common::socket::{SocketEntry, SocketKey, SocketStorage, TO_FRONTEND, TranslatedSocket};
use proxy_common::{Address, PROTO_UDP};

use super::{View, ViewError};
use crate::maps::family::MapFamily;
use crate::maps::mapping::Mapping;

/// A socket that socket load balancing translated to an endpoint that was removed from the Service since. The socket may be
/// closed by now, or translated to another endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StaleSocket {
    /// The kernel's cookie of the socket.
    pub cookie: u64,
    /// The endpoint that the socket was translated to.
    pub endpoint: SocketAddr,
    /// The id that the endpoint had.
    pub backend_id: u32,
}

/// The endpoints that serve, of both families.
pub struct ServingEndpoints {
    v4: Mapping,
    v6: Mapping,
}

impl fmt::Debug for ServingEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServingEndpoints")
    }
}

impl ServingEndpoints {
    /// Returns the UDP endpoints that serve: family, id, and id of the Service port. A removed endpoint is missing from then
    /// on.
    pub fn udp(&self) -> BTreeSet<(u8, u32, u32)> {
        let v4 = udp::<[u8; 4]>(&self.v4).map(|(id, service)| (4, id, service));
        v4.chain(udp::<[u8; 16]>(&self.v6).map(|(id, service)| (6, id, service))).collect()
    }

    /// Returns the endpoints whose connections are reset, in the form of [`ServingEndpoints::udp`].
    pub fn reset(&self) -> BTreeSet<(u8, u32, u32)> {
        let v4 = in_state::<[u8; 4]>(&self.v4, BACKEND_RESET).map(|(id, row)| (4, id, row.service));
        let v6 = in_state::<[u8; 16]>(&self.v6, BACKEND_RESET).map(|(id, row)| (6, id, row.service));
        v4.chain(v6).collect()
    }

    /// Returns the socket, if its endpoint has left its Service, and connections to it are reset.
    pub fn to_be_reset(&self, led: &TranslatedSocket) -> Option<StaleSocket> {
        let is_reset = self.row(led).is_some_and(|(state, _)| state == BACKEND_RESET);
        self.stale(led).filter(|_| is_reset)
    }

    /// Whether the endpoint that the socket was translated to has left its Service, and may be one of UDP.
    pub fn may_be_left_by_udp(&self, led: &TranslatedSocket) -> bool {
        self.row(led).is_some_and(|(state, proto)| state != BACKEND_ACTIVE && [0, PROTO_UDP].contains(&proto))
    }

    /// Returns state and protocol of the endpoint that the socket was translated to, while it has a row.
    fn row(&self, led: &TranslatedSocket) -> Option<(u8, u8)> {
        match led.storage.family {
            4 => row_of::<[u8; 4]>(&self.v4, &led.storage),
            6 => row_of::<[u8; 16]>(&self.v6, &led.storage),
            _ => None,
        }
    }

    /// Returns the socket as a stale one; `None` while its endpoint serves the Service that the socket was translated for.
    pub fn stale(&self, led: &TranslatedSocket) -> Option<StaleSocket> {
        let TranslatedSocket { cookie, storage } = led;
        let ip = match storage.family {
            4 => left_by::<[u8; 4]>(&self.v4, storage)?,
            6 => left_by::<[u8; 16]>(&self.v6, storage)?,
            // The socket is not connected to a Service any more.
            _ => return None,
        };
        let endpoint = SocketAddr::new(ip, storage.backend_port);
        Some(StaleSocket { cookie: *cookie, endpoint, backend_id: storage.backend_id })
    }
}

fn row_of<A: Address>(rows: &Mapping, storage: &SocketStorage) -> Option<(u8, u8)> {
    let row = rows.read::<BackendEntry<A>>(storage.backend_id as usize)?;
    let is_same = row.service == storage.service
        && row.port == storage.backend_port
        && row.addr == A::from_words(storage.backend);
    is_same.then_some((row.state, row.proto))
}

/// Returns the address of the endpoint that the socket was translated to, if it does not serve any more.
fn left_by<A: Address + Into<IpAddr>>(rows: &Mapping, storage: &SocketStorage) -> Option<IpAddr> {
    let SocketStorage { backend_id, service, backend_port, .. } = *storage;
    let addr = A::from_words(storage.backend);
    (!is_serving(rows, backend_id, service, addr, backend_port)).then(|| addr.into())
}

fn udp<A: Address>(rows: &Mapping) -> impl Iterator<Item = (u32, u32)> {
    let serving = in_state::<A>(rows, BACKEND_ACTIVE);
    serving.filter(|(_, row)| row.proto == PROTO_UDP).map(|(id, row)| (id, row.service))
}

/// Returns the rows in a state, by id.
fn in_state<A: Address>(rows: &Mapping, wanted: u8) -> impl Iterator<Item = (u32, BackendEntry<A>)> {
    let state = offset_of!(BackendEntry<A>, state);
    let meant = (0..rows.len()).filter(move |id| rows.byte(*id, state) == Some(wanted));
    meant.filter_map(|id| Some((id as u32, rows.read::<BackendEntry<A>>(id)?)))
}

fn is_serving<A: Address>(rows: &Mapping, id: u32, service: u32, addr: A, port: u16) -> bool {
    // An id beyond the mapping is newer than it: the next look decides.
    let row = rows.read::<BackendEntry<A>>(id as usize);
    row.is_none_or(|row| row.service == service && row.serves(addr, port))
}

impl View {
    /// Returns the endpoints that serve; later changes are visible in the result.
    pub fn serving_endpoints(&self) -> Result<ServingEndpoints, ViewError> {
        Ok(ServingEndpoints {
            v4: self.pin(map::BACKENDS, MapType::Array)?.mapped::<BackendEntry<[u8; 4]>>()?,
            v6: self.pin(map::BACKENDS6, MapType::Array)?.mapped::<BackendEntry<[u8; 16]>>()?,
        })
    }

    /// Returns all stale sockets that `sockets` and `sockets6` remember; a connected socket has a storage of its own.
    pub fn stale(&self) -> Result<BTreeSet<StaleSocket>, ViewError> {
        let mut all = self.stranded_of::<[u8; 4]>()?;
        all.append(&mut self.stranded_of::<[u8; 16]>()?);
        Ok(all)
    }

    fn stranded_of<A: MapFamily>(&self) -> Result<BTreeSet<StaleSocket>, ViewError> {
        let entries = self.pin(A::SOCKETS, MapType::Hash)?.all::<SocketKey<A>, SocketEntry<A>>()?;
        let rows = self.pin(A::BACKENDS, MapType::Array)?.mapped::<BackendEntry<A>>()?;
        let is_led = |key: &SocketKey<A>| key.direction == TO_FRONTEND && key.proto == PROTO_UDP;
        let serves = |key: &SocketKey<A>, entry: &SocketEntry<A>| {
            is_serving(&rows, entry.backend_id, entry.service, key.addr, key.port)
        };
        let stale = entries.into_iter().filter(|(key, entry)| is_led(key) && !serves(key, entry));
        Ok(stale
            .map(|(key, entry)| StaleSocket {
                cookie: key.cookie,
                endpoint: SocketAddr::new(key.addr.into(), key.port),
                backend_id: entry.backend_id,
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::atomic::Ordering;

    use proxy_common::PROTO_TCP;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn socket_of_a_removed_udp_endpoint_may_be_left() {
        type Row = BackendEntry<[u8; 4]>;
        let rows = |size: usize| {
            let file = memfd_create("socket-rows", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, 8 * size.next_multiple_of(8) as u64).unwrap();
            Mapping::new(file.as_fd(), size, 8).unwrap()
        };
        let endpoints =
            ServingEndpoints { v4: rows(size_of::<Row>()), v6: rows(size_of::<BackendEntry<[u8; 16]>>()) };
        let set = |id, at: usize, value: u32| {
            endpoints.v4.word32(id, at / 4).unwrap().fetch_or(value << (8 * (at % 4)), Ordering::Relaxed);
        };
        let rows =
            [(1, PROTO_UDP, BACKEND_ACTIVE), (2, PROTO_UDP, BACKEND_RESET), (3, PROTO_TCP, BACKEND_RESET)];
        for (id, proto, state) in rows {
            set(id, offset_of!(Row, proto), proto.into());
            set(id, offset_of!(Row, state), state.into());
        }
        let of = |backend_id, service| {
            let storage = SocketStorage { family: 4, backend_id, service, ..SocketStorage::default() };
            endpoints.may_be_left_by_udp(&TranslatedSocket { cookie: 1, storage })
        };
        assert_eq!([1, 2, 3, 9].map(|id| of(id, 0)), [false, true, false, false], "row 9 is not mapped");
        assert!(!of(2, 5), "the row is of another Service by now");
    }
}
