//! Why the maps could not be read, and the way out.

use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapError;
use proxy_common::event::LEASES;

/// An error of [`View`](super::View).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// Nothing of ours is there.
    #[error(
        "no Ballast maps on the bpffs {}: start `ballast run`, or give the agent's bpffs with --bpffs", bpffs.display()
    )]
    Nothing {
        /// Where it was looked for.
        bpffs: PathBuf,
    },
    /// An older or newer Ballast is there.
    #[error(
        "{} has maps of ABI version {found}, and this binary reads ABI version {expected}: use the same binary as the agent", root.display()
    )]
    OtherVersion {
        /// Our folder.
        root: PathBuf,
        /// The layout there.
        found: u32,
        /// The layout here.
        expected: u32,
    },
    /// The caller may not look.
    #[error("no permission to read {}: run as root (or with CAP_BPF, as the owner of the pins)", path.display())]
    Denied {
        /// What may not be read.
        path: PathBuf,
    },
    /// A pin cannot be opened.
    #[error("cannot open {}: {source}; start `ballast run`, which creates missing maps", path.display())]
    Open {
        /// The pin.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The pin is not what its name says.
    #[error(
        "{} is not a map of Ballast: its {what} is {found} instead of {expected}; `ballast cleanup` removes it, and `ballast run` creates a new one", path.display()
    )]
    Shape {
        /// The pin.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// How it is.
        found: String,
        /// How it should be.
        expected: String,
    },
    /// The entries of a map cannot be listed.
    #[error("cannot list the entries of {name}: {}", if name == "events" { "`ballast monitor` shows the events live" } else { "each entry belongs to a socket, and is removed with it" })]
    NoEntries {
        /// The map.
        name: String,
    },
    /// No more monitors can listen.
    #[error("{LEASES} monitors are already running: stop one of them")]
    TooMany,
    /// The map cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The pin.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// aya could not read the map.
    #[error("cannot read {}: {source}", path.display())]
    Map {
        /// The pin.
        path: PathBuf,
        /// Why not.
        source: Box<MapError>,
    },
}

impl ViewError {
    /// An error of aya about the pin at `path`.
    pub(super) fn map(path: &Path, source: MapError) -> Self {
        let denied = matches!(&source, MapError::SyscallError(e)
            if matches!(e.io_error.kind(), io::ErrorKind::PermissionDenied));
        match source {
            _ if denied => Self::Denied { path: path.to_owned() },
            MapError::SyscallError(e) if e.call == "BPF_OBJ_GET" => {
                Self::Open { path: path.to_owned(), source: e.io_error }
            }
            source => Self::Map { path: path.to_owned(), source: Box::new(source) },
        }
    }
}
