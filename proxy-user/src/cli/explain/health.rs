//! Describes endpoints that new connections skip.

use proxy_common::health::{Standing, TRIAL_SHARE, current, ejected_for, skipped_for, standing};

use crate::maps::view::Common;

/// Describes the health of an endpoint for the client with this number ([`proxy_common::health`]); `None`: the endpoint is
/// selected like any other.
pub(super) fn note(common: &Common, id: u32, address: &str, client: u32) -> Option<String> {
    let (now, hz) = (common.now, common.config.hz);
    let word = current(common.health.get(&id).copied()?, now, hz);
    let seconds = ejected_for(word, now, hz).map(|left| left.div_ceil(hz));
    match (standing(word, client, now, hz), seconds) {
        (Standing::Ejected, Some(seconds)) => Some(format!(
            "new connections skip {address} for {seconds} s: connections of two clients in a row failed"
        )),
        (Standing::Ejected, None) => {
            let seconds = skipped_for(word, now, hz).div_ceil(hz);
            Some(format!("this client skips {address} for {seconds} s: its last connection to it failed"))
        }
        (Standing::Trial, _) => Some(format!(
            "{address} is on trial: it gets one of {TRIAL_SHARE} connections that select it, until it answers one"
        )),
        (Standing::Good, _) => None,
    }
}
