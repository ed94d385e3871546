//! Maps that both versions use.

use std::path::Path;

use aya::maps::MapData;

use crate::maps::migrate::SHARED;
use crate::programs::error::Error;

/// Pins those maps of the previous version in `current` that stay the same. A map that cannot be shared is created anew.
pub(in crate::programs) fn share_with(previous: &Path, current: &Path) {
    for (old, new) in SHARED {
        if let Err(error) = share(&previous.join(old), &current.join(new)) {
            tracing::warn!(map = new, %error, "cannot reuse the map of the previous version");
        }
    }
}

pub(super) fn share(from: &Path, to: &Path) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::File {
        action: "share",
        path: from.to_owned(),
        source: std::io::Error::other(error.to_string()),
    };
    let map = MapData::from_pin(from).map_err(|error| failed(&error))?;
    map.pin(to).map_err(|error| failed(&error))
}
