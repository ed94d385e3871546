//! The endpoints that a connection may go to, and the source address that each of them sees.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use proxy_common::Address;
use proxy_common::affinity::AffinityEntry;
use proxy_common::backend::{BACKEND_LOCAL, BACKEND_TERMINATING, weight_of};
use proxy_common::decide::{self, Source};
use proxy_common::reason::Reason;
use proxy_common::select::Algorithm;
use proxy_common::service::{SERVICE_EJECTS, ServiceEntry};

use super::health::note;
use super::outcome::Candidate;
use super::walk::Walk;

impl<A: Address + Into<IpAddr>> Walk<'_, A> {
    pub(super) fn affinity(&mut self, service: &ServiceEntry, entry: Option<AffinityEntry>) {
        let common = &self.rules.common;
        let secs = service.affinity_secs;
        let found = match entry {
            None => format!("enabled for {secs} s; the client has no entry yet"),
            Some(entry) => {
                let id = entry.backend_id;
                let backend = self.rules.backends.get(&id);
                if !decide::is_in_time(&entry, service, common.now, common.config.hz) {
                    format!("the client used endpoint {id}, but more than {secs} s ago")
                } else if backend.is_some_and(|backend| decide::may_stay(backend, service)) {
                    format!("the client keeps endpoint {id}")
                } else {
                    format!("the client used endpoint {id}, which is not usable any more")
                }
            }
        };
        self.step("affinity", found);
    }

    pub(super) fn endpoints(
        &mut self,
        service: &ServiceEntry,
        client: u32,
        source: impl Fn(&A, u32) -> Option<&'static str>,
    ) -> Result<(), Reason> {
        if service.slot_count == 0 {
            self.step("endpoints", "none");
            return Err(decide::no_endpoint_reason(service));
        }
        let slots = &self.rules.common.slots;
        let first = (service.slot_base as usize).min(slots.len());
        let end = first.saturating_add(service.slot_count as usize).min(slots.len());
        let found = slots[first..end].iter().filter_map(|id| {
            let backend = self.rules.backends.get(id)?;
            let (local, terminating) = flags(backend.flags);
            Some(Candidate {
                id: *id,
                address: SocketAddr::new(backend.addr.into(), backend.port).to_string(),
                local,
                weight: weight_of(backend.flags),
                terminating,
                serves: decide::serves(backend, service),
                source: source(&backend.addr, backend.flags),
            })
        });
        // An endpoint has as many slots as its share.
        let mut met = BTreeSet::new();
        self.path.candidates = found.filter(|one: &Candidate| met.insert(one.id)).collect();
        let count = self.path.candidates.iter().filter(|one| one.serves).count();
        let how = Algorithm::from_number(service.algorithm).unwrap_or_default();
        let found = match count {
            1 => "selects the only one".to_owned(),
            _ => format!("selects one of {count}, {}", manner(how)),
        };
        self.step("endpoints", found);
        let is_skipped = |one: &Candidate| note(&self.rules.common, one.id, &one.address, client);
        let ejects = service.flags & SERVICE_EJECTS != 0;
        let skipped: Vec<_> = self.path.candidates.iter().filter_map(is_skipped).filter(|_| ejects).collect();
        for note in skipped {
            self.step("ejection", note);
        }
        if count == 0 { Err(Reason::MapInconsistent) } else { Ok(()) }
    }
}

/// Used instead of a [`word`] if the endpoint's node answers the client directly.
pub(super) const DSR: &str = "dsr";

/// Used instead of a [`word`] if client and endpoint are processes of this node, and the connection is refused.
pub(super) const OWN: &str = "own-endpoint";

/// Used instead of a [`word`] if netfilter masquerades the connection.
pub(super) const NETFILTER: &str = "netfilter";

/// Returns the word for tables and JSON.
pub(super) const fn word(source: Source) -> &'static str {
    match source {
        Source::Kept => "kept",
        Source::Hairpin => "hairpin",
        Source::Remote => "remote",
        Source::All => "masquerade-all",
        Source::Local => "node",
    }
}

/// Returns whether an endpoint is local and whether it is terminating, as in [`Candidate`].
pub(super) fn flags(flags: u32) -> (bool, bool) {
    (flags & BACKEND_LOCAL != 0, flags & BACKEND_TERMINATING != 0)
}

/// Returns in words how one of several endpoints is selected.
const fn manner(how: Algorithm) -> &'static str {
    match how {
        Algorithm::Random => "randomly",
        Algorithm::RoundRobin | Algorithm::WeightedRoundRobin => "in turn (round robin)",
        Algorithm::SourceHash => "by a hash of the client's address",
        Algorithm::DestinationHash => "by a hash of the destination address",
        Algorithm::Maglev => "by a hash of addresses and ports (Maglev)",
        Algorithm::LeastConnections => "the one of two random ones with fewer open connections",
        Algorithm::WeightedLeastConnections => {
            "the one of two random ones with fewer open connections for its weight"
        }
        Algorithm::ShortestExpectedDelay => "the one of two random ones with the shorter expected delay",
        Algorithm::NeverQueue => {
            "of two random ones an idle one, otherwise the one with the shorter expected delay"
        }
        Algorithm::Latency => {
            "the one of three random ones with the smallest product of open connections and time to the first answer"
        }
    }
}
