//! Finds the mount point of the cgroup2 hierarchy.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proxy_common::config::POD_CGROUPS;

/// The inode number of the root of a cgroup hierarchy. The root of a mount inside a container has another one.
const HIERARCHY_ROOT: u64 = 1;

/// Why there is no cgroup to attach to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// The list of mounts could not be read.
    #[error("cannot read /proc/self/mountinfo: {0}; give the cgroup2 directory with --cgroup-root")]
    Mounts(#[source] io::Error),
    /// No mount is a cgroup2.
    #[error(
        "no cgroup2 is mounted; run `mount -t cgroup2 cgroup2 /sys/fs/cgroup` (or mount the host's cgroup2 into the container) and give its path with --cgroup-root"
    )]
    NotMounted,
    /// The cgroup2 hierarchy could not be mounted.
    #[error("cannot mount cgroup2 at {}: {source}; give another mount point with --cgroup-root", path.display())]
    Mount {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory cannot be read.
    #[error("cannot use {}: {source}; give the cgroup2 directory with --cgroup-root", path.display())]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A cgroup to attach socket programs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupRoot {
    /// Its directory.
    pub path: PathBuf,
    /// Whether it is the root of the whole hierarchy. If not, sockets of processes outside it are not translated: this
    /// is intended for a cgroup that the operator names, and a mistake in a container that sees only its own part.
    pub whole: bool,
}

/// Returns the cgroup2 root of this machine: the directory that the operator names, or the mount of the whole
/// hierarchy, or else the first cgroup2 mount. The first version of cgroups may be mounted beside it.
pub fn find(named: Option<&Path>) -> Result<CgroupRoot, CgroupError> {
    if let Some(path) = named {
        return check_root(path);
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(CgroupError::Mounts)?;
    let mut first = None;
    for path in self::mounts(&mounts, "cgroup2") {
        match check_root(&path) {
            Ok(root) if root.whole => return Ok(root),
            root => first = first.or(Some(root)),
        }
    }
    first.unwrap_or(Err(CgroupError::NotMounted))
}

/// Like [`find`], but mounts cgroup2 at the given path, or at the usual one, if it is not mounted; also returns whether it did.
pub fn find_or_mount(named: Option<&Path>) -> Result<(CgroupRoot, bool), CgroupError> {
    let place = match (find(named), named) {
        (Ok(root), Some(path)) if !is_cgroup2(path) => {
            drop(root);
            path
        }
        (Err(CgroupError::NotMounted), None) => Path::new("/sys/fs/cgroup"),
        (Err(CgroupError::Unreadable { source, .. }), Some(path))
            if source.kind() == io::ErrorKind::NotFound =>
        {
            path
        }
        (found, _) => return found.map(|root| (root, false)),
    };
    let failed = |source| CgroupError::Mount { path: place.to_owned(), source };
    fs::create_dir_all(place).map_err(failed)?;
    // A mount would hide the files of the directory.
    if fs::read_dir(place).map_err(failed)?.next().is_some() {
        return Err(failed(io::ErrorKind::DirectoryNotEmpty.into()));
    }
    rustix::mount::mount(c"cgroup2", place, c"cgroup2", rustix::mount::MountFlags::empty(), None)
        .map_err(|errno| failed(errno.into()))?;
    check_root(place).map(|root| (root, true))
}

/// Number of levels below the root at which the kubelet's cgroup is looked for (`--cgroup-root` of the kubelet).
const LEVELS: usize = 5;
/// Maximum number of cgroups that are looked at.
const MOST: usize = 4096;

/// Returns the ids of the cgroups below which the kubelet puts the cgroups of pods, at the highest level that has any; unused
/// places are 0. The id of a cgroup is the inode number of its directory. An error is no answer: there may be such cgroups.
pub fn of_pods(root: &Path) -> io::Result<[u64; POD_CGROUPS]> {
    let mut level = vec![root.to_owned()];
    let mut left = MOST;
    for _ in 0..LEVELS {
        let mut folders = Vec::new();
        for folder in &level {
            let entries = match fs::read_dir(folder) {
                // The cgroup was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound && folder != root => continue,
                entries => entries?,
            };
            let entries = entries.filter_map(Result::ok);
            let entries = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            let before = folders.len();
            folders.extend(entries.map(|entry| entry.path()).take(left));
            left -= folders.len() - before;
        }
        let mut ids: Vec<u64> =
            folders.iter().filter(|folder| is_of_pods(folder)).filter_map(|folder| id(folder)).collect();
        if !ids.is_empty() {
            ids.sort_unstable();
            let mut first = [0; POD_CGROUPS];
            first.iter_mut().zip(ids).for_each(|(place, id)| *place = id);
            return Ok(first);
        }
        level = folders;
    }
    Ok([0; POD_CGROUPS])
}

/// Whether the kubelet's cgroup driver (`cgroupfs` or `systemd`) gives this name to the cgroup of all pods.
fn is_of_pods(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
}

fn id(folder: &Path) -> Option<u64> {
    folder.metadata().ok().map(|metadata| metadata.ino())
}

fn is_cgroup2(path: &Path) -> bool {
    /// `CGROUP2_SUPER_MAGIC` of `include/uapi/linux/magic.h`.
    const MAGIC: rustix::fs::FsWord = 0x6367_7270;
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == MAGIC)
}

fn check_root(path: &Path) -> Result<CgroupRoot, CgroupError> {
    let metadata =
        path.metadata().map_err(|source| CgroupError::Unreadable { path: path.to_owned(), source })?;
    Ok(CgroupRoot { path: path.to_owned(), whole: metadata.ino() == HIERARCHY_ROOT })
}

/// Returns the mount points of a type of file system in text of the format of `proc_pid_mountinfo(5)`.
pub(crate) fn mounts(mountinfo: &str, wanted: &str) -> Vec<PathBuf> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let kind = after.split(' ').next()?;
            let point = before.split(' ').nth(4)?;
            (kind == wanted).then(|| PathBuf::from(unescape(point)))
        })
        .collect()
}

/// Decodes space, tab, newline and backslash, which the kernel writes as `\` and three octal digits.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
22 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw
25 22 0:22 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw
27 25 0:24 / /sys/fs/cgroup/systemd rw,nosuid shared:11 - cgroup cgroup rw,name=systemd
";

    #[test]
    fn the_second_version_is_found_beside_the_first() {
        assert_eq!(mounts(HYBRID, "cgroup2"), [Path::new("/sys/fs/cgroup/unified")]);
        assert_eq!(mounts(HYBRID, "cgroup"), [Path::new("/sys/fs/cgroup/systemd")]);
    }

    #[test]
    fn optional_fields_and_spaces_do_not_disturb() {
        let lines = "1 2 0:3 / /a\\040b\\134c rw - cgroup2 none rw\n\
                     4 5 0:6 /sub /d rw shared:1 master:2 unbindable - cgroup2 none rw\n\
                     broken line\n";
        assert_eq!(mounts(lines, "cgroup2"), [Path::new("/a b\\c"), Path::new("/d")]);
    }

    #[test]
    fn the_cgroup_of_pods_is_found_at_its_highest_level() {
        let root = std::env::temp_dir().join(format!("ballast-cgroup-{}", std::process::id()));
        let make = |path: &str| fs::create_dir_all(root.join(path)).unwrap();
        make("system.slice/docker.service");
        assert_eq!(of_pods(&root).unwrap(), [0; POD_CGROUPS]);
        make("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice");
        make("system.slice/docker.service/inner/kubepods");
        let id = |path: &str| id(&root.join(path)).unwrap();
        assert_eq!(of_pods(&root).unwrap(), [id("kubelet.slice/kubelet-kubepods.slice"), 0]);
        make("kubepods.slice");
        assert_eq!(of_pods(&root).unwrap(), [id("kubepods.slice"), 0]);
        make("kubepods/burstable");
        let mut both = [id("kubepods.slice"), id("kubepods")];
        both.sort_unstable();
        assert_eq!(of_pods(&root).unwrap(), both);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_missing_directory_names_the_flag() {
        let error = find(Some(Path::new("/nonexistent"))).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("--cgroup-root"), "{error}");
    }
}
