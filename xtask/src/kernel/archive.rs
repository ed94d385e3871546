//! A distribution's archive, whatever this machine's own sources are: apt with lists, sources and keys of its own. apt checks
//! the index's signature, and each package against the index.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::line::Distribution;
use crate::cross::Arch;
use crate::exec::Cmd;
use crate::{apt, log, workspace};

/// Debian's keys; every Debian has them.
const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The same in Ubuntu's package of its keys, which Debian has, too.
const UBUNTU_KEYS: &str = "usr/share/keyrings/ubuntu-archive-keyring.gpg";
/// Where that package is.
const WITH_UBUNTU_KEYS: &str = "trixie";

/// Some suites of a distribution, for one architecture.
#[derive(Debug)]
pub struct Archive {
    root: PathBuf,
    arch: Arch,
}

impl Archive {
    /// Opens it, and fetches its lists if there are none.
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

    /// Fetches the lists.
    pub fn update(&self) -> Result<()> {
        log::timed(&format!("lists of packages for {}", self.root.display()), || {
            self.apt("apt-get").args(["-qq", "update"]).run()
        })
    }

    /// Names of packages that begin so.
    pub fn names(&self, beginning: &str) -> Result<String> {
        self.apt("apt-cache").args(["pkgnames", beginning]).read()
    }

    /// Downloads a package into a folder, and returns its file.
    pub fn download(&self, package: &str, dir: &Path) -> Result<PathBuf> {
        let get = || self.apt("apt-get").args(["-qq", "download", package]).dir(dir);
        if get().quiet().run().is_err() {
            // Old lists name files that the mirror has replaced.
            self.update()?;
            get().run()?;
        }
        let files = entries(dir);
        let of_package = |path: &PathBuf| file_name(path).starts_with(&format!("{package}_"));
        files.into_iter().find(of_package).with_context(|| format!("apt-get left no file for {package}"))
    }

    /// Downloads packages with all that they depend on, and returns the files.
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
            // Nothing is installed, as far as it knows.
            "Dir::State::status=/dev/null".to_owned(),
            format!("Dir::Cache={root}/cache"),
            format!("APT::Architecture={}", self.arch.debian()),
            format!("APT::Architectures={}", self.arch.debian()),
            // The sandbox user cannot write to our folder.
            "APT::Sandbox::User=root".to_owned(),
        ];
        options.iter().fold(Cmd::new(program), |cmd, option| cmd.args(["-o", option]))
    }
}

/// Ubuntu's keys, out of a package that Debian vouches for.
fn ubuntu_keys() -> Result<PathBuf> {
    let dir = workspace::cache()?.join("archives/ubuntu-keys");
    let keys = dir.join(UBUNTU_KEYS);
    if !keys.exists() {
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let debian = Archive::open(Distribution::Debian, &[WITH_UBUNTU_KEYS], Arch::HOST)?;
        let package = debian.download("ubuntu-keyring", &dir)?;
        Cmd::new("dpkg-deb").arg("-x").arg(&package).arg(&dir).run()?;
    }
    Ok(keys)
}

/// What a folder holds, sorted.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// A file's name; empty if it is no text.
pub fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
