//! Where sockets were led to.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use aya::maps::MapType;
use proxy_common::abi::Plain;
use proxy_common::backend::BackendEntry;
use proxy_common::map_names as map;
use proxy_common::socket::{SocketEntry, SocketKey, TO_FRONTEND};
use proxy_common::{Address, PROTO_UDP};

use super::{View, ViewError};

/// A UDP socket that a Service led to an endpoint that has left it since. It may be gone, and it may have been led
/// elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stranded {
    /// The kernel's cookie of the socket.
    pub cookie: u64,
    /// Where it was led to.
    pub endpoint: SocketAddr,
    /// The id that the endpoint had.
    pub backend_id: u32,
}

impl View {
    /// Every one that is remembered, of both families.
    pub fn stranded(&self) -> Result<BTreeSet<Stranded>, ViewError> {
        let mut all = self.stranded_of::<[u8; 4]>(map::SOCKETS, map::BACKENDS)?;
        all.append(&mut self.stranded_of::<[u8; 16]>(map::SOCKETS6, map::BACKENDS6)?);
        Ok(all)
    }

    fn stranded_of<A>(
        &self,
        sockets: &'static str,
        backends: &'static str,
    ) -> Result<BTreeSet<Stranded>, ViewError>
    where
        A: Address + Into<IpAddr>,
        SocketKey<A>: Plain,
        SocketEntry<A>: Plain,
        BackendEntry<A>: Plain,
    {
        let entries = self.pin(sockets, MapType::LruHash)?.all::<SocketKey<A>, SocketEntry<A>>()?;
        let rows = self.pin(backends, MapType::Array)?.mapped::<BackendEntry<A>>()?;
        let is_led = |key: &SocketKey<A>| key.direction == TO_FRONTEND && key.proto == PROTO_UDP;
        let serves = |key: &SocketKey<A>, entry: &SocketEntry<A>| {
            let row = rows.read::<BackendEntry<A>>(entry.backend_id as usize);
            row.is_some_and(|row| row.service == entry.service && row.serves(key.addr, key.port))
        };
        let stranded = entries.into_iter().filter(|(key, entry)| is_led(key) && !serves(key, entry));
        Ok(stranded
            .map(|(key, entry)| Stranded {
                cookie: key.cookie,
                endpoint: SocketAddr::new(key.addr.into(), key.port),
                backend_id: entry.backend_id,
            })
            .collect())
    }
}
