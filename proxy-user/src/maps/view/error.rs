//! Errors of reading the maps; the messages say what to do.

use std::io;
use std::path::{Path, PathBuf};

use aya::maps::MapError;
use proxy_common::event::LEASES;

use crate::maps::sys;

/// An error of [`View`](super::View).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The bpffs has no maps of Ballast.
    #[error(
        "no Ballast maps on the bpffs {}: start `ballast run`, or give the agent's bpffs with --bpffs", bpffs.display()
    )]
    Nothing {
        /// The bpffs that was searched.
        bpffs: PathBuf,
    },
    /// There is no bpffs.
    #[error("{}; {}", sys::no_bpffs(path), sys::GIVE_BPFFS)]
    NoBpffs {
        /// Where it was expected.
        path: PathBuf,
    },
    /// The maps belong to an older or newer version of Ballast.
    #[error(
        "{} has maps of ABI version {found}, and this binary reads ABI version {expected}: use the same binary as the agent", root.display()
    )]
    OtherVersion {
        /// Ballast's folder.
        root: PathBuf,
        /// The ABI version of the maps.
        found: u32,
        /// The ABI version of this binary.
        expected: u32,
    },
    /// The caller has no permission.
    #[error("no permission to read {}: run as root (or with CAP_BPF, as the owner of the pins)", path.display())]
    Denied {
        /// The path that cannot be read.
        path: PathBuf,
    },
    /// The bpffs is mounted read-only: a map can be opened only for reading and writing.
    #[error("{}", sys::read_only(mount))]
    ReadOnly {
        /// Its mount point.
        mount: PathBuf,
    },
    /// A pin cannot be opened.
    #[error("cannot open {}: {source}{}", path.display(), hint(source))]
    Open {
        /// The pin.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A pinned map has not the shape that belongs to its name.
    #[error(
        "{} is not a map of Ballast: its {what} is {found} instead of {expected}; `ballast cleanup` removes it, and `ballast run` creates a new one", path.display()
    )]
    Shape {
        /// The pin.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// The value of the pinned map.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The entries of a map cannot be listed.
    #[error("cannot list the entries of {name}: {}", if name == "events" { "`ballast monitor` shows the events live" } else { "each entry belongs to a socket, and is removed with it" })]
    NoEntries {
        /// The map.
        name: String,
    },
    /// No more monitors can listen, because all leases are held.
    #[error("{LEASES} monitors are already running: stop one of them")]
    TooMany,
    /// The map cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The pin.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// aya could not read the map.
    #[error("cannot read {}: {source}", path.display())]
    Map {
        /// The pin.
        path: PathBuf,
        /// The cause.
        source: Box<MapError>,
    },
}

impl ViewError {
    /// Returns the error for an error of aya about the pin at `path`.
    pub(super) fn map(path: &Path, source: MapError) -> Self {
        let denied = matches!(&source, MapError::SyscallError(e)
            if matches!(e.io_error.kind(), io::ErrorKind::PermissionDenied));
        match source {
            _ if denied => Self::Denied { path: path.to_owned() },
            MapError::SyscallError(e) if e.io_error.raw_os_error() == Some(libc::EROFS) => {
                Self::ReadOnly { mount: sys::mount_point(path) }
            }
            MapError::SyscallError(e) if e.call == "BPF_OBJ_GET" => {
                Self::Open { path: path.to_owned(), source: e.io_error }
            }
            source => Self::Map { path: path.to_owned(), source: Box::new(source) },
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; start `ballast run`, which creates missing maps",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use aya::sys::SyscallError;

    use super::*;

    #[test]
    fn pin_that_cannot_be_opened_has_the_advice_for_its_cause() {
        let text = |code| {
            let io_error = io::Error::from_raw_os_error(code);
            let source = MapError::SyscallError(SyscallError { call: "BPF_OBJ_GET", io_error });
            ViewError::map(Path::new("/proc/sys/net"), source).to_string()
        };
        assert!(text(libc::ENOENT).ends_with("start `ballast run`, which creates missing maps"));
        assert!(text(libc::EROFS).starts_with("/proc is mounted read-only; mount it read-write"));
        assert!(text(libc::EMFILE).ends_with("Too many open files (os error 24)"));
    }
}
