//! Describes endpoints that new connections skip.

use proxy_common::health::{
    JOIN_SECS, NO_CLIENT, Standing, TRIAL_SHARE, current, ejected_for, skip_slot, skipped_for, standing,
};

use crate::maps::view::Common;

/// Describes the health of an endpoint for the client with this number ([`proxy_common::health`]); `None`: the endpoint is
/// selected like any other.
pub(super) fn note(common: &Common, id: u32, address: &str, client: u32) -> Option<String> {
    let (now, hz) = (common.now, common.config.hz);
    let word = current(common.health.get(&id).copied()?, now, hz);
    if let Some(left) = ejected_for(word, now, hz) {
        let seconds = left.div_ceil(hz);
        return Some(format!(
            "new connections skip {address} for {seconds} s: it refused connections of two clients in a row"
        ));
    }
    let (index, tag) = skip_slot(client, id);
    let skip = common.skips.get(&index).copied().unwrap_or_default();
    let left = if client == NO_CLIENT { 0 } else { skipped_for(skip, tag, word, client, now, hz) };
    if left != 0 {
        let seconds = left.div_ceil(hz);
        return Some(format!(
            "this client skips {address} for {seconds} s: its last connection to it failed"
        ));
    }
    match standing(word, now, hz) {
        Standing::Joining => Some(format!(
            "{address} has just joined: for {JOIN_SECS} s it gets a connection only if the others fail"
        )),
        Standing::Trial => Some(format!(
            "{address} is on trial: it gets one of {TRIAL_SHARE} connections that select it, until it answers one"
        )),
        Standing::Good | Standing::Ejected => None,
    }
}
