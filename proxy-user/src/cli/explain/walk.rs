//! Applies rules one by one, and records the results.

use std::net::{IpAddr, SocketAddr};

use proxy_common::Address;
use proxy_common::service::ServiceKey;

use super::outcome::{Path, PathOutcome, Step};
use crate::maps::view::{Rules, Transport};
use proxy_cli::question::Client;

/// The rules, the key of the connection, and the steps so far.
pub(super) struct Walk<'a, A: Address> {
    pub(super) rules: &'a Rules<A>,
    pub(super) key: ServiceKey<A>,
    pub(super) path: Path,
    /// The client is known to be a pod of this node.
    pub(super) is_pod: bool,
}

impl<'a, A: Address + Into<IpAddr>> Walk<'a, A> {
    pub(super) fn new(rules: &'a Rules<A>, key: ServiceKey<A>, client: Client) -> Self {
        let path = Path {
            steps: Vec::new(),
            service: None,
            candidates: Vec::new(),
            outcome: PathOutcome::Untouched,
        };
        Self { rules, key, path, is_pod: matches!(client, Client::Pod(_)) }
    }

    pub(super) fn step(&mut self, rule: &'static str, found: impl Into<String>) {
        self.path.steps.push(Step { rule, found: found.into() });
    }

    pub(super) fn end(mut self, outcome: PathOutcome) -> Path {
        self.path.outcome = outcome;
        self.path
    }

    /// Ends with a step after which the connection passes as it is.
    pub(super) fn untouched(mut self, rule: &'static str, found: impl Into<String>) -> Path {
        self.step(rule, found);
        self.end(PathOutcome::Untouched)
    }

    pub(super) fn destination(&self) -> String {
        let ServiceKey { addr, port, proto, .. } = self.key;
        format!("{}/{}", SocketAddr::new(addr.into(), port), Transport(proto))
    }
}
