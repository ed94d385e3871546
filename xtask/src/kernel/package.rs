//! Kernel packages: the newest kernel of a line, unpacked into the cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::archive::{Archive, Machine, entries, file_name};
use super::line::Line;
use crate::cross::Arch;
use crate::exec::Cmd;
use crate::{log, workspace};

/// Modules that the tests need and distributions do not build in; other kernels have some of them built in.
const MODULES: [&str; 10] = [
    "veth",
    "tun",
    "sch_ingress",
    "cls_bpf",
    "bridge",
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "crc32c_generic",
    "sctp",
];

/// Patterns of the files to unpack; the 300 MB of other drivers are not needed.
const WANTED: [&str; 8] = [
    "*/boot/vmlinuz-*",
    "*/vmlinuz",
    "*/modules.*",
    "*/kernel/net/*",
    "*/kernel/lib/*",
    "*/kernel/crypto/*",
    "*/kernel/drivers/net/tun.ko*",
    "*/kernel/drivers/net/veth.ko*",
];

/// File beside the unpacked parts with their patterns: a cache that another version of this tool filled may lack some parts.
const KEPT: &str = "parts";

/// An unpacked kernel.
#[derive(Debug)]
pub struct Kernel {
    image: PathBuf,
    modules: PathBuf,
    release: String,
}

impl Kernel {
    /// Returns the path of the kernel image to boot.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Returns the kernel's release, as `uname -r` prints it.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Returns the module files to load, each after its dependencies.
    pub fn modules(&self) -> Result<Vec<PathBuf>> {
        let file = self.modules.join("modules.dep");
        let dependencies =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(load_order(&dependencies, &MODULES).into_iter().map(|path| self.modules.join(path)).collect())
    }

    fn open(dir: &Path) -> Option<Self> {
        if fs::read_to_string(dir.join(KEPT)).ok()? != WANTED.join("\n") {
            return None;
        }
        let roots = ["lib/modules", "usr/lib/modules"].map(|root| dir.join(root));
        let mut modules = roots.iter().flat_map(|root| entries(root));
        let modules = modules.find(|root| root.join("modules.dep").exists())?;
        let release = file_name(&modules).to_owned();
        // Since 7.2, Debian keeps the image beside the modules.
        let places = [dir.join(format!("boot/vmlinuz-{release}")), modules.join("vmlinuz")];
        let image = places.into_iter().find(|image| image.exists())?;
        Some(Self { image, modules, release })
    }
}

/// Returns the newest kernel of a line, from the cache or else from the archive, with the apt sources of the machine that has
/// the root folder `apt_root`.
pub fn get(line: &Line, arch: Arch, apt_root: &Path) -> Result<Kernel> {
    let dir = workspace::cache()?.join("kernels").join(format!("{}-{}", line.name, arch.debian()));
    if let Some(kernel) = Kernel::open(&dir) {
        return Ok(kernel);
    }
    let archive = Archive::open(&Machine::at(apt_root)?, line.distribution, line.suites, arch)?;
    let package = line
        .newest(&archive.names("linux-image-")?, arch)
        .with_context(|| format!("{} has no kernel {}", line.suites.join(", "), line.name))?;
    log::timed(&format!("download and unpack {package}"), || {
        unpack(&archive, &line.packages(&package), &dir)
    })?;
    Kernel::open(&dir).with_context(|| format!("{package} holds no kernel with modules"))
}

fn unpack(archive: &Archive, packages: &[String], dir: &Path) -> Result<()> {
    let unfinished = dir.with_extension("unfinished");
    let shown = || format!("cannot work in {}", unfinished.display());
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(shown)?;
    }
    fs::create_dir_all(&unfinished).with_context(shown)?;
    for package in packages {
        let deb = archive.download(package, &unfinished)?;
        // A shell is needed for the pipe: the package is a tar archive inside an ar archive. tar complains about patterns
        // that match nothing; `Kernel::open` checks for the required files.
        let script = r#"deb=$1; shift; dpkg-deb --fsys-tarfile "$deb" | tar -x --wildcards "$@" || true"#;
        Cmd::new("sh").args(["-c", script, "sh"]).arg(&deb).args(WANTED).dir(&unfinished).quiet().run()?;
        fs::remove_file(&deb).with_context(shown)?;
    }
    for root in ["lib/modules", "usr/lib/modules"] {
        for modules in entries(&unfinished.join(root)) {
            let base = unfinished.join(root.trim_end_matches("lib/modules"));
            Cmd::new("/sbin/depmod").arg("-b").arg(base).arg(file_name(&modules)).read()?;
        }
    }
    fs::write(unfinished.join(KEPT), WANTED.join("\n")).with_context(shown)?;
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    fs::rename(&unfinished, dir).with_context(shown)
}

/// Returns the module files in an order in which they can be loaded, without modules that the kernel lacks.
fn load_order<'a>(dependencies: &'a str, modules: &[&str]) -> Vec<&'a str> {
    let mut order = Vec::new();
    for module in modules {
        let line = dependencies.lines().find_map(|line| {
            let (file, needs) = line.split_once(':')?;
            (module_name(file) == *module).then_some((file, needs))
        });
        let Some((file, needs)) = line else { continue };
        // modules.dep lists the deepest dependency last.
        for path in needs.split_whitespace().rev().chain([file]) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    order
}

fn module_name(file: &str) -> &str {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_was_filled_with_other_parts_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("boot/vmlinuz-6.1.0-9-amd64", "");
        write("lib/modules/6.1.0-9-amd64/modules.dep", "");
        assert!(Kernel::open(dir.path()).is_none());
        write(KEPT, "*/boot/vmlinuz-*");
        assert!(Kernel::open(dir.path()).is_none());
        write(KEPT, &WANTED.join("\n"));
        assert_eq!(Kernel::open(dir.path()).unwrap().release(), "6.1.0-9-amd64");
    }

    #[test]
    fn a_kernel_is_found_in_both_layouts() {
        for image in ["boot/vmlinuz-7.2.13-amd64", "usr/lib/modules/7.2.13-amd64/vmlinuz"] {
            let dir = tempfile::tempdir().unwrap();
            for file in [image, "usr/lib/modules/7.2.13-amd64/modules.dep", KEPT] {
                let path = dir.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, WANTED.join("\n")).unwrap();
            }
            let kernel = Kernel::open(dir.path()).unwrap();
            assert_eq!((kernel.release(), kernel.image()), ("7.2.13-amd64", &*dir.path().join(image)));
        }
    }

    #[test]
    fn a_module_comes_after_those_it_needs_and_once() {
        let dependencies = "kernel/net/802/stp.ko: kernel/net/llc/llc.ko\nkernel/net/llc/llc.ko:\n\
                            kernel/net/bridge/bridge.ko.xz: kernel/net/802/stp.ko kernel/net/llc/llc.ko\n";
        assert_eq!(
            load_order(dependencies, &["bridge", "stp", "absent"]),
            ["kernel/net/llc/llc.ko", "kernel/net/802/stp.ko", "kernel/net/bridge/bridge.ko.xz"]
        );
    }
}
