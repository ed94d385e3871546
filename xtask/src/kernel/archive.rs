//! Packages of other releases of a distribution. apt runs with lists of its own, and with the sources of a machine of that
//! distribution, in which another suite replaces the machine's. apt checks the signature of the index, and each package
//! against the index.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::line::Distribution;
use crate::cross::Arch;
use crate::exec::Cmd;
use crate::{apt, log, workspace};

/// A machine whose apt sources are used: this one, or one whose root folder is mounted here.
#[derive(Debug)]
pub struct Machine {
    root: PathBuf,
    distribution: Distribution,
    /// Code name of its release, such as `bookworm`.
    pub suite: String,
}

impl Machine {
    /// Reads the distribution of the machine with this root folder.
    pub fn at(root: &Path) -> Result<Self> {
        let file = root.join("etc/os-release");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let id = field(&text, "ID").unwrap_or_default();
        let Some(distribution) = Distribution::ALL.into_iter().find(|known| known.id() == id) else {
            bail!("{} names neither Debian nor Ubuntu, which package the kernels: {id}", file.display());
        };
        let suite = field(&text, "VERSION_CODENAME");
        let suite =
            suite.with_context(|| format!("{} names no release (VERSION_CODENAME)", file.display()))?;
        Ok(Self { root: root.to_owned(), distribution, suite: suite.to_owned() })
    }

    /// Returns apt's sources for other suites: the first is the name of a release, others add a suffix (`trixie-security`).
    /// A suffix of which the machine has no source is left out.
    fn sources(&self, suites: &[&str], arch: Arch) -> Result<String> {
        let root = self.root.to_str().context("the root folder is not UTF-8")?;
        let listed = Cmd::new("apt-get")
            .args(["-o", &format!("Dir={root}"), "indextargets", "--format", "$(RELEASE) $(REPO_URI)"])
            // Also sources of which there are no lists yet.
            .args(["--no-release-info", "Created-By: Packages", "Component: main"])
            .read()?;
        let root = root.trim_end_matches('/');
        let keys = format!("{root}/usr/share/keyrings/{}-archive-keyring.gpg", self.distribution.id());
        ensure!(fs::exists(&keys).unwrap_or(false), "{keys} is missing: it has the keys of the archive");
        let release = suites.first().copied().unwrap_or_default();
        let mut sources = String::new();
        for suite in suites {
            let own = format!("{}{}", self.suite, suite.strip_prefix(release).unwrap_or_default());
            let uri = listed.lines().find_map(|line| line.strip_prefix(&own)?.strip_prefix(' '));
            if let Some(uri) = uri {
                // A list of mirrors is a file of the machine.
                let uri = uri.replace("file:/", &format!("file:{root}/"));
                let line =
                    ["deb [arch=", arch.debian(), " signed-by=", &keys, "] ", &uri, " ", suite, " main\n"];
                sources.extend(line);
            } else if *suite == release {
                bail!("apt has no source of {own}, from which {suite} could be had, too");
            }
        }
        Ok(sources)
    }
}

/// Returns a field of `/etc/os-release`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.trim_matches('"'))
}

/// Some suites of a distribution for one architecture.
#[derive(Debug)]
pub struct Archive {
    root: PathBuf,
    arch: Arch,
}

impl Archive {
    /// Opens the archive, and fetches its package lists if there are none or the sources have changed.
    pub fn open(machine: &Machine, distribution: Distribution, suites: &[&str], arch: Arch) -> Result<Self> {
        ensure!(apt::exists(), "no apt-get here: packages of kernels are out of reach");
        ensure!(
            machine.distribution == distribution,
            "{} is of {}: --apt-root names the root folder of a machine with apt sources of {}",
            machine.root.display(),
            machine.distribution.id(),
            distribution.id()
        );
        let name = format!("{}-{}", suites.join("-"), arch.debian());
        let root = workspace::cache()?.join("archives").join(name);
        let archive = Self { root, arch };
        let sources = machine.sources(suites, arch)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_with_and_without_quotes() {
        let text = "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=\"noble\"\n";
        assert_eq!(field(text, "ID"), Some("ubuntu"));
        assert_eq!(field(text, "VERSION_CODENAME"), Some("noble"));
        assert_eq!(field("ID=fedora\n", "VERSION_CODENAME"), None);
    }

    /// Makes the root folder of a machine; `false` if there is no apt here to read it.
    fn machine(root: &Path, os: &str, sources: &str, keys: &str) -> bool {
        for (path, text) in [("etc/os-release", os), ("etc/apt/sources.list", sources), (keys, "")] {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        apt::exists()
    }

    #[test]
    fn another_suite_comes_from_the_machines_own_mirrors() {
        let dir = tempfile::tempdir().unwrap();
        let sources = "deb http://mirror.test/debian stable main\ndeb http://mirror.test/debian bookworm main contrib\n\
                       deb http://safe.test/debian bookworm-security main\n";
        let keys = "usr/share/keyrings/debian-archive-keyring.gpg";
        if !machine(dir.path(), "ID=debian\nVERSION_CODENAME=bookworm\n", sources, keys) {
            return;
        }
        let machine = Machine::at(dir.path()).unwrap();
        let signed = format!("signed-by={}/{keys}", dir.path().display());
        assert_eq!(
            machine.sources(&["trixie", "trixie-security", "trixie-updates"], Arch::Arm).unwrap(),
            format!(
                "deb [arch=arm64 {signed}] http://mirror.test/debian/ trixie main\n\
                 deb [arch=arm64 {signed}] http://safe.test/debian/ trixie-security main\n"
            )
        );
        let error = Archive::open(&machine, Distribution::Ubuntu, &["jammy"], Arch::X86).unwrap_err();
        assert!(error.to_string().contains("--apt-root"), "{error}");
    }

    #[test]
    fn a_list_of_mirrors_is_read_below_the_machines_root() {
        let dir = tempfile::tempdir().unwrap();
        let sources = "deb mirror+file:/etc/apt/mirrors.txt noble main\n";
        let keys = "usr/share/keyrings/ubuntu-archive-keyring.gpg";
        if !machine(dir.path(), "ID=ubuntu\nVERSION_CODENAME=noble\n", sources, keys) {
            return;
        }
        let sources =
            Machine::at(dir.path()).unwrap().sources(&["jammy", "jammy-updates"], Arch::X86).unwrap();
        let mirrors = format!(" mirror+file:{}/etc/apt/mirrors.txt/ jammy main\n", dir.path().display());
        assert!(sources.ends_with(&mirrors) && sources.lines().count() == 1, "{sources}");
    }
}
