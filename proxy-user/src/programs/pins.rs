//! The directory in bpffs that holds all pins of Ballast.
//!
//! ```text
//! <bpffs>/ballast/services -> v1/services   the current maps, for people
//!                 v1/<map>                  maps, by the version of their layout
//!                 v1/calls/<id>             arrays of the programs that packet programs go on with
//!                 links/<hook>              links; they outlive versions, because they are updated in place
//!                 filters/<ifindex>         devices with clsact filters of ours (an empty directory)
//!                 qdiscs/<ifindex>          devices whose clsact qdisc we made
//!                 refused/<map>             pins that were not what they should be
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use proxy_common::map_names;
use proxy_common::version::ABI_VERSION;

use super::error::Error;
use crate::host::lock::{Lock, lock};
use crate::maps::segments;

/// Ballast's directory below the bpffs.
pub const DIRECTORY: &str = "ballast";

pub use crate::maps::sys::is_bpffs;

/// Mounts a bpffs at `path` unless there is one; returns whether it did.
pub fn ensure_bpffs(path: &Path) -> Result<bool, Error> {
    if is_bpffs(path) {
        return Ok(false);
    }
    let failed = |source: io::Error| Error::Mount { path: path.to_owned(), source };
    fs::create_dir_all(path).map_err(failed)?;
    // Mounting over existing files would hide them.
    if fs::read_dir(path).map_err(failed)?.next().is_some() {
        return Err(failed(io::ErrorKind::DirectoryNotEmpty.into()));
    }
    rustix::mount::mount(c"bpf", path, c"bpf", rustix::mount::MountFlags::empty(), c"mode=0700")
        .map_err(|errno| failed(errno.into()))?;
    Ok(true)
}

/// Paths of Ballast's pins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// Returns the paths below this bpffs.
    pub fn new(bpffs: &Path) -> Self {
        Self { root: bpffs.join(DIRECTORY) }
    }

    /// Returns `<bpffs>/ballast`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the folder where the maps of this version are pinned.
    pub fn maps(&self) -> PathBuf {
        self.root.join(version())
    }

    /// Returns the folder where arrays of programs are pinned, by the ids of the programs that use them.
    pub fn calls(&self) -> PathBuf {
        self.maps().join(map_names::CALLS)
    }

    /// Returns the folder where links are pinned.
    pub fn links(&self) -> PathBuf {
        self.root.join("links")
    }

    /// Returns the folder with a mark for each device that has Ballast's filters.
    pub fn filters(&self) -> PathBuf {
        self.root.join("filters")
    }

    /// Returns the folder with a mark for each device whose qdisc Ballast created.
    pub fn qdiscs(&self) -> PathBuf {
        self.root.join("qdiscs")
    }

    /// Whether programs are attached that use the maps of this version; if so, the maps are filled.
    pub(super) fn is_current(&self) -> bool {
        let attached = entries(&self.links()).is_ok_and(|names| !names.is_empty());
        attached && map_names::ALL.iter().all(|name| self.points_here(name))
    }

    /// Whether the short path of a map leads to the map of this version.
    fn points_here(&self, name: &str) -> bool {
        fs::read_link(self.root.join(name)).is_ok_and(|to| to == Path::new(&version()).join(name))
    }

    /// Checks that only root can write to the folders of the maps.
    pub(super) fn require_owner(&self) -> Result<(), Error> {
        require_owner(&self.root)?;
        require_owner(&self.maps())
    }
}

/// Moves a pin below `root` that is not what it should be out of the way; returns its new path.
pub(super) fn refuse(root: &Path, path: &Path) -> Result<PathBuf, Error> {
    let refused = root.join("refused");
    make(&refused)?;
    let name = path.file_name().unwrap_or_default();
    let mut target = refused.join(name);
    for number in 1.. {
        if !target.exists() {
            break;
        }
        target = refused.join(format!("{}_{number}", name.to_string_lossy()));
    }
    fs::rename(path, &target).map_err(Error::file("move", path))?;
    Ok(target)
}

/// Checks that only root can write to the folders of the maps below this bpffs.
pub fn require_owner_of(bpffs: &Path) -> Result<(), Error> {
    Paths::new(bpffs).require_owner()
}

fn version() -> String {
    format!("v{ABI_VERSION}")
}

/// Ballast's pins, locked by this process.
#[derive(Debug)]
pub struct Pins {
    paths: Paths,
    /// Whether this process has just mounted the bpffs.
    pub mounted: bool,
    bpffs: PathBuf,
    /// The newest last. A lock on an unmounted bpffs keeps that bpffs alive, and with it all links that are pinned only
    /// there.
    locks: Mutex<Vec<Held>>,
}

/// A lock, and the device and inode of the directory that it is on.
#[derive(Debug)]
struct Held {
    on: (u64, u64),
    _lock: Lock,
}

impl Pins {
    /// Finds or mounts the bpffs, creates Ballast's directories, and takes the lock.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        let paths = Paths::new(bpffs);
        let (mounted, lock) = occupy(bpffs, &paths)?;
        Ok(Self { paths, mounted, bpffs: bpffs.to_owned(), locks: Mutex::new(vec![lock]) })
    }

    /// Mounts a bpffs and creates Ballast's directories again if those that [`Pins::open`] found or created are gone: an
    /// operator unmounted the bpffs, or mounted another one over it.
    pub fn restore(&self) -> Result<(), Error> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        let found = identity(self.paths.root()).ok();
        if found.is_none() || locks.last().map(|held| held.on) != found {
            locks.push(occupy(&self.bpffs, &self.paths)?.1);
        }
        Ok(())
    }

    /// Returns the paths of the pins.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Whether an earlier agent attached programs that use the maps of this version.
    pub fn is_current(&self) -> bool {
        self.paths.is_current()
    }

    /// Whether the short path of a map leads to the map of this version.
    pub(super) fn points_here(&self, name: &str) -> bool {
        self.paths.points_here(name)
    }

    /// Removes the short path of a map, before a new map takes its place.
    pub fn remove_short_path(&self, name: &str) -> Result<(), Error> {
        let link = self.paths.root.join(name);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", &link)(error)),
            _ => Ok(()),
        }
    }

    /// Makes the maps of this version the current ones: the short paths lead to them.
    pub fn make_current(&self) -> Result<(), Error> {
        for name in map_names::ALL.iter().chain(map_names::OPTIONAL).chain(&[segments::FOLDER]) {
            if !self.points_here(name) {
                self.remove_short_path(name)?;
                let link = self.paths.root.join(name);
                symlink(Path::new(&version()).join(name), &link).map_err(Error::file("link", &link))?;
            }
        }
        Ok(())
    }

    /// Whether any hook has a pinned link.
    pub fn has_links(&self) -> bool {
        entries(&self.paths.links()).is_ok_and(|names| !names.is_empty())
    }

    /// Moves a pin that is not what it should be out of the way; returns its new path.
    pub fn refuse(&self, path: &Path) -> Result<PathBuf, Error> {
        refuse(&self.paths.root, path)
    }

    /// Removes the maps of other versions; returns their directories.
    pub fn retire_other_versions(&self) -> Result<Vec<PathBuf>, Error> {
        let current = version();
        let mut retired = Vec::new();
        for name in entries(&self.paths.root).map_err(Error::file("list", &self.paths.root))? {
            let number = name.strip_prefix('v').and_then(|rest| rest.parse::<u32>().ok());
            if number.is_some() && name != current {
                let path = self.paths.root.join(name);
                fs::remove_dir_all(&path).map_err(Error::file("remove", &path))?;
                retired.push(path);
            }
        }
        Ok(retired)
    }
}

/// Finds or mounts the bpffs, creates Ballast's directories, and takes the lock; returns whether it mounted the bpffs.
fn occupy(bpffs: &Path, paths: &Paths) -> Result<(bool, Held), Error> {
    let mounted = ensure_bpffs(bpffs)?;
    make(paths.root())?;
    let failed = Error::file("lock", paths.root());
    let taken = lock(paths.root()).and_then(|lock| Ok((lock, identity(paths.root())?)));
    let (taken, on) = taken.map_err(failed)?;
    let lock = taken.ok_or_else(|| in_use(bpffs))?;
    for directory in [paths.maps(), paths.links(), paths.filters(), paths.qdiscs()] {
        make(&directory)?;
    }
    Ok((mounted, Held { on, _lock: lock }))
}

/// Returns device and inode of a path.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

pub(super) fn in_use(bpffs: &Path) -> Error {
    Error::InUse { path: bpffs.join(DIRECTORY), what: "bpffs", flag: "--bpffs" }
}

/// Creates a directory that only its owner may enter. An existing directory is made such a one if only root can have put
/// anything into it: any user may create one on a bpffs of mode 1777, the kernel's default.
pub(super) fn make(path: &Path) -> Result<(), Error> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            require_owner(path)?;
            // Every user who can open it can lock it.
            let is_open = path.metadata().is_ok_and(|found| found.mode() & 0o077 != 0);
            let close = || fs::set_permissions(path, PermissionsExt::from_mode(0o700));
            if is_open { close().map_err(Error::file("chmod", path)) } else { Ok(()) }
        }
        made => made.map_err(Error::file("create directory", path)),
    }
}

/// Checks that a path is a directory (not a symbolic link), owned by root or this process's user, and not writable by group
/// or others.
fn require_owner(path: &Path) -> Result<(), Error> {
    let found = fs::symlink_metadata(path).map_err(Error::file("stat", path))?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let why = if !found.is_dir() {
        "is not a directory".to_owned()
    } else if ![0, rustix::process::geteuid().as_raw()].contains(&owner) {
        format!("belongs to user {owner}")
    } else if mode & 0o022 != 0 {
        format!("is writable by others than its owner (mode {mode:04o})")
    } else {
        return Ok(());
    };
    Err(Error::NotOurs { path: path.to_owned(), why })
}

/// Returns the names of a directory's entries, sorted; none if the directory does not exist.
pub(super) fn entries(directory: &Path) -> io::Result<Vec<String>> {
    let read = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    let mut names = Vec::new();
    for entry in read {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_user_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ballast");
        make(&path).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        make(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o700);
        let refused = |why: &str| {
            let error = make(&path).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("--bpffs"), "{error}");
        };
        for mode in [0o720, 0o702, 0o1777] {
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            refused("is writable by others");
        }
        fs::remove_dir(&path).unwrap();
        symlink(dir.path(), &path).unwrap();
        refused("is not a directory");
    }
}
