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
        "no Ballast on the bpffs {}: start `ballast run`, or name the bpffs it uses with --bpffs", bpffs.display()
    )]
    Nothing {
        /// Where it was looked for.
        bpffs: PathBuf,
    },
    /// An older or newer Ballast is there.
    #[error(
        "{} has maps of layout {found}, and this binary reads layout {expected}: use the binary that the agent runs", root.display()
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
    #[error("{} may not be read: run as root (or with CAP_BPF, as the owner of the pins)", path.display())]
    Denied {
        /// What may not be read.
        path: PathBuf,
    },
    /// A pin cannot be opened.
    #[error("{} cannot be opened: {source}; start `ballast run` to make what is missing", path.display())]
    Open {
        /// The pin.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The pin is not what its name says.
    #[error(
        "{} is not one of Ballast's maps: its {what} is {found} where {expected} is expected; `ballast cleanup` removes it, `ballast run` makes it anew", path.display()
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
    #[error("the entries of {name} cannot be listed: {}", if name == "events" { "`ballast monitor` shows them as they come" } else { "each belongs to a socket, and goes with it" })]
    NoEntries {
        /// The map.
        name: String,
    },
    /// No more monitors can listen.
    #[error("{LEASES} monitors listen already: end one of them")]
    TooMany,
    /// The map cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// The pin.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// aya could not read the map.
    #[error("{} cannot be read: {source}", path.display())]
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
