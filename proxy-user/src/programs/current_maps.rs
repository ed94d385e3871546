//! The maps that an agent has filled, for other processes that read them.

use std::io;
use std::path::Path;

use aya::maps::MapInfo;
use proxy_common::map_names::SOCKET_STORAGE;

use super::embedded::EMBEDDED;
use super::error::Error;
use super::iterator::{Iterated, SocketIterator};
use super::pins::Paths;
use super::privileges;

/// The maps that the attached programs use.
#[derive(Clone, Debug)]
pub struct CurrentMaps {
    paths: Paths,
    /// Id of one of the maps: maps that are created anew have other ids.
    id: u32,
}

impl CurrentMaps {
    /// Finds the maps below this bpffs; `None` while no agent has attached programs that use them. Fails if a user other
    /// than root could have put the maps there.
    pub fn find(bpffs: &Path) -> Result<Option<Self>, Error> {
        privileges::require()?;
        let paths = Paths::new(bpffs);
        match paths.require_owner() {
            Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            checked => checked?,
        }
        Ok(if paths.is_current() { id(&paths).map(|id| Self { paths, id }) } else { None })
    }

    /// Whether the attached programs still use these maps: an upgrade or `ballast cleanup` may have replaced them.
    pub fn still(&self) -> bool {
        self.paths.is_current() && id(&self.paths) == Some(self.id)
    }

    /// Does the same as [`Programs::socket_iterator`](super::Programs::socket_iterator).
    pub fn socket_iterator(&self, which: Iterated) -> Result<SocketIterator, Error> {
        SocketIterator::load(EMBEDDED, &self.paths, which)
    }
}

fn id(paths: &Paths) -> Option<u32> {
    MapInfo::from_pin(paths.maps().join(SOCKET_STORAGE)).ok().map(|info| info.id())
}
