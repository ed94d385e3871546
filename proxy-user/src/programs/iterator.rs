//! The programs that list sockets which were translated for a Service, and the maps that they read.

use std::fmt;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::AsFd as _;
use std::path::Path;

use aya::Btf;
use aya::maps::{MapData, MapInfo};
use aya::programs::Iter;
use proxy_common::map_names::SOCKET_STORAGE;
use proxy_common::socket::TranslatedSocket;

use super::bpf::Link;
use super::error::Error;
use super::hooks::{ALL_ITERATOR, TCP_ITERATOR, UDP_ITERATOR};
use super::object::{self, EMBEDDED};
use super::pins::Paths;
use super::privileges;
use super::program::{program_mut, refused};

/// The file with the kernel's types (`CONFIG_DEBUG_INFO_BTF`).
const BTF: &str = "/sys/kernel/btf/vmlinux";
/// Bytes read at once: the kernel returns no more.
const CHUNK: usize = 1 << 15;

/// The sockets that an iterator lists, of those that are connected to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iterated {
    /// The UDP sockets of the calling thread's network namespace.
    Udp,
    /// The TCP sockets of the calling thread's network namespace.
    Tcp,
    /// The sockets of all network namespaces.
    All,
}

impl Iterated {
    /// Returns the names of the program, and of what the kernel lets it iterate over.
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Udp => (UDP_ITERATOR, "udp"),
            Self::Tcp => (TCP_ITERATOR, "tcp"),
            Self::All => (ALL_ITERATOR, "bpf_sk_storage_map"),
        }
    }
}

/// An iterator over sockets, loaded and ready.
pub struct SocketIterator(Link);

impl fmt::Debug for SocketIterator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SocketIterator")
    }
}

impl SocketIterator {
    /// Loads the program on the pinned maps. Reading the kernel's types takes longer than all other steps of a start, so the
    /// agent calls this later. The program and its link stay open; all other files that it needed are closed.
    pub(super) fn load(bytes: &[u8], paths: &Paths, which: Iterated) -> Result<Self, Error> {
        let (name, over) = which.names();
        let types = Btf::from_sys_fs().map_err(|source| Error::NoBtf { path: BTF, source: source.into() })?;
        let mut ebpf = object::open_on(bytes, paths, &[])?;
        let program: &mut Iter = program_mut(&mut ebpf, name)?;
        program.load(over, &types).map_err(refused(name))?;
        let fd = program.fd().map_err(refused(name))?;
        let storage = match which {
            Iterated::Udp | Iterated::Tcp => None,
            Iterated::All => Some(MapData::from_pin(paths.maps().join(SOCKET_STORAGE))),
        };
        let storage = storage.transpose().map_err(|source| Error::Map { name: SOCKET_STORAGE, source })?;
        let link = Link::to_iterator(fd.as_fd(), storage.as_ref().map(|map| map.fd().as_fd()));
        let failed = |source| Error::Attach { program: name, place: "the sockets".to_owned(), source };
        link.map(Self).map_err(failed)
    }

    /// Lists the sockets.
    pub fn list(&self) -> io::Result<Vec<TranslatedSocket>> {
        sockets(&read(&self.0)?)
    }
}

/// Runs an iterator, and returns the output of its program.
fn read(link: &Link) -> io::Result<Vec<u8>> {
    let mut file = link.iterate()?;
    let (mut bytes, mut chunk) = (Vec::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(bytes),
            Ok(count) => bytes.extend(chunk.iter().take(count)),
            // After a million sockets without output, the kernel returns early, and has to be asked again.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Splits the program's output into records.
fn sockets(bytes: &[u8]) -> io::Result<Vec<TranslatedSocket>> {
    let (records, rest) = bytes.as_chunks::<{ size_of::<TranslatedSocket>() }>();
    if !rest.is_empty() {
        return Err(io::Error::new(ErrorKind::InvalidData, "the last record of the iterator is truncated"));
    }
    // SAFETY: a record has the size of a `TranslatedSocket`, of which every bit pattern is a value (`Plain`).
    Ok(records
        .iter()
        .map(|record| unsafe { record.as_ptr().cast::<TranslatedSocket>().read_unaligned() })
        .collect())
}

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
            Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_whole_or_not_at_all() {
        assert_eq!(sockets(&[]).unwrap(), []);
        let mut bytes = vec![0; 2 * size_of::<TranslatedSocket>()];
        bytes[size_of::<TranslatedSocket>()..][..8].copy_from_slice(&7u64.to_ne_bytes());
        let found: Vec<_> = sockets(&bytes).unwrap().iter().map(|socket| socket.cookie).collect();
        assert_eq!(found, [0, 7]);
        bytes.pop();
        assert_eq!(sockets(&bytes).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
