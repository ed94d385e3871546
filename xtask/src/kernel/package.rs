//! Debian's kernel packages: the newest of a line, unpacked into the cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::exec::Cmd;
use crate::{apt, say, workspace};

/// What the tests need and Debian builds as modules; some are built in on other kernels.
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

/// Parts of the package that we keep: 300 MB of drivers are no use to us.
const WANTED: [&str; 7] = [
    "*/boot/vmlinuz-*",
    "*/modules.*",
    "*/kernel/net/*",
    "*/kernel/lib/*",
    "*/kernel/crypto/*",
    "*/kernel/drivers/net/tun.ko*",
    "*/kernel/drivers/net/veth.ko*",
];

/// Says beside them which parts were kept: a cache that another version of this tool filled may lack some.
const KEPT: &str = "parts";

/// An unpacked kernel.
#[derive(Debug)]
pub struct Kernel {
    image: PathBuf,
    modules: PathBuf,
    release: String,
}

impl Kernel {
    /// The file to boot.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// What `uname -r` will say.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The module files to load, each after those it needs.
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
        let image = entries(&dir.join("boot")).find(|path| stem(path).starts_with("vmlinuz-"))?;
        let release = stem(&image).strip_prefix("vmlinuz-")?.to_owned();
        let roots = ["lib/modules", "usr/lib/modules"].map(|root| dir.join(root).join(&release));
        let modules = roots.into_iter().find(|root| root.join("modules.dep").exists())?;
        Some(Self { image, modules, release })
    }
}

/// The kernel of that line: from the cache, else by apt.
pub fn get(version: &str) -> Result<Kernel> {
    let dir = workspace::cache()?.join("kernels").join(version);
    if let Some(kernel) = Kernel::open(&dir) {
        return Ok(kernel);
    }
    if !apt::exists() {
        bail!("no apt-get here: Debian's kernel packages are out of reach");
    }
    let package = if let Some(package) = newest(&names()?, version) {
        package
    } else {
        apt::update()?;
        newest(&names()?, version).ok_or_else(|| anyhow!("apt offers no kernel {version}"))?
    };
    say::timed(&format!("download and unpack {package}"), || unpack(&package, &dir))?;
    Kernel::open(&dir).with_context(|| format!("{package} holds no kernel with modules"))
}

fn names() -> Result<String> {
    Cmd::new("apt-cache").args(["pkgnames", "linux-image-"]).read()
}

/// The package with the highest version of a line such as `6.1`, of the plain flavour.
fn newest(names: &str, version: &str) -> Option<String> {
    let of_line = |name: &&str| {
        let rest = name.strip_prefix("linux-image-").and_then(|rest| rest.strip_suffix("-amd64"));
        let rest = rest.and_then(|rest| rest.strip_prefix(version)).and_then(|rest| rest.strip_prefix('.'));
        rest.is_some_and(|rest| {
            !["cloud", "rt"].iter().any(|flavour| rest.split('-').any(|word| word == *flavour))
        })
    };
    names.lines().filter(of_line).max_by_key(|name| numbers(name)).map(str::to_owned)
}

/// The numbers in a name, so that 6.1.0-9 comes before 6.1.0-56.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn unpack(package: &str, dir: &Path) -> Result<()> {
    let unfinished = dir.with_extension("unfinished");
    let shown = || format!("cannot work in {}", unfinished.display());
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(shown)?;
    }
    fs::create_dir_all(&unfinished).with_context(shown)?;
    download(package, &unfinished)?;
    let deb = entries(&unfinished).find(|path| path.extension().is_some_and(|ext| ext == "deb"));
    let deb = deb.with_context(|| format!("apt-get left no file for {package}"))?;
    // A shell for its pipe: the package is a tar archive inside an ar archive.
    Cmd::new("sh")
        .args([
            "-c",
            r#"set -e; deb=$1; shift; dpkg-deb --fsys-tarfile "$deb" | tar -x --wildcards "$@""#,
            "sh",
        ])
        .arg(&deb)
        .args(WANTED)
        .dir(&unfinished)
        // tar complains about patterns that match nothing; what counts is looked for below.
        .quiet()
        .run()
        .or_else(|error| if unfinished.join("boot").is_dir() { Ok(()) } else { Err(error) })?;
    fs::remove_file(&deb).with_context(shown)?;
    for root in ["lib/modules", "usr/lib/modules"] {
        for modules in entries(&unfinished.join(root)) {
            let base = unfinished.join(root.trim_end_matches("lib/modules"));
            Cmd::new("/sbin/depmod").arg("-b").arg(base).arg(stem(&modules)).read()?;
        }
    }
    fs::write(unfinished.join(KEPT), WANTED.join("\n")).with_context(shown)?;
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    fs::rename(&unfinished, dir).with_context(shown)
}

fn download(package: &str, dir: &Path) -> Result<()> {
    // The sandbox user cannot write to our folder.
    let get =
        || Cmd::new("apt-get").args(["-qq", "-o", "APT::Sandbox::User=root", "download", package]).dir(dir);
    if get().quiet().run().is_ok() {
        return Ok(());
    }
    // Old lists name files that the mirror has replaced.
    apt::update()?;
    get().run()
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter()
}

fn stem(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Module files in an order in which they can be loaded; those that the kernel lacks are left out.
fn load_order<'a>(dependencies: &'a str, modules: &[&str]) -> Vec<&'a str> {
    let mut order = Vec::new();
    for module in modules {
        let line = dependencies.lines().find_map(|line| {
            let (file, needs) = line.split_once(':')?;
            (module_name(file) == *module).then_some((file, needs))
        });
        let Some((file, needs)) = line else { continue };
        // modules.dep names the farthest dependency last.
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
    fn the_newest_plain_kernel_of_the_line_is_taken() {
        let names = "linux-image-6.1.0-9-amd64\nlinux-image-6.1.0-56-amd64\nlinux-image-6.1.0-57-cloud-amd64\n\
                     linux-image-6.1.0-58-amd64-dbg\nlinux-image-6.1.0-58-amd64-unsigned\nlinux-image-6.1.0-58-rt-amd64\n\
                     linux-image-6.12.117+deb12-amd64\nlinux-image-6.12-amd64\n";
        assert_eq!(newest(names, "6.1").as_deref(), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(newest(names, "6.12").as_deref(), Some("linux-image-6.12.117+deb12-amd64"));
        assert_eq!(newest(names, "5.10"), None);
    }

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
    fn a_module_comes_after_those_it_needs_and_once() {
        let dependencies = "kernel/net/802/stp.ko: kernel/net/llc/llc.ko\nkernel/net/llc/llc.ko:\n\
                            kernel/net/bridge/bridge.ko.xz: kernel/net/802/stp.ko kernel/net/llc/llc.ko\n";
        assert_eq!(
            load_order(dependencies, &["bridge", "stp", "absent"]),
            ["kernel/net/llc/llc.ko", "kernel/net/802/stp.ko", "kernel/net/bridge/bridge.ko.xz"]
        );
    }
}
