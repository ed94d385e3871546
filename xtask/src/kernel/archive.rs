//! Package archives of distributions, independent of the sources configured on this machine: apt runs with its own lists,
//! sources and keys. apt checks the signature of the index, and each package against the index.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::line::Distribution;
use crate::cross::Arch;
use crate::exec::Cmd;
use crate::{apt, log, workspace};

/// Debian's keyring, which every Debian system has.
const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Ubuntu's keyring, as a path inside the package `ubuntu-keyring`, which Debian also has.
const UBUNTU_KEYS: &str = "usr/share/keyrings/ubuntu-archive-keyring.gpg";
/// Debian suite to download `ubuntu-keyring` from.
const UBUNTU_KEYRING_SUITE: &str = "trixie";

/// Some suites of a distribution for one architecture.
#[derive(Debug)]
pub struct Archive {
    root: PathBuf,
    arch: Arch,
}

impl Archive {
    /// Opens the archive, and fetches its package lists if there are none or the sources have changed.
    pub fn open(distribution: Distribution, suites: &[&str], arch: Arch) -> Result<Self> {
        if !apt::exists() {
            bail!("no apt-get here: packages of kernels are out of reach");
        }
        let name = format!("{}-{}", suites.join("-"), arch.debian());
        let root = workspace::cache()?.join("archives").join(name);
        let archive = Self { root, arch };
        let keys = match distribution {
            Distribution::Debian => PathBuf::from(DEBIAN_KEYS),
            Distribution::Ubuntu => ubuntu_keys()?,
        };
        if !keys.exists() {
            bail!("{} is missing: install Debian's keys (package debian-archive-keyring)", keys.display());
        }
        let lines = suites.iter().map(|suite| {
            format!(
                "deb [arch={} signed-by={}] {} {suite} main\n",
                arch.debian(),
                keys.display(),
                distribution.mirror(suite)
            )
        });
        let sources: String = lines.collect();
        let file = archive.root.join("sources.list");
        let shown = || format!("cannot work in {}", archive.root.display());
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(archive.root.join(folder)).with_context(shown)?;
        }
        if fs::read_to_string(&file).ok().as_deref() != Some(&sources) {
            fs::write(&file, sources).with_context(shown)?;
            archive.update()?;
        }
        Ok(archive)
    }

    /// Fetches the package lists.
    pub fn update(&self) -> Result<()> {
        log::timed(&format!("lists of packages for {}", self.root.display()), || {
            self.apt("apt-get").args(["-qq", "update"]).run()
        })
    }

    /// Returns the names of the packages that start with `beginning`, one per line.
    pub fn names(&self, beginning: &str) -> Result<String> {
        self.apt("apt-cache").args(["pkgnames", beginning]).read()
    }

    /// Downloads a package into a directory, and returns the path of its file.
    pub fn download(&self, package: &str, dir: &Path) -> Result<PathBuf> {
        let get = || self.apt("apt-get").args(["-qq", "download", package]).dir(dir);
        if get().quiet().run().is_err() {
            // Old lists may name files that the mirror has replaced.
            self.update()?;
            get().run()?;
        }
        let files = entries(dir);
        let of_package = |path: &PathBuf| file_name(path).starts_with(&format!("{package}_"));
        files.into_iter().find(of_package).with_context(|| format!("apt-get left no file for {package}"))
    }

    /// Downloads packages with all their dependencies, and returns the files.
    pub fn download_all(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        self.apt("apt-get")
            .args(["-qq", "-y", "--no-install-recommends", "--download-only", "install"])
            .args(packages)
            .run()?;
        let files = entries(&self.root.join("cache/archives"));
        Ok(files.into_iter().filter(|path| path.extension().is_some_and(|ext| ext == "deb")).collect())
    }

    fn apt(&self, program: &str) -> Cmd {
        let root = self.root.display();
        let options = [
            format!("Dir::Etc::sourcelist={root}/sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            format!("Dir::State::lists={root}/lists"),
            // apt is to assume that no package is installed.
            "Dir::State::status=/dev/null".to_owned(),
            format!("Dir::Cache={root}/cache"),
            format!("APT::Architecture={}", self.arch.debian()),
            format!("APT::Architectures={}", self.arch.debian()),
            // apt's sandbox user cannot write to our directory.
            "APT::Sandbox::User=root".to_owned(),
        ];
        options.iter().fold(Cmd::new(program), |cmd, option| cmd.args(["-o", option]))
    }
}

/// Returns the path of Ubuntu's keyring, extracted from a package that Debian's keys authenticate.
fn ubuntu_keys() -> Result<PathBuf> {
    let dir = workspace::cache()?.join("archives/ubuntu-keys");
    let keys = dir.join(UBUNTU_KEYS);
    if !keys.exists() {
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let debian = Archive::open(Distribution::Debian, &[UBUNTU_KEYRING_SUITE], Arch::HOST)?;
        let package = debian.download("ubuntu-keyring", &dir)?;
        Cmd::new("dpkg-deb").arg("-x").arg(&package).arg(&dir).run()?;
    }
    Ok(keys)
}

/// Returns the entries of a directory, sorted.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Returns the name of a file; empty if it is not UTF-8.
pub fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
