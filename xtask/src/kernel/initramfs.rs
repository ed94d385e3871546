//! The initramfs of a booted kernel: busybox, kernel modules, our programs and one init script.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::boot::{BOOTED, MARKER};
use crate::cross::{self, Arch};
use crate::exec::{self, Cmd};

/// Directory of our programs in the initramfs.
const PROGRAMS: &str = "/ballast";

/// Contents of the initramfs besides busybox and the libraries.
#[derive(Debug)]
pub struct Contents {
    /// File tree with tools and libraries to start from, for an architecture that is not this machine's.
    pub base: Option<PathBuf>,
    /// Architecture of our programs, whose debug information is removed.
    pub strip: Arch,
    /// Names of our programs in the initramfs, and their files.
    pub programs: Vec<(&'static str, PathBuf)>,
    /// Tools of this machine to copy.
    pub tools: Vec<PathBuf>,
    /// Kernel modules, in loading order.
    pub modules: Vec<PathBuf>,
}

/// Writes the initramfs.
pub fn write(archive: &Path, contents: &Contents) -> Result<()> {
    let root = archive.with_extension("root");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    }
    let programs = contents.programs.iter();
    let mut files: Vec<_> =
        programs.map(|(name, path)| (path.clone(), Path::new(PROGRAMS).join(name))).collect();
    fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
    match &contents.base {
        Some(base) => Cmd::new("cp").arg("-a").arg(base.join(".")).arg(&root).run()?,
        None => files.extend(tools_here(contents, &files)?),
    }
    for dir in ["bin", "dev", "proc", "run", "sys", "tmp", "modules"] {
        let dir = root.join(dir);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    for (from, to) in files {
        copy(&from, &root.join(to.strip_prefix("/").unwrap_or(&to)))?;
    }
    let folder = root.join(PROGRAMS.trim_start_matches('/'));
    contents.programs.iter().try_for_each(|(name, _)| cross::strip(&folder.join(name), contents.strip))?;
    let mut modules = Vec::new();
    for (position, module) in contents.modules.iter().enumerate() {
        modules.push(copy_module(module, &root.join("modules"), position)?);
    }
    let init = root.join("init");
    fs::write(&init, script(&modules)).context("cannot write the init script")?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
        .context("cannot make the init script runnable")?;
    Cmd::new("sh")
        .args(["-c", r#"find . | cpio --quiet -o -H newc >"$1""#, "sh"])
        .arg(archive)
        .dir(&root)
        .run()?;
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}

/// Returns this machine's tools and the libraries of all programs, as pairs of source and destination.
fn tools_here(contents: &Contents, programs: &[(PathBuf, PathBuf)]) -> Result<Vec<(PathBuf, PathBuf)>> {
    let busybox = exec::which("busybox").context("no busybox here")?;
    let mut files = vec![(busybox, PathBuf::from("/bin/busybox"))];
    files.extend(contents.tools.iter().map(|path| (path.clone(), Path::new("/usr/sbin").join(name(path)))));
    // busybox's shell prefers its own `ip` to the one in PATH; a plain shell does not.
    files.push((exec::which("sh").context("no shell here")?, PathBuf::from("/bin/sh")));
    let mut libraries = BTreeSet::new();
    for (from, _) in files.iter().chain(programs) {
        // ldd fails for a static program, which has no libraries.
        libraries.extend(libraries_of(&Cmd::new("ldd").arg(from).try_read().unwrap_or_default()));
    }
    files.extend(libraries.into_iter().map(|path| (path.clone(), path)));
    Ok(files)
}

/// Returns the init script: it mounts file systems, loads modules, runs the tests, prints the marker with their exit
/// status, and powers off.
fn script(modules: &[String]) -> String {
    let mut text = String::from(
        "#!/bin/busybox sh\n\
         /bin/busybox --install -s /bin 2>/dev/null\n\
         export PATH=/usr/sbin:/sbin:/usr/bin:/bin HOME=/tmp\n\
         mount -t proc proc /proc\n\
         mount -t sysfs sysfs /sys\n\
         mount -t devtmpfs devtmpfs /dev\n\
         mount -t tmpfs tmpfs /tmp\n\
         mount -t tmpfs tmpfs /run\n\
         mount -t cgroup2 cgroup2 /sys/fs/cgroup\n\
         mount -t bpf bpf /sys/fs/bpf\n\
         ip link set lo up\n",
    );
    for module in modules {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "insmod /modules/{module}");
    }
    let _ = writeln!(text, "echo {BOOTED} $(uname -r)");
    let _ = writeln!(
        text,
        "BALLAST_BIN={PROGRAMS}/ballast BALLAST_OWN_CLOCK=1 RUST_BACKTRACE=1 {PROGRAMS}/netns --kernel-smoke"
    );
    let _ = writeln!(text, "echo {MARKER} $?");
    text.push_str("poweroff -f\n");
    text
}

/// Returns the absolute paths that ldd prints.
fn libraries_of(ldd: &str) -> Vec<PathBuf> {
    let paths = ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    paths.map(PathBuf::from).collect()
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let shown = || format!("cannot copy {} to {}", from.display(), to.display());
    fs::create_dir_all(to.parent().unwrap_or(to)).with_context(shown)?;
    fs::copy(from, to).with_context(shown)?;
    Ok(())
}

/// Copies a module, uncompressed because busybox cannot read xz, and returns its new file name.
fn copy_module(from: &Path, dir: &Path, position: usize) -> Result<String> {
    let file = name(from);
    let Some(plain) = file.strip_suffix(".xz") else {
        let to = format!("{position}-{file}");
        copy(from, &dir.join(&to))?;
        return Ok(to);
    };
    let to = format!("{position}-{plain}");
    let script = r#"xz -dc "$1" >"$2""#;
    Cmd::new("sh").args(["-c", script, "sh"]).arg(from).arg(dir.join(&to)).run()?;
    Ok(to)
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_the_loader_are_copied() {
        let ldd = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        assert_eq!(
            libraries_of(ldd),
            [PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"), "/lib64/ld-linux-x86-64.so.2".into()]
        );
    }

    #[test]
    fn the_marker_carries_the_tests_own_status() {
        let script = script(&["0-veth.ko".into()]);
        let tests = script.find("netns --kernel-smoke\n").unwrap();
        assert!(
            script[tests..].starts_with(&format!("netns --kernel-smoke\necho {MARKER} $?\n")),
            "{script}"
        );
        assert!(script.find("insmod /modules/0-veth.ko\n").unwrap() < tests);
    }
}
