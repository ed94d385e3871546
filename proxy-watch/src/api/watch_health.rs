//! Logs one warning for each outage, whatever the number of watches that notice it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kube::runtime::watcher::Error;
use tracing::{debug, info, warn};

use proxy_core::model::problem::chain;

/// How long a refusal must last until it is logged as a warning: an API server that has just started denies all requests until
/// it has read its roles. The pauses between two attempts grow, so a permanent refusal is logged after 5 to 20 s.
const LASTING: Duration = Duration::from_secs(5);

/// The kind of an error, as far as the reaction depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchErrorKind {
    /// The server no longer has the watch's resourceVersion: everything is listed again.
    Expired,
    /// The server does not accept the credentials.
    Unauthorized,
    /// The server denies access.
    Forbidden,
    /// The server does not have this resource.
    Missing,
    /// The server ended the watch with an error.
    Ended,
    /// The server answers, but refuses the request: it has too many (429), or does not accept this one.
    Refused,
    /// The connection broke. The watch reconnects at once; only if that fails, the server is away.
    Interrupted,
    /// The server does not answer, or not with what was requested.
    Away,
}

impl WatchErrorKind {
    /// Returns the kind of an error.
    pub fn of(error: &Error) -> Self {
        let code = match error {
            Error::WatchError(status)
            | Error::InitialListFailed(kube::Error::Api(status))
            | Error::WatchStartFailed(kube::Error::Api(status))
            | Error::WatchFailed(kube::Error::Api(status)) => status.code,
            _ => 0,
        };
        match (code, error) {
            (410, _) => Self::Expired,
            (401, _) => Self::Unauthorized,
            (403, _) => Self::Forbidden,
            (404, _) => Self::Missing,
            (429, _) => Self::Refused,
            (_, Error::WatchError(_) | Error::WatchFailed(kube::Error::Api(_))) => Self::Ended,
            (_, Error::WatchFailed(_)) => Self::Interrupted,
            (400..=499, _) => Self::Refused,
            _ => Self::Away,
        }
    }
}

/// Whether the API server is away, and which warnings were logged.
#[derive(Debug, Default)]
pub struct WatchHealth {
    away: bool,
    /// The resources whose list takes too long.
    late: BTreeSet<&'static str>,
    refusals: BTreeMap<&'static str, Refusal>,
}

/// Every attempt to watch a resource was refused since this time.
#[derive(Debug)]
struct Refusal {
    since: Instant,
    is_logged: bool,
}

impl Refusal {
    /// Handles another refusal at `now`. Returns whether it is the first one after [`LASTING`].
    fn again(&mut self, now: Instant) -> bool {
        let lasts = now.saturating_duration_since(self.since) >= LASTING;
        lasts && !std::mem::replace(&mut self.is_logged, true)
    }
}

impl WatchHealth {
    /// Logs that a watch of `resource` failed at `now`. Returns whether it logged a warning.
    pub fn failed(&mut self, resource: &'static str, error: &Error, now: Instant) -> bool {
        let kind_of_error = WatchErrorKind::of(error);
        let is_new = match kind_of_error {
            WatchErrorKind::Expired | WatchErrorKind::Interrupted => false,
            WatchErrorKind::Unauthorized
            | WatchErrorKind::Forbidden
            | WatchErrorKind::Missing
            | WatchErrorKind::Ended
            | WatchErrorKind::Refused => {
                let first = Refusal { since: now, is_logged: false };
                self.refusals.entry(resource).or_insert(first).again(now)
            }
            WatchErrorKind::Away => !std::mem::replace(&mut self.away, true),
        };
        let error = chain(error);
        match kind_of_error {
            _ if !is_new => debug!(resource, error, "a watch failed; restarting it"),
            WatchErrorKind::Unauthorized => warn!(
                resource,
                error,
                "the API server does not accept Ballast's credentials (401); check whether the client certificate or \
                 the token of the kubeconfig has expired"
            ),
            WatchErrorKind::Forbidden => warn!(
                resource,
                error,
                "the API server denies access; Ballast's account needs `list` and `watch` on this resource"
            ),
            WatchErrorKind::Missing => {
                warn!(resource, error, "the API server does not have this resource; continuing without it");
            }
            WatchErrorKind::Ended => warn!(
                resource,
                error,
                "the API server ends the watch with an error each time; programmed Services keep working; listing again"
            ),
            WatchErrorKind::Refused => warn!(
                resource,
                error, "the API server refuses the request; programmed Services keep working; retrying"
            ),
            _ => warn!(
                resource,
                error, "the API server does not answer; programmed Services keep working; retrying"
            ),
        }
        is_new
    }

    /// Logs that the list of `resource` has been incomplete for a long time. Returns whether it logged a warning: a server
    /// that is late with several lists is warned of once.
    pub fn late(&mut self, resource: &'static str) -> bool {
        let is_new = self.late.is_empty() && !self.away;
        if self.late.insert(resource) && is_new {
            warn!(
                resource,
                "the API server does not complete its list; programmed Services keep working; waiting, then \
                 requesting a whole list"
            );
            return true;
        }
        debug!(resource, "the list is still incomplete");
        false
    }

    /// Ends the outage: an event of `resource` has arrived, or (`None`) no watch has failed for a while.
    pub fn recovered(&mut self, resource: Option<&'static str>) {
        if std::mem::take(&mut self.away) {
            info!("the API server answers again");
        }
        if let Some(resource) = resource
            && self.late.remove(resource)
            && self.late.is_empty()
        {
            info!(resource, "the API server has completed its lists");
        }
        if let Some(resource) = resource
            && self.refusals.remove(resource).is_some_and(|refusal| refusal.is_logged)
        {
            info!(resource, "the API server allows the watch again");
        }
    }

    /// Whether the server is considered away.
    pub const fn is_away(&self) -> bool {
        self.away
    }
}

#[cfg(test)]
mod tests;
